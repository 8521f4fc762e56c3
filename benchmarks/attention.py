"""Time spar.attention by each method, forward and backward, against the whole sequence in one process.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/attention.py

A rank computes a part of the work: with P ranks on cores of their own, the best time is that of one process
divided by P. Rank 0 computes the whole while the others wait. "exact": the largest difference from it.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import spar
from spar._commands.bench.timing import timed

METHODS = ("ulysses", "gather", "ring")


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def both(function: Callable[..., Tensor], inputs: Sequence[Tensor], upper: Tensor) -> tuple[Any, ...]:
    """Return the output and the gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, upper)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each number of tokens and direction")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(
            f"{world} ranks, {args.heads} heads, {args.key_heads} key heads of {args.width}, causal, float32"
        )
        print(
            f"{'tokens':>6} {'direction':10} {'one process':>11}",
            *(f"{m:>9} (x)" for m in METHODS),
            "  exact",
        )
    for tokens in args.tokens:
        layout = spar.SequenceLayout.zigzag(tokens)
        generator = torch.Generator().manual_seed(1)
        shapes = [(1, tokens, n, args.width) for n in (args.heads, *[args.key_heads] * 2, args.heads)]
        *inputs, upper = [torch.randn(shape, generator=generator) for shape in shapes]
        own = layout.index()
        mine = [x[:, own].contiguous() for x in inputs]
        expected = both(whole, inputs, upper)
        ways = [partial(spar.attention, layout=layout, causal=True, method=method) for method in METHODS]
        found = [both(way, mine, upper[:, own]) for way in ways]
        apart = max(
            float((a - b[:, own]).abs().max()) for each in found for a, b in zip(each, expected, strict=True)
        )
        runs: dict[str, list[Callable[[], Any]]] = {
            "forward": [partial(whole, *inputs), *(partial(way, *mine) for way in ways)],
            "both": [
                partial(both, whole, inputs, upper),
                *(partial(both, way, mine, upper[:, own]) for way in ways),
            ],
        }
        for direction, timing in runs.items():
            if rank > 0:
                timing[0] = lambda: None
            alone, *times = [time.median for time in timed(timing, args.seconds)]
            if rank == 0:
                shown = " ".join(f"{t * 1e3:6.2f} ({alone / t:4.2f})" for t in times)
                print(f"{tokens:6} {direction:10} {alone * 1e3:8.2f} ms {shown}  {apart:.1e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
