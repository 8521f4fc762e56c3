# SPDX-License-Identifier: Apache-2.0
"""Time the recurrences of hybrid models of transformers over a sharded sequence, by heads and by state.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/scans.py 2048 8192 32768

Recurrences with their exchanges, forward and backward, as models have them after
`spar.integrations.transformers.shard` with scan="heads" or "state": a gated delta rule of 4 key and 8 value
heads of 64, and Mamba 2 of 8 heads of 64, a state size of 64 and 1 group. transformers' own code, without
kernels. Median of the slowest rank; MB are what all ranks send in forward.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

import spar
from spar import SequenceLayout
from spar.integrations._transformers.scans import SCANS
from spar.integrations._transformers.tokens import Tokens

KEY_HEADS, HEADS, WIDTH = 4, 8, 64


def delta_rule(tokens: Tokens, local: int) -> Callable[[], Tensor]:
    q, k = (torch.randn(1, local, KEY_HEADS, WIDTH, requires_grad=True) for _ in range(2))
    v = torch.randn(1, local, HEADS, WIDTH, requires_grad=True)
    g, beta = -torch.rand(1, local, HEADS), torch.rand(1, local, HEADS)
    gates = {"g": g.requires_grad_(), "beta": beta.requires_grad_(), "use_qk_l2norm_in_kernel": True}
    name = "torch_chunk_gated_delta_rule"
    return lambda: SCANS[name].run(torch_chunk_gated_delta_rule, tokens, q, k, v, **gates)[0]


def mamba2(tokens: Tokens, local: int) -> Callable[[], Tensor]:
    x = torch.randn(1, local, HEADS, WIDTH, requires_grad=True)
    B, C = (torch.randn(1, local, 1, WIDTH, requires_grad=True) for _ in range(2))
    dt, A = torch.rand(1, local, HEADS, requires_grad=True), -torch.rand(HEADS)
    others: dict[str, Any] = {"chunk_size": 64, "D": torch.ones(HEADS)}
    run = SCANS["mamba2_chunk_scan"].run
    return partial(run, mamba2_chunk_scan, tokens, x, dt, A, B, C, **others)


def seconds_of(call: Callable[[], Tensor], turns: int) -> float:
    times = []
    for _ in range(turns + 1):
        dist.barrier()
        begin = time.perf_counter()
        call().sum().backward()
        elapsed = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        times.append(float(elapsed))
    return statistics.median(times[1:])


def sent() -> int:
    """Return the bytes that this rank's exchanges sent to others so far."""
    return sum(size for name, size in spar.memory_stats().items() if name.startswith("sent."))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tokens", nargs="*", type=int, default=[2048, 8192, 32768], help="of the sequence")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layout", choices=("even", "zigzag"), default="even")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"{world} ranks, {os.cpu_count()} cores, torch {torch.__version__}, float32, {args.layout}")
        columns = ("ms heads", "ms state", "ratio", "MB heads", "MB state")
        print(f"{'':>12} {'tokens':>7}", *(f"{column:>9}" for column in columns))
    for make in (delta_rule, mamba2):
        for total in args.tokens:
            layout = getattr(SequenceLayout, args.layout)(total)
            times, moved = [], []
            for scan in ("heads", "state"):
                call = make(Tokens(layout, scan=scan), layout.sizes[rank])
                times.append(1e3 * seconds_of(call, args.turns))
                before = sent()
                call()
                bytes_ = torch.tensor(float(sent() - before))
                dist.all_reduce(bytes_)
                moved.append(float(bytes_) / 1e6)
            if rank == 0:
                figures = [*times, times[1] / times[0], *moved]
                print(f"{make.__name__:>12} {total:7}", *(f"{x:9.2f}" for x in figures), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
