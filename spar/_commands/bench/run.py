# SPDX-License-Identifier: Apache-2.0
"""`spar bench`: time each operation against its references, which are interleaved in the same run."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

import spar

from ..facts import allowed_cores
from ..printing import KIB, MIB, count_text, parts_text, progress, size_text
from ..ranks import Ranks, UsageError, joined, launched
from .attention import run as attention
from .binding import bind
from .busy import beside, busy_processes
from .libraries import find
from .measure import measure
from .operations import SMALLEST, operations
from .report import Row, draw, median_of, read, save, table_of

SIZES = (SMALLEST, 64 * KIB, MIB, 8 * MIB, 25 * MIB, 100 * MIB)  # bytes of a rank's part

SECONDS = 0.6  # by default, for each operation, direction and size

SUMMARY = "time every operation against other ways to do the same"
DESCRIPTION = (
    """\
Time each operation on CPU tensors, forward and backward, against references that run in alternation with it:

- the usual code over torch.distributed and gloo, with which the results are compared;
- Tensor.copy_ of the bytes that a rank must write, on all ranks at once, into memory that was touched before;
- for all_to_all: yunchang and DeepSpeed, if they are installed.

Each rank is bound to a core of its own, as by mpirun, if the host has enough. --busy N --bind-to none shows
the times beside other work, such as that of a data loader's workers.

  torchrun --standalone --nproc-per-node 2 -m spar bench

The time of a backward includes torch's engine. The engine alone is timed too, with a Function that returns
its gradient unchanged. Each way runs in five turns or more. A figure is the median over the turns of their
medians, or of their 99th percentiles. Rank 0 prints a table and writes JSON and, with matplotlib, a heat map.
All sizes take about five minutes on 2 ranks.

"""
    + attention.DESCRIPTION
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--attention", action="store_true", help="time attention layers, not operations")
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="run the operations whose name contains this, such as gather",
    )
    parser.add_argument(
        "--largest",
        type=int,
        default=SIZES[-1],
        metavar="BYTES",
        help="leave out sizes of a rank's part above this (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"for each operation, direction and size (default: {SECONDS:g}); with --attention, for each "
        f"number of tokens and figure (default: {attention.SECONDS:g})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="NAME",
        help="write NAME.json and NAME.png (default: bench, or attention with --attention)",
    )
    parser.add_argument(
        "--bind-to",
        choices=("core", "none"),
        default="core",
        help="none: let the scheduler place the ranks, as it does with --attention (default: %(default)s)",
    )
    parser.add_argument(
        "--busy",
        type=int,
        default=0,
        metavar="N",
        help="run N processes on each host that only compute, as a data loader's workers do (default: 0)",
    )
    parser.add_argument(
        "--median",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="run nothing; report the median of earlier runs' JSON files of operations",
    )
    attention.add_arguments(parser)


def run(args: Namespace) -> int:
    args.out = args.out or Path("attention" if args.attention else "bench")
    if args.seconds is None:
        args.seconds = attention.SECONDS if args.attention else SECONDS
    folder = args.out.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"--out is {args.out}, but {folder} is not a folder that this process can write to")
    if args.busy < 0:
        raise UsageError(f"--busy is {args.busy}; expected a number of processes from 0")
    if args.median:
        title, rows = _median(args.median)
        _report(args.out, title, rows)
        return 0
    if not launched():
        raise UsageError(
            "it needs several ranks; type: torchrun --standalone --nproc-per-node 2 -m spar bench"
        )
    sizes = [size for size in SIZES if size <= args.largest]
    if not sizes:
        raise UsageError(f"--largest is {args.largest}; expected at least {SIZES[0]} bytes")
    if args.seconds <= 0:
        raise UsageError(f"--seconds is {args.seconds:g}; expected a number above 0")
    if args.attention:
        attention.check(args)
    torch.set_num_threads(1)  # the ranks share the cores
    with ExitStack() as stack:
        ranks = stack.enter_context(joined())
        local_rank, local_ranks = ranks.on_host()
        if local_rank == 0:  # before it is bound to a core
            stack.enter_context(busy_processes(args.busy))
        if args.attention:
            attention.run(args, ranks)
            return 0
        cores = len(allowed_cores())
        bound = args.bind_to == "core" and bind(local_rank, local_ranks)
        rows = _measure_all(sizes, args.only, args.seconds, ranks)
        if ranks.rank == 0:
            transport = spar.transport()
            parts = parts_text(transport.shared_memory, transport.network)
            using = f"{transport.name} ({parts})" if transport.name else "no transport"
            where = f"{cores} cores, {'each bound to one' if bound else 'not bound'}{beside(args.busy)}"
            title = f"{count_text(ranks.world, 'rank')} on {where}, {using}, bf16, torch {torch.__version__}"
            _report(args.out, title, rows)
        dist.barrier()
    return 0


def _measure_all(sizes: Sequence[int], only: str, seconds: float, ranks: Ranks) -> list[Row]:
    names = [operation.name for operation in operations(sizes[0])]
    chosen = [name for name in names if only in name]
    if not chosen:
        raise UsageError(f"--only is {only!r}; expected a part of one of: {', '.join(names)}")
    libraries, skipped = find(ranks)
    for line in skipped if ranks.rank == 0 else []:
        print(line, flush=True)
    runs = ((size, operation) for size in sizes for operation in operations(size) if operation.name in chosen)
    rows: list[Row] = []
    for size, operation in progress(
        runs, len(sizes) * len(chosen), lambda item: f"{item[1].name}, {size_text(item[0])}", ranks.rank == 0
    ):
        rows += measure(operation, size, seconds, libraries)
    return sorted(rows, key=lambda row: (row.operation, row.direction == "backward", row.size))


def _median(paths: Sequence[Path]) -> tuple[str, list[Row]]:
    runs = []
    for path in paths:
        try:
            runs.append(read(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"--median: {path} is not a file that `spar bench` wrote: {error!r}") from None
    try:
        return f"{runs[0][0]}, median of {len(runs)} runs", median_of([rows for _, rows in runs])
    except ValueError:
        raise UsageError("--median: the files have different operations or sizes") from None


def _report(out: Path, title: str, rows: Sequence[Row]) -> None:
    print(table_of(rows))
    print(f"{title}: {save(out, title, rows, draw)}")
