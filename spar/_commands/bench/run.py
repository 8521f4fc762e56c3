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
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from operations import SMALLEST, Operation, operations
from timing import KIB, MIB, Time, copying, shown, timed
from torch import Tensor
from tqdm import tqdm

import spar

SIZES = (SMALLEST, 64 * KIB, MIB, 8 * MIB, 25 * MIB, 100 * MIB)  # bytes of a rank's part


@dataclass
class Row:
    """`bytes`: what a rank must write. "recorded" is a forward whose inputs require a gradient."""

    operation: str
    direction: str
    size: int
    bytes: int
    spar: Time
    formulation: Time
    copy: Time
    engine: Time | None = None  # torch's, which is a part of spar's and the formulation's time
    other: Time | None = None  # spar's in another way
    other_name: str = ""


class Identity(torch.autograd.Function):
    """The shortest Function in Python, for the cost of the engine around it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


Outputs = Tensor | list[Tensor] | tuple[Tensor, ...]


def listed(outputs: Outputs) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def measure(operation: Operation, size: int, seconds: float) -> list[Row]:
    def compare(what: str, ours: Outputs, theirs: Outputs) -> None:
        if not all(map(torch.equal, listed(ours), listed(theirs))):
            sys.exit(
                f"rank {dist.get_rank()}: {what} of {operation.name} ({size} bytes) differs from the "
                "formulation"
            )

    inputs = operation.inputs
    leaves = [x.detach().requires_grad_() for x in inputs]

    def grads_of(function: Callable[..., Outputs], grads: list[Tensor] | None) -> Callable[[], Outputs]:
        ys = listed(function(*leaves))
        given = [torch.ones_like(y) for y in ys] if grads is None else grads
        return lambda: torch.autograd.grad(ys, leaves, given, retain_graph=True)

    ways = [operation.ours, operation.theirs, *([operation.other] if operation.other else [])]
    ys = listed(operation.ours(*inputs))
    compare("the result", ys, operation.theirs(*inputs))
    generator = torch.Generator().manual_seed(2)
    upstream = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in ys]
    backward = [grads_of(way, upstream) for way in ways]
    compare("the gradient", backward[0](), backward[1]())
    backward.insert(2, grads_of(Identity.apply, None))

    def row(direction: str, written: int, ways: list[Callable[[], Any]]) -> Row:
        times = timed([*ways[:2], copying(written), *ways[2:]], seconds)
        ours, theirs, copy, *more = times
        engine = more.pop(0) if direction == "backward" else None
        other, name = more[0] if more else None, operation.other_name
        return Row(operation.name, direction, size, written, ours, theirs, copy, engine, other, name)

    rows = [row("forward", operation.written, [partial(way, *inputs) for way in ways])]
    if size == SIZES[0]:  # at larger sizes it adds the same microseconds
        rows.append(row("recorded", operation.written, [partial(way, *leaves) for way in ways]))
    rows.append(row("backward", operation.written_back, backward))
    return rows


def print_table(rows: list[Row]) -> None:
    titles = {"part": 7, "median": 10, "p99": 10, "GB/s": 6, "formulation": 12, "copy_": 10, "engine": 10}
    titles["other way"] = 10
    print(f"{'operation':28}", *(f"{title:>{width}}" for title, width in titles.items()))
    for row in rows:
        ours = row.spar.median
        print(
            f"{row.operation + ', ' + row.direction:28} {shown(row.size):>7} {ours * 1e6:7.1f} us "
            f"{row.spar.p99 * 1e6:7.1f} us {row.bytes / ours / 1e9:6.2f} "
            f"{row.formulation.median / ours:10.1f} x {ours / row.copy.median:8.2f} x"
            + (f" {row.engine.median * 1e6:7.1f} us" if row.engine else " " * 11)
            + (f" {row.other.median * 1e6:7.1f} us ({row.other_name})" if row.other else "")
        )
    print("formulation: how many times faster spar is; copy_: spar's time as a multiple of copy_'s;")
    print("engine: the part of the median that torch's engine takes; other way: spar's time in that way")


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
        for way in ("engine", "other"):
            found = [getattr(row, way) for row in same if getattr(row, way)]
            if found:
                times[way] = middle(found)
        rows.append(replace(same[0], **times))
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
    with tqdm(disable=rank != 0, ascii=True, mininterval=2.0) as bar:
        for size in sizes:
            known = operations(size)
            bar.total = len(sizes) * len(known)
            for operation in known:
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
