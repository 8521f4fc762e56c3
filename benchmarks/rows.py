# SPDX-License-Identifier: Apache-2.0
"""Time exchanges of indexed rows beside all_gather and gloo's all_to_all_single of the same rows.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/rows.py

Points in a cube, whose rows are sharded evenly: a row for each of a random index, and the 8 nearest of each
point, in random order and along a Morton curve. "exchange" moves the distinct rows of others, packed before,
and gloo the same; "gather of others" reads them where they lie. Each time is that of the slowest rank, best
of --turns, in ms, and behind it the CPU time. With --simulated 64 the plan of one of as many ranks is timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import spar
from spar._exchange import row_plan
from spar._exchange.layouts import even

NEAREST, PER_CELL = 8, 12


def morton(points: Tensor, bits: int = 10) -> Tensor:
    """Return the order of points in [0, 1) along a Morton curve."""
    places = (points * 2**bits).long()
    code = torch.zeros_like(places[:, 0])
    for bit in range(bits):
        for dim in range(points.size(1)):
            code |= (places[:, dim] >> bit & 1) << (bit * points.size(1) + dim)
    return code.argsort()


def nearest(points: Tensor, own: Tensor) -> Tensor:
    """Return the NEAREST others of own points in a cube, among those of their cell and the 26 around it."""
    side = max(1, round((len(points) / PER_CELL) ** (1 / 3)))
    shape = torch.tensor([(side + 2) ** 2, side + 2, 1])

    def cells(x: Tensor) -> Tensor:
        return torch.sum(((x * side).long().clamp(0, side - 1) + 1) * shape, -1)

    of_cells = cells(points)
    order, counts = of_cells.argsort(), of_cells.bincount(minlength=(side + 2) ** 3)
    begins, most = counts.cumsum(0) - counts, int(counts.max())
    around = (torch.cartesian_prod(*[torch.arange(-1, 2)] * 3) * shape).sum(-1)
    found = []
    for part in own.split(2000):
        near = cells(points[part])[:, None] + around
        places = begins[near][..., None] + torch.arange(most)
        others = order[places.clamp(max=len(points) - 1)].flatten(1)
        away = (points[others] - points[part][:, None]).square().sum(-1)
        absent = torch.arange(most) >= counts[near][..., None]
        away.masked_fill_(absent.flatten(1) | (others == part[:, None]), torch.inf)
        found.append(others.gather(1, away.topk(NEAREST, largest=False).indices))
    return torch.cat(found)


def indexes(count: int, layout: spar.SequenceLayout) -> dict[str, Tensor]:
    """Return what this rank wants in each case."""
    own = layout.index()
    points = torch.rand(count, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {
        "random": torch.randint(count, (len(own),)),
        "nearest, random order": nearest(points, own),
        "nearest, along a curve": nearest(points[morton(points)], own),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--simulated", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.simulated:
        simulate(args)
        return
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    layout = spar.SequenceLayout.even(args.rows, dist.group.WORLD)
    x = torch.randn(len(layout.index()), args.width)
    for name, index in indexes(args.rows, layout).items():
        compare(name, index, x, layout, args.turns)
    dist.barrier()
    dist.destroy_process_group()


def compare(name: str, index: Tensor, x: Tensor, layout: spar.SequenceLayout, turns: int) -> None:
    rows = layout.rows(index)
    is_other = torch.ones(layout.total, dtype=torch.bool).index_fill(0, layout.index(), False)
    wanted = index.unique()
    wanted = wanted[is_other[wanted]]
    others = layout.rows(wanted)
    world, rank = dist.get_world_size(), dist.get_rank()
    asked = [wanted[(wanted >= low) & (wanted < low + size)] - low for low, size in shards(layout)]
    requests: list[Any] = [None] * world
    dist.all_gather_object(requests, asked)
    packed = x[torch.cat([each[rank] for each in requests])]
    counts = [[len(each[owner]) for each in requests] for owner in range(world)]
    received, sizes = x.new_empty(len(wanted), x.size(1)), [row[rank] for row in counts]
    steps: dict[str, Callable[[], Any]] = {
        "plan": lambda: layout.rows(index),
        "all_gather": lambda: layout.gather(x, 0, backward="sum"),
        "table": lambda: rows.table(x),
        "exchange": lambda: spar.all_to_all_single(packed, counts),
        "gloo": lambda: dist.all_to_all_single(received, packed, sizes, counts[rank]),
        "gather of others": lambda: others.gather(x),
        "gather": lambda: rows.gather(x),
    }
    times = timed(steps, turns)
    most = torch.tensor(len(wanted))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert torch.equal(received, others.gather(x))
    if rank == 0:
        share = int(most) / (layout.total * (world - 1) / world)
        print(f"{name}: {index.numel()} entries, {int(most)} rows received, {share:.1%} of all_gather's")
        print("  ", ", ".join([f"{step} {wall:.2f} ({cpu:.2f})" for step, (wall, cpu) in times.items()]))


def shards(layout: spar.SequenceLayout) -> list[tuple[int, int]]:
    sizes = layout.sizes
    return [(sum(sizes[:rank]), size) for rank, size in enumerate(sizes)]


def timed(steps: dict[str, Callable[[], Any]], turns: int) -> dict[str, tuple[float, float]]:
    """Return each step's best wall and CPU time on the slowest rank, in ms."""
    found = dict.fromkeys(steps, (torch.inf, torch.inf))
    for _ in range(turns):
        for name, step in steps.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            taken = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu]) * 1e3
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            best = torch.minimum(taken, torch.tensor(found[name]))
            found[name] = float(best[0]), float(best[1])
    return found


def simulate(args: argparse.Namespace) -> None:
    """Time the plan of rank 1 as if every other rank wanted of each owner what this one wants of it."""
    world, rank = args.simulated, 1
    low, high = args.rows * rank // world, args.rows * (rank + 1) // world
    points = torch.rand(args.rows, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    index = nearest(points[morton(points)], torch.arange(low, high))

    def exchanged(_: object, x: Tensor, __: object, note: str) -> Tensor:
        return x.repeat(world, 1) if note == "counts" else x

    call: Any = SimpleNamespace(input=index, world=world, rank=rank, name="", group=None)
    with mock.patch.object(row_plan, "_exchanged", exchanged):
        best = torch.inf
        for _ in range(args.turns):
            begin = time.process_time()
            row_plan.plan_rows(call, even(0, args.rows), False)
            best = min(best, time.process_time() - begin)
    print(f"the plan of one of {world} ranks, {index.numel()} entries: {best * 1e3:.1f} ms of CPU time")


if __name__ == "__main__":
    main()
