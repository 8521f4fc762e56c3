# SPDX-License-Identifier: Apache-2.0
"""Measure how much of an exchange remains visible behind a matrix product of about the same length.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/overlap.py

Each turn times, in all ranks at once: an all_to_all; an async one that is waited for at once; the product
alone; and the product between an async exchange's start and its wait. "Visible" is what the last takes longer
than the product, as a part of the async exchange alone, which has the same cores. Cores:

- own: each rank is pinned to a core of its own, which its thread for exchanges shares with the product;
- spare: rank 0 computes on the first core; its thread for exchanges and the other ranks, which only
  exchange, run on the others. With two cores in all, that is one: an exchange alone takes longer there;
- late: as own, but all ranks except rank 0 call that much later: rank 0 waits, which needs no core.

Figures are rank 0's medians.
"""

from __future__ import annotations

import os
import statistics
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import spar

MIB = 1 << 20
Times = dict[str, list[float]]


def timed(function: Callable[[], object], late: float = 0.0) -> float:
    dist.barrier()
    end = time.perf_counter() + late
    while time.perf_counter() < end:  # on its own core
        pass
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def product_like(seconds: float) -> Callable[[], Tensor]:
    """Return a matrix product that takes about so long, by the medians of several sizes."""
    side, rows = 256, 1024
    b = torch.randn(side, side)
    for _ in range(4):
        tall, result = torch.randn(rows, side), torch.empty(rows, side)
        took = []
        for _ in range(15):
            begin = time.perf_counter()
            torch.mm(tall, b, out=result)
            took.append(time.perf_counter() - begin)
        rows = max(1, round(rows * seconds / statistics.median(took)))
    tall, result = torch.randn(rows, side), torch.empty(rows, side)  # new memory would have page faults
    return lambda: torch.mm(tall, b, out=result)


def measure(x: Tensor, computes: bool, late: float, turns: int) -> Times:
    def exchange() -> object:
        return spar.all_to_all(x, None, 2, 1)

    def alone() -> object:
        y, work = spar.all_to_all(x, None, 2, 1, async_op=True)
        work.wait()
        return y

    length = statistics.median(timed(alone) for _ in range(20))
    longest = torch.tensor(length + late)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    product = product_like(longest.item()) if computes else lambda: torch.empty(0)

    def overlapped() -> object:
        y, work = spar.all_to_all(x, None, 2, 1, async_op=True)
        z = product()
        work.wait()
        return y, z

    calls = {"exchange": exchange, "alone": alone, "product": product, "overlapped": overlapped}
    times: Times = {name: [] for name in calls}
    for _ in range(turns):
        for name, function in calls.items():
            times[name].append(timed(function, late if name != "product" else 0.0))
    return times


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=25, help="of a rank's part")
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--late", type=float, default=5.0, help="milliseconds, for the last row")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world, cores = dist.get_rank(), dist.get_world_size(), sorted(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    tokens = round(options.mib * MIB / (24 * 256))
    x = torch.randn(1, tokens, 24, 128).to(torch.bfloat16)
    spar.init()
    if rank == 0:
        print(f"{world} ranks, {len(cores)} cores, {x.nbytes / MIB:.0f} MiB each")
        print("| cores | sync | async alone | product | both | visible |")
        print("|---|---|---|---|---|---|")
    for name in ("own", "spare", "late"):
        if name == "spare":
            os.sched_setaffinity(0, cores[1:] or cores)
            time.sleep(6)  # until the thread of the rows before has ended
            spar.all_to_all(x, None, 2, 1, async_op=True)[1].wait()  # its thread inherits these cores
            if rank == 0:
                os.sched_setaffinity(0, cores[:1])
        else:
            time.sleep(6)
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
        computes = name != "spare" or rank == 0
        late = options.late / 1000 if name == "late" else 0.0
        found = measure(x, computes, late if rank else 0.0, options.turns)
        if rank == 0:
            sync, alone, product, both = (1000 * statistics.median(times) for times in found.values())
            times = " | ".join(f"{time:.2f} ms" for time in (sync, alone, product, both))
            print(f"| {name} | {times} | {(both - product) / alone:.0%} |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
