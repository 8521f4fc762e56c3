# SPDX-License-Identifier: Apache-2.0
"""Train by GRPO of TRL with its sequences sharded over ranks, beside one process.

    torchrun --standalone --nproc-per-node 2 examples/grpo.py [--tree]

The only line of spar is `install`. Prompts are the first words of topics of Python's own documentation, and
the reward is a completion's share of small letters. The ranks sample completions together, by the sharded
model. With --tree they compute what completions share once, such as their prompt. Rank 0 starts the same
training in one process, without spar: both must agree in each step.
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
from llm import documents, make_model

import spar.integrations.trainer

COLUMNS = ("loss", "reward", "grad_norm")
TOLERANCE = 1e-4  # of these in float32, whose sizes are about 1
PROMPT = 40  # bytes
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tree", action="store_true", help="compute what completions share once")
    parser.add_argument("--one-process", action="store_true", help="print the log without spar, and end")
    args = parser.parse_args()
    if "RANK" not in os.environ and not args.one_process:
        parser.error("start it with: torchrun --standalone --nproc-per-node 2 examples/grpo.py")
    return args


def make_tokenizer() -> Any:
    """Return a tokenizer whose tokens are bytes."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(256)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=chr(0), eos_token=chr(0))


def share_of_letters(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(ord("a") <= byte <= ord("z") for byte in ids) / len(ids) for ids in completion_ids]


def train(args: Namespace, folder: str) -> tuple[list[list[float]], Any]:
    """Return what each step logged, and the trainer."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        folder,
        use_cpu=True,
        bf16=False,
        max_steps=args.steps,
        num_generations=8,
        max_completion_length=12,
        per_device_train_batch_size=16,  # of a sequence group, here of all ranks
        learning_rate=0.01,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
    )
    prompts = [bytes(text[:PROMPT].tolist()).decode("latin-1") for text in documents()]
    trainer = GRPOTrainer(
        make_model(),
        share_of_letters,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=make_tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    log = trainer.state.log_history[: args.steps]  # its last entry is that of the whole run
    return [[entry[name] for name in COLUMNS] for entry in log], trainer


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
        spar.integrations.trainer.install(int(os.environ["WORLD_SIZE"]), prefix_tree=args.tree)
        logged, trainer = train(args, folder)
    world = dist.get_world_size()
    dist.destroy_process_group()
    if alone is None:
        return
    single = json.loads(alone.communicate()[0].splitlines()[-1])
    names = "  ".join(f"{name:>9}" for name in COLUMNS)
    print(f" step  {names}  {names}\n       {'one process':<31}  sharded")
    differences = []
    for step, (one, other) in enumerate(zip(single, logged, strict=True)):
        print(f"{step:5}  " + "  ".join(f"{x:9.6f}" for x in (*one, *other)))
        differences += [abs(a - b) for a, b in zip(one, other, strict=True)]
    print(trainer.sequences.report)
    if not max(differences) < TOLERANCE or not logged[-1][1] > logged[0][1]:
        sys.exit(f"steps differ by {max(differences):.1e}; allowed: {TOLERANCE:.0e}. Rewards must also rise")
    how = ", over prefix trees," if args.tree else ""
    print(f"proved: GRPO of TRL learns the same over {world} ranks{how} as in one process.")


if __name__ == "__main__":
    main()
