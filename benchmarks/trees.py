# SPDX-License-Identifier: Apache-2.0
"""Time a training step over prefix trees beside packed samples: prompts with several responses.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/trees.py

A Llama of 2 layers and width 256 under spar.parallelize; responses of log-normal lengths. The step is the
CPU time of the slowest rank, forward and backward with the head and the log-probabilities: median of --turns.
"Pairs" are those of queries and keys. "Work" is that of the slowest rank, by gather or ring, of the mean.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import spar
from spar.data import PackedSamples, PrefixTree

VOCABULARY = 2048


class Case(NamedTuple):
    """A prompt of so many tokens, and responses of a median length, or turns that part again."""

    prompt: int
    responses: int
    median: int

    def samples(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(VOCABULARY, (self.prompt,), generator=generator)
        found = []
        for _ in range(self.responses):
            length = self.median * math.exp(0.6 * float(torch.randn((), generator=generator)))
            response = torch.randint(VOCABULARY, (max(2, round(length)),), generator=generator)
            found.append(torch.cat([prompt, response]))
        return found


CASES = Case(1024, 16, 192), Case(2048, 16, 128), Case(512, 8, 512)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if dist.get_rank() == 0:
        print(
            "prompt responses   method   tokens          pairs  work  packed   tree    edges    times as fast"
        )
    for case in CASES:
        for method, layout in (("ulysses", "even"), ("gather", "balanced")):
            compare(case, method, layout, args)
    dist.destroy_process_group()


def compare(case: Case, method: str, layout: str, args: argparse.Namespace) -> None:
    samples = case.samples()
    mask = [torch.arange(len(each)) >= case.prompt for each in samples]
    group = dist.group.WORLD
    tree, packed = PrefixTree(samples, group, layout=layout), PackedSamples(list(map(len, samples)), group)
    row, places = tree.trees[0], packed.layouts[0]
    model = make_model(args.width)
    of_tree, of_packed = (parallelized(model, method, at) for at in ("even", lambda _: places))
    head = model.lm_head.weight

    def over_packed() -> Tensor:
        positions = packed.pack([torch.arange(len(each)) for each in samples])
        batch = {"input_ids": packed.pack(samples), "position_ids": positions}
        hidden = of_packed(**batch, use_cache=False).last_hidden_state
        labels = packed.shard(samples, shift=1, fill=-100)
        logprobs, _ = spar.token_logprobs((hidden, head), labels, places)
        return mean(logprobs, packed, places)

    def over_tree() -> Tensor:
        hidden = of_tree(**row.batch(), use_cache=False).last_hidden_state
        logprobs, _ = spar.token_logprobs((hidden, head), row.shard_labels(), row.layout)
        return mean(row.expand(logprobs), tree, row.samples)

    def over_edges() -> Tensor:
        hidden = of_tree(**row.batch(), use_cache=False).last_hidden_state
        edges = tree.edges(mask)
        logprobs, _ = spar.token_logprobs((edges.of(hidden), head), edges.labels, edges.layout)
        return mean(edges.expand(logprobs), tree, row.samples)

    def mean(logprobs: Tensor, of: PackedSamples, at: spar.SequenceLayout) -> Tensor:
        return spar.masked_mean(-logprobs, of.shard(mask, shift=1), at, by="sample", averaged_by=group)

    steps = {"packed": over_packed, "tree": over_tree, "edges": over_edges}
    losses = {name: float(step().detach()) for name, step in steps.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses
    times = timed(steps, [*model.parameters()], args.turns)
    if dist.get_rank() == 0:
        report(case, method, row, sum(map(len, samples)), times)


def make_model(width: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    return transformers.LlamaForCausalLM(config)


def parallelized(model: Any, method: str, layout: Any) -> Any:
    """Return another model of the same parameters, without the head."""
    made = transformers.LlamaModel(model.config)
    for name, module in made.named_modules():
        own = model.model.get_submodule(name)
        for key in [*module._parameters]:
            module._parameters[key] = own._parameters[key]
    spar.parallelize(made, dist.group.WORLD, method=method, layout=layout, outputs="parts")
    return made


def timed(steps: dict[str, Callable[[], Tensor]], parameters: list[Tensor], turns: int) -> dict[str, float]:
    """Return each step's CPU seconds on the slowest rank."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            dist.barrier()
            start = time.process_time()
            torch.autograd.grad(step(), parameters)
            slowest = torch.tensor([time.process_time() - start])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[name].append(float(slowest))
    return {name: statistics.median(each) for name, each in seconds.items()}


def report(case: Case, method: str, row: Any, tokens: int, times: dict[str, float]) -> None:
    depths = row.position_ids[0] + 1
    pairs = sum(len(places) * (len(places) + 1) // 2 for places in row.places) / float(depths.sum())
    works = torch.zeros(row.layout.group.size()).index_add(0, row.owner, depths.float())
    faster = " ".join(f"{times['packed'] / times[name]:5.2f}" for name in ("tree", "edges"))
    print(
        f"{case.prompt:6} {case.responses:3} of {case.median:4}  {method:8} "
        f"{tokens:6} to {row.layout.total:5} {pairs:6.2f} {float(works.max() / works.mean()):6.3f} "
        + " ".join(f"{seconds:6.2f} s" for seconds in times.values())
        + f"  {faster}"
    )


if __name__ == "__main__":
    main()
