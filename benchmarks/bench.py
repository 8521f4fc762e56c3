"""Time each operation, forward and backward, against two references interleaved in the same run.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench.py

The references:

- the usual formulation over torch.distributed (formulations.py), with which results are compared;
- Tensor.copy_ of the bytes that a rank must write, on all ranks at once, into memory that was touched before.

The time of a backward includes torch's engine. The engine alone is timed too, with a Function that returns
its gradient unchanged. Each way runs in five turns or more. A figure is the median over the turns of their
medians, or of their 99th percentiles. Prints a table; writes JSON and a heat map of the ratios.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import formulations
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

import spar

KIB, MIB = 1 << 10, 1 << 20
SIZES = (2 * KIB, 64 * KIB, MIB, 8 * MIB, 25 * MIB, 100 * MIB)  # bytes of a rank's part
TURNS = 5  # at least


@dataclass(frozen=True)
class Operation:
    """spar's function and the formulation's, for one input."""

    name: str
    ours: Callable[[Tensor], Tensor]
    theirs: Callable[[Tensor], Tensor]
    input: Tensor
    written: int  # bytes that one rank must write, forward
    written_back: int  # the same, backward


def operations(size: int) -> list[Operation]:
    """Return the operations on bf16 tensors of which each rank's part has about `size` bytes."""
    world, rank = dist.get_world_size(), dist.get_rank()
    heads = 8 if size == 2 * KIB else 24
    tokens = max(1, round(size / (heads * 256)))
    qkv = torch.randn(1, tokens, heads, 128).to(torch.bfloat16)
    width = 256 if size == 2 * KIB else 3072
    rows = max(
        4, round(size / (2 * width)) // 4 * 4
    )  # divisible into two chunks, and into sequences, on each rank
    whole = torch.randn(rows * world, width, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    lengths = [world * (rows // 4)] * 4
    table = spar.cal_split_sizes_multi(lengths, world)
    own = whole[rank * rows : (rank + 1) * rows].clone()
    part, total = own.nbytes, whole.nbytes
    return [
        Operation(
            "all_to_all",
            lambda x: spar.all_to_all(x, None, 2, 1),
            formulations.all_to_all,
            qkv,
            qkv.nbytes,
            qkv.nbytes,
        ),
        Operation(
            "split",
            lambda x: spar.split_forward_gather_backward(x, None, 0),
            formulations.split,
            whole,
            part,
            total,
        ),
        Operation(  # compare with the one before: the cost of a fused scale
            "unscaled split",
            lambda x: spar.split_forward_gather_backward(x, None, 0, grad_scale=None),
            formulations.unscaled_split,
            whole,
            part,
            total,
        ),
        Operation(
            "gather",
            lambda x: spar.gather_forward_split_backward(x, None, 0),
            formulations.gather,
            own,
            total,
            part,
        ),
        Operation(
            "zigzag split",
            lambda x: spar.load_balanced_split_forward_gather_backward(x, None),
            formulations.zigzag_split,
            whole,
            part,
            total,
        ),
        Operation(
            "zigzag gather",
            lambda x: spar.load_balanced_gather_forward_split_backward(x, None),
            formulations.zigzag_gather,
            own,
            total,
            part,
        ),
        Operation(
            "packed split",
            lambda x: spar.packed_data_split_forward_gather_backward(x, None, lengths),
            lambda x: formulations.packed_split(x, lengths),
            whole,
            part,
            total,
        ),
        Operation(
            "packed gather",
            lambda x: spar.packed_data_gather_forward_split_backward(x, table, None),
            lambda x: formulations.packed_gather(x, lengths),
            own,
            total,
            part,
        ),
    ]


@dataclass
class Time:
    """In seconds."""

    median: float
    p99: float


@dataclass
class Row:
    """`bytes`: what a rank must write. "recorded" is a forward whose input requires a gradient."""

    operation: str
    direction: str
    size: int
    bytes: int
    spar: Time
    formulation: Time
    copy: Time
    engine: Time | None = None  # torch's, which is a part of spar's and the formulation's time


def turn(function: Callable[[], Any], seconds: float) -> list[float]:
    """Time as many calls as fit, at least 3; all ranks make the same number."""
    dist.barrier()
    begin = time.perf_counter()
    function()
    count = least(seconds / (time.perf_counter() - begin))
    times = []
    for _ in range(max(3, min(2000, int(count)))):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return sorted(times)


def least(number: float) -> float:
    """Return the least of all ranks' numbers."""
    numbers = torch.tensor([number])
    dist.all_reduce(numbers, dist.ReduceOp.MIN)
    return float(numbers)


def timed(ways: list[Callable[[], Any]], seconds: float) -> list[Time]:
    """Time the ways in alternating turns, more of them if calls are short: the machine's speed changes."""
    begin = time.perf_counter()
    turns = [[turn(way, 0.0)] for way in ways]  # to warm up; not counted
    rounds = max(TURNS, min(25, int(least(seconds / (time.perf_counter() - begin)))))
    for _ in range(rounds):
        for way, found in zip(ways, turns, strict=True):
            found.append(turn(way, seconds / rounds / len(ways)))
    return [
        Time(
            statistics.median(statistics.median(times) for times in found[1:]),
            statistics.median(times[min(len(times) - 1, int(len(times) * 0.99))] for times in found[1:]),
        )
        for found in turns
    ]


class Identity(torch.autograd.Function):
    """The shortest Function in Python, for the cost of the engine around it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def copying(written: int) -> Callable[[], Tensor]:
    source, target = torch.ones(written, dtype=torch.uint8), torch.zeros(written, dtype=torch.uint8)
    return lambda: target.copy_(source)


def measure(operation: Operation, size: int, seconds: float) -> list[Row]:
    def fail(what: str) -> None:
        sys.exit(
            f"rank {dist.get_rank()}: {what} of {operation.name} ({size} bytes) differs from the formulation"
        )

    def grad_of(function: Callable[[Tensor], Tensor], grad: Tensor | None) -> Callable[[], Tensor]:
        y = function(leaf)
        given = torch.ones_like(y) if grad is None else grad
        return lambda: torch.autograd.grad(y, leaf, given, retain_graph=True)[0]

    x, leaf = operation.input, operation.input.detach().requires_grad_()
    y = operation.ours(x)
    if not torch.equal(y, operation.theirs(x)):
        fail("the result")
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    ours, theirs = grad_of(operation.ours, grad), grad_of(operation.theirs, grad)
    if not torch.equal(ours(), theirs()):
        fail("the gradient")

    def row(direction: str, written: int, ways: list[Callable[[], Any]]) -> Row:
        times = timed([*ways[:2], copying(written), *ways[2:]], seconds)
        return Row(operation.name, direction, size, written, *times)

    forward: list[Callable[[], Any]] = [lambda: operation.ours(x), lambda: operation.theirs(x)]
    recorded: list[Callable[[], Any]] = [lambda: operation.ours(leaf), lambda: operation.theirs(leaf)]
    rows = [row("forward", operation.written, forward)]
    if size == SIZES[0]:  # at larger sizes it adds the same microseconds
        rows.append(row("recorded", operation.written, recorded))
    rows.append(row("backward", operation.written_back, [ours, theirs, grad_of(Identity.apply, None)]))
    return rows


def shown(size: float) -> str:
    return f"{size / MIB:.0f} MB" if size >= MIB else f"{size / KIB:.0f} KB"


def print_table(rows: list[Row]) -> None:
    titles = {"part": 7, "median": 10, "p99": 10, "GB/s": 6, "formulation": 12, "copy_": 10, "engine": 10}
    print(f"{'operation':24}", *(f"{title:>{width}}" for title, width in titles.items()))
    for row in rows:
        ours = row.spar.median
        print(
            f"{row.operation + ', ' + row.direction:24} {shown(row.size):>7} {ours * 1e6:7.1f} us "
            f"{row.spar.p99 * 1e6:7.1f} us {row.bytes / ours / 1e9:6.2f} "
            f"{row.formulation.median / ours:10.1f} x {ours / row.copy.median:8.2f} x"
            + (f" {row.engine.median * 1e6:7.1f} us" if row.engine else "")
        )
    print("formulation: how many times faster spar is; copy_: spar's time as a multiple of copy_'s;")
    print("engine: the part of the median that torch's engine takes")


def draw(path: Path, rows: list[Row], title: str) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.direction != "recorded"]
    names = list(dict.fromkeys(f"{row.operation}, {row.direction}" for row in rows))
    sizes = sorted({row.size for row in rows})
    panels: list[tuple[str, float, Callable[[Row], float]]] = [
        (
            "times faster than the usual formulation",
            100,
            lambda row: row.formulation.median / row.spar.median,
        ),
        ("times as fast as Tensor.copy_", 20, lambda row: row.copy.median / row.spar.median),
    ]
    figure = Figure(figsize=(13, 0.36 * len(names) + 1.6), layout="constrained")
    figure.suptitle(title)
    for axes, (meaning, most, ratio) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        values = [[0.0] * len(sizes) for _ in names]
        for row in rows:
            at = names.index(f"{row.operation}, {row.direction}"), sizes.index(row.size)
            values[at[0]][at[1]] = ratio(row)
            words = f"{ratio(row):.1f}" if ratio(row) < 100 else f"{ratio(row):.0f}"
            axes.text(at[1], at[0], words, ha="center", va="center", size=8)
        axes.imshow(values, aspect="auto", cmap="RdYlGn", norm=LogNorm(1 / most, most))
        axes.set_xticks(range(len(sizes)), [shown(size) for size in sizes])
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel="a rank's part", title=meaning)
    figure.savefig(path, dpi=90)


def read(path: Path) -> tuple[str, list[Row]]:
    facts = json.loads(path.read_text())
    rows = []
    for row in facts["rows"]:
        times = {name: Time(**value) for name, value in row.items() if isinstance(value, dict)}
        rows.append(Row(**{**row, **times}))
    return facts["title"], rows


def median_of(runs: list[list[Row]]) -> list[Row]:
    """Return the median of each figure over several runs."""

    def middle(times: list[Time]) -> Time:
        return Time(statistics.median(t.median for t in times), statistics.median(t.p99 for t in times))

    rows = []
    for same in zip(*runs, strict=True):
        times = {way: middle([getattr(row, way) for row in same]) for way in ("spar", "formulation", "copy")}
        engines = [row.engine for row in same if row.engine]
        rows.append(replace(same[0], **times, engine=middle(engines) if engines else None))
    return rows


def report(out: Path, title: str, rows: list[Row]) -> None:
    print_table(rows)
    facts = {"title": title, "spar": spar.__version__, "rows": [asdict(row) for row in rows]}
    Path(f"{out}.json").write_text(json.dumps(facts, indent=1))
    draw(Path(f"{out}.png"), rows, title)
    print(f"{title}: {out}.json, {out}.png")


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.6, help="for each operation, direction and size")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes of a rank's part")
    parser.add_argument("--only", default="", help="run the operations whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="OUT.json and OUT.png are written")
    parser.add_argument("--median", type=Path, nargs="+", help="report the median of these runs' JSON files")
    args = parser.parse_args()
    if args.median is None and "RANK" not in os.environ:
        parser.error("start it with: torchrun --standalone --nproc-per-node 2 benchmarks/bench.py")
    return args


def main() -> None:
    args = parse_arguments()
    if args.median:
        titles, runs = zip(*map(read, args.median), strict=True)
        report(args.out, f"{titles[0]}, median of {len(runs)} runs", median_of(list(runs)))
        return
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [size for size in SIZES if size <= args.largest]
    rows: list[Row] = []
    with tqdm(total=len(sizes) * 8, disable=rank != 0, ascii=True, mininterval=2.0) as bar:
        for size in sizes:
            for operation in operations(size):
                bar.set_postfix_str(f"{operation.name}, {shown(size)}")
                if args.only in operation.name:
                    rows += measure(operation, size, args.seconds)
                bar.update()
    rows.sort(key=lambda row: (row.operation, row.direction == "backward", row.size))
    if rank == 0:
        cores = len(os.sched_getaffinity(0))
        title = f"{world} ranks on {cores} cores, {spar.transport().name}, bf16, torch {torch.__version__}"
        report(args.out, title, rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
