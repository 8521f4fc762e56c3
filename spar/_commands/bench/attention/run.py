# SPDX-License-Identifier: Apache-2.0
"""`spar bench --attention`: time attention layers by each method of spar and as people write them today."""

from __future__ import annotations

import ctypes
import sys
from argparse import ArgumentParser, Namespace

import torch.distributed as dist

from ...printing import MIB, progress, table
from ...ranks import Ranks, UsageError
from . import windows
from .measure import Layer, Row, measure_balance, measure_memory, measure_outside, measure_steps
from .report import Bar, Panel, report
from .ways import GATHER, RING, ULYSSES, USUAL, WHOLE

TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
SECONDS = 10.0  # by default, for each number of tokens and figure

OUTSIDE, SLOWEST, KEYS = 0.25, 1.1, 0.6  # the bars

DESCRIPTION = """\
With --attention: time attention layers, forward and backward, in these ways. All are causal; the usual ones
are over torch.distributed with gloo:

- one process: scaled_dot_product_attention of the whole sequence, on rank 0 while the others wait;
- ulysses, gather, ring: spar.attention in a zigzag layout;
- usual ulysses: permutes and three all_to_all_single, one after another, and one more after the kernel;
- usual gather: K and V padded, gathered and put in order; the kernel has a mask for each of a rank's chunks;
- usual ring: K and V go round by batch_isend_irecv, and blocks are merged in torch.

Figures of a step, which is a forward and a backward; of times, the slowest rank's median:

- step: the time; in brackets how many times as fast as one process;
- outside: the time with a kernel that does nothing, and how much of the usual formulation's that is;
- peak: by how much a step raises this process's memory, shared memory included, mean of the ranks;
- K/V: by how much 8 key heads raise that peak, say, estimated from the peaks of all key heads and of one;
- slowest: the kernels of the slowest rank by the ranks' mean, in multiply-adds and in CPU time;
- error: the largest difference from one process, of outputs and gradients.

"""
DESCRIPTION += windows.DESCRIPTION


def add_arguments(parser: ArgumentParser) -> None:
    layer = parser.add_argument_group("the layers of --attention")
    layer.add_argument("--tokens", type=int, nargs="+", help="lengths of the whole sequence")
    layer.add_argument("--window", type=int, metavar="N", help="time attention to the newest N keys instead")
    layer.add_argument("--heads", type=int, default=8, help="(default: %(default)s)")
    layer.add_argument("--key-heads", type=int, default=2, help="(default: %(default)s)")
    layer.add_argument("--width", type=int, default=64, help="of a head (default: %(default)s)")
    layer.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: %(default)s)"
    )


def check(args: Namespace) -> None:
    """Raise UsageError if the layers cannot be measured."""
    if sys.platform != "linux":
        raise UsageError("--attention reads the peak of memory from /proc, which only Linux has")
    args.tokens = args.tokens or (TOKENS if args.window is None else windows.TOKENS)
    for name in ("tokens", "heads", "key_heads", "width", "window"):
        value = getattr(args, name)
        if value is not None and min(value if name == "tokens" else [value]) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; expected at least 1")
    if args.heads % args.key_heads:
        raise UsageError(f"--heads is {args.heads}; expected a multiple of --key-heads, {args.key_heads}")


def run(args: Namespace, ranks: Ranks) -> None:
    if args.window is not None:
        windows.run(args, ranks)
        return
    rows: list[Row] = []
    for tokens in progress(args.tokens, len(args.tokens), lambda n: f"{n} tokens", ranks.rank == 0):
        layer = Layer(tokens, args, args.key_heads)
        measured = measure_steps(layer, tokens, args.seconds)
        measure_outside(layer, measured, args.seconds)
        measure_balance(layer, measured, args.seconds)
        rows += measured
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed leaves the process
    for tokens in args.tokens:
        measure_memory(tokens, args, [row for row in rows if row.tokens == tokens])
    if ranks.rank == 0:
        text, results = table_of(rows), bars(rows, ranks.world)
        report(args, ranks, "causal", rows, text, results, panels(rows))
    dist.barrier()


def table_of(rows: list[Row]) -> str:
    lines = [["tokens", "way", "step", "outside", "peak", "K/V", "slowest", "error"]]
    steps = {(row.tokens, row.way): row for row in rows}
    for row in rows:
        alone = steps[row.tokens, WHOLE].step
        usual = steps.get((row.tokens, USUAL.get(row.way, "")))
        faster = f" ({alone / row.step:.2f})" if row.way != WHOLE else ""
        outside = f"{row.outside * 1e3:8.2f} ms" if row.outside else ""
        lines.append(
            [
                f"{row.tokens:6}",
                row.way,
                f"{row.step * 1e3:9.1f} ms{faster}",
                outside + (f" ({row.outside / usual.outside:4.2f})" if usual else ""),
                f"{row.peak / MIB:6.1f} MB",
                f"{row.keys / MIB:6.1f} MB" if row.keys else "",
                f"{row.products:.3f}, {row.seconds:.2f}" if row.products else "",
                f"{row.error:.1e}",
            ]
        )
    return table(lines)


def bars(rows: list[Row], world: int) -> list[Bar]:
    """Return what is to be held, the worst figure measured, and the most that it may be."""
    by_name = {(row.tokens, row.way): row for row in rows}
    claims = []
    for way in (ULYSSES, GATHER, RING):
        parts = [
            row.outside / by_name[row.tokens, USUAL[way]].outside
            for row in rows
            if row.way == way and (row.tokens, USUAL[way]) in by_name
        ]
        if parts:
            claims.append((f"{way}: time outside the kernel, of the {USUAL[way]}'s", max(parts), OUTSIDE))
    largest = by_name[max(row.tokens for row in rows), RING]
    gather = by_name[largest.tokens, GATHER]
    at = f"at {largest.tokens} tokens"
    claims.append((f"ring: multiply-adds of the slowest rank, of the mean, {at}", largest.products, SLOWEST))
    claims.append((f"ring: kernel time of the slowest rank, of the mean, {at}", largest.seconds, SLOWEST))
    if world >= 4 and gather.keys > 0:
        claims.append((f"ring: peak memory for K and V, of gather's, {at}", largest.keys / gather.keys, KEYS))
    return claims


def panels(rows: list[Row]) -> tuple[Panel, ...]:
    alone = {row.tokens: row.step for row in rows if row.way == WHOLE}
    return (
        ("a step, of one process's", "linear", lambda row: row.step / alone[row.tokens]),
        ("outside the kernel, ms", "log", lambda row: row.outside * 1e3),
        ("peak memory of a rank, MB", "log", lambda row: row.peak / MIB),
    )
