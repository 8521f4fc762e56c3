# SPDX-License-Identifier: Apache-2.0
"""Print the cost of an exchange, from its plan, for 2 to 4,096 ranks in one process.

    python benchmarks/cost.py           # the plan
    python benchmarks/cost.py --nccl    # launches, messages and staged bytes over nccl (nccl_cost.py)
    python benchmarks/cost.py --host    # the host time of a call over nccl, without NCCL (host_cost.py)
    python benchmarks/cost.py --shm     # the same over shared memory, and of lists and backward

Bytes and messages of rank 0 are computed from its plan. The times to build a plan and to get a cached one are
measured, from Python. A rank's part has 24 MiB, bf16: [1, 3, 4096, 1024] for all_to_all, [12, 1048576] for
gathers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch

from spar import _C
from spar._exchange.layouts import WHOLE, even, packed, pair, zigzag

MIB = 1 << 20
WORLDS = (2, 4, 8, 64, 512, 4096)
Extents = tuple[int, ...]


def calls(world: int) -> Iterator[tuple[str, Extents, Extents]]:
    """Yield each op, with its input's extents and its arguments."""
    yield "all_to_all", (1, 3, 4096, 1024), pair(even(1, 3 * world), even(2, 4096))
    yield "gather", (12, MIB), pair(even(0, 12 * world), WHOLE)
    yield "zigzag gather", (12, MIB), pair(zigzag(0, 12 * world), WHOLE)
    yield "packed gather", (12, MIB), pair(packed(0, 12, [world] * 12), WHOLE)


def exchange(op: str, world: int, args: Extents) -> _C.Exchange:
    return _C.Exchange(op, "", world, 0, 2, (args,), 0, False, 1.0, 0)


def seconds(op: str, world: int, inputs: list[torch.Tensor], args: Extents, fresh: bool) -> float:
    """Return the shortest time of several."""
    times = []
    for _ in range(20):
        core = exchange(op, world, args)  # an exchange keeps its newest plan
        if fresh:
            _C.plan_limit(0)
            _C.plan_limit(1024)
        begin = time.perf_counter()
        core.plan(inputs, 0)
        times.append(time.perf_counter() - begin)
    return min(times)


def print_plans() -> None:
    print("| op | ranks | to others | written | messages, torch | words read, shm | new plan | cached plan |")
    print("|---|---|---|---|---|---|---|---|")
    for world in WORLDS:
        for op, extents, args in calls(world):
            inputs = [torch.empty(extents, dtype=torch.bfloat16)]
            made = exchange(op, world, args).plan(inputs, 0)[0]
            sent = sum(made.push_bytes)
            blocks = made.blocks("push")
            written = 0
            for _, _, _, _, run, loops in blocks:
                for extent, _, _ in loops:
                    run *= extent
                written += run
            messages = sum(size > 0 for size in made.push_bytes)
            new, known = (seconds(op, world, inputs, args, fresh) for fresh in (True, False))
            print(
                f"| {op} | {world} | {sent / MIB:.0f} MiB | {written / MIB:.0f} MiB | {messages} "
                f"| {2 * (world - 1)} | {new * 1e6:.1f} us | {known * 1e6:.1f} us |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--nccl", action="store_true", help="print what calls over nccl launch and stage")
    what.add_argument("--host", action="store_true", help="measure the host time of calls over nccl")
    what.add_argument("--shm", action="store_true", help="measure calls of 2 KB over shared memory")
    options = parser.parse_args()
    if options.nccl:
        import nccl_cost

        nccl_cost.table()
    elif options.host or options.shm:
        import host_cost

        host_cost.table((2,) if options.shm else (2, 8), options.shm)
    else:
        print_plans()


if __name__ == "__main__":
    main()
