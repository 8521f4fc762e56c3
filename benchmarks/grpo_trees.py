# SPDX-License-Identifier: Apache-2.0
"""Time a step of TRL's GRPO with and without `prefix_tree=True`: the generations of one prompt.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/grpo_trees.py

A Llama of 2 layers and width 256; completions end at random after --shortest tokens, and at 128. CPU seconds
of the slowest rank, medians of --turns trainings of --steps: of the loss with its log-probabilities and
backward, and of the whole step, generation included. Tokens are those that the model computes for a loss.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any, NamedTuple

import datasets
import torch
import torch.distributed as dist
import transformers
import trl
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from trees import VOCABULARY, make_model

import spar.integrations.trainer

LONGEST, END = 128, 0


class Step(NamedTuple):
    tokens: float
    loss: float  # seconds
    whole: float


class Timed(trl.GRPOTrainer):  # type: ignore[misc]
    """A trainer that notes what each step took, and how many tokens its model computed."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        start = time.process_time()
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        end = time.process_time()
        self.steps.append(Step(self.tokens, end - self.generated, end - start))
        return loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        batch = super()._prepare_inputs(inputs)
        self.generated = time.process_time()
        return batch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--shortest", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--generations", type=int, nargs="+", default=[8, 16])
    args = parser.parse_args()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    for count in args.generations:
        found: dict[bool, list[Step]] = {False: [], True: []}
        for _ in range(args.turns):
            for has_tree, steps in found.items():
                steps += train(args, count, has_tree)
        without, tree = (slowest(steps) for steps in found.values())
        if dist.get_rank() == 0:
            print(
                f"{count:2} generations: {without.tokens:.0f} to {tree.tokens:.0f} tokens; loss "
                f"{without.loss:.2f} to {tree.loss:.2f} s: {without.loss / tree.loss:.1f} times as fast; "
                f"step {without.whole:.2f} to {tree.whole:.2f} s: {without.whole / tree.whole:.1f} times"
            )
    dist.destroy_process_group()


def train(args: argparse.Namespace, count: int, has_tree: bool) -> list[Step]:
    """Return the steps of a training but the first, which sets up."""
    spar.integrations.trainer.install(int(os.environ["WORLD_SIZE"]), prefix_tree=has_tree)
    torch.manual_seed(0)
    prompts = torch.randint(1, VOCABULARY, (16, args.prompt))
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = Timed(
                make_model(args.width),
                lambda completions, **columns: [float(len(set(each))) for each in completions],
                args=arguments(folder, args, count),
                train_dataset=datasets.Dataset.from_dict({"prompt": [*map(text_of, prompts.tolist())]}),
                processing_class=make_tokenizer(),
            )
            trainer.steps = []
            trainer.model.register_forward_pre_hook(noting_tokens(trainer), with_kwargs=True)
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()
    finally:
        spar.integrations.trainer.uninstall()
    return list(trainer.steps[1:])


def arguments(folder: str, args: argparse.Namespace, count: int) -> Any:
    return trl.GRPOConfig(
        folder,
        use_cpu=True,
        bf16=False,
        max_steps=args.steps,
        num_generations=count,
        per_device_train_batch_size=count,  # of a sequence group, here of all ranks
        steps_per_generation=1,
        max_completion_length=LONGEST,
        generation_kwargs={"min_new_tokens": args.shortest, "sequence_bias": [[[END], 3.0]]},
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
    )


def noting_tokens(trainer: Timed) -> Any:
    def note(model: Any, args: Any, kwargs: Any) -> None:
        if "fused_lm_head" in kwargs:  # of a loss; generation passes none
            trainer.tokens = kwargs["input_ids"].numel()

    return note


def slowest(steps: list[Step]) -> Step:
    """Return the medians, of the slowest rank."""
    medians = torch.tensor([statistics.median(each) for each in zip(*steps, strict=True)])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return Step(*medians.tolist())


def text_of(ids: list[int]) -> str:
    return "".join(chr(0x4E00 + i) for i in ids)


def make_tokenizer() -> Any:
    """Return a tokenizer whose tokens are single characters."""
    vocabulary = {text_of([i]): i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=text_of([1])))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    end = text_of([END])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=end, eos_token=end)


if __name__ == "__main__":
    main()
