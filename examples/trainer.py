# SPDX-License-Identifier: Apache-2.0
"""Train by the Trainer of transformers with its sequences sharded over ranks, beside one process.

    torchrun --standalone --nproc-per-node 2 examples/trainer.py [--packed]

The only line of spar is `install`. The documents are topics of Python's own documentation. Rank 0 starts the
same training in one process, without spar: the losses must agree in each step, and those of evaluation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from typing import Any

import torch
import torch.distributed as dist
from llm import documents, largest_difference, make_model
from torch.nn.utils.rnn import pad_sequence

import spar.integrations.trainer

TOLERANCE = 1e-4  # relative, of losses in float32
TOKENS = 300  # at most, of a document
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--packed", action="store_true", help="documents in one row, without padding")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--one-process", action="store_true", help="print the losses without spar, and end")
    args = parser.parse_args()
    if "RANK" not in os.environ and not args.one_process:
        parser.error("start it with: torchrun --standalone --nproc-per-node 2 examples/trainer.py")
    return args


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = [torch.tensor(sample["input_ids"]) for sample in samples]
    masks = [torch.ones_like(each) for each in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence(masks, batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=-100),
    }


def train(args: Namespace, folder: str) -> tuple[list[float], Any]:
    """Return the losses of the steps and of evaluation, and the trainer."""
    from transformers import DataCollatorWithFlattening, PrinterCallback, Trainer, TrainingArguments

    samples = [{"input_ids": text[:TOKENS].tolist()} for text in documents()]
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=args.steps,
        per_device_train_batch_size=2,  # of a sequence group, here of all ranks
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
    )
    trainer = Trainer(
        make_model(),
        arguments,
        train_dataset=samples[4:],
        eval_dataset=samples[:4],
        data_collator=DataCollatorWithFlattening() if args.packed else pad,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]], trainer


def one_process() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--one-process"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # the ranks share the cores
    with tempfile.TemporaryDirectory() as folder:
        if args.one_process:
            print(json.dumps(train(args, folder)[0]))
            return
        alone = one_process() if os.environ["RANK"] == "0" else None
        spar.integrations.trainer.install(sequence_parallel_size=int(os.environ["WORLD_SIZE"]))
        losses, trainer = train(args, folder)
    world = dist.get_world_size()
    dist.destroy_process_group()
    if alone is None:
        return
    single = json.loads(alone.communicate()[0].splitlines()[-1])
    print(" step   one process   sharded")
    for step, (one, other) in enumerate(zip(single, losses, strict=True)):
        print(f"{step if step < args.steps else 'eval':>5}   {one:11.6f}   {other:.6f}")
    print(trainer.sequences.report)
    error = largest_difference(losses, single)
    if not error < TOLERANCE or not losses[-2] < losses[0]:
        sys.exit(f"losses differ by {error:.1e}, relative; allowed: {TOLERANCE:.0e}. They must also fall")
    print(f"proved: Trainer learns the same over {world} ranks as in one process.")


if __name__ == "__main__":
    main()
