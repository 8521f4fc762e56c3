# SPDX-License-Identifier: Apache-2.0
"""`spar bench --attention --window N`: windows beside causal attention without one, and beside a mask."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import spar

from ...._attention.spans import closed
from ...printing import MIB, progress, table
from ...ranks import Ranks
from ..measure import reduced
from .measure import once, peak, tensors_of, with_gradients
from .report import Bar, Panel, report
from .ways import GATHER, RING, ULYSSES

TOKENS = (8192, 16384, 32768, 65536)
MOST_MASKED = 16_384  # tokens: a mask of more takes gigabytes
CAUSAL, MASK = "causal", "mask"  # without a window, and with it as S x S booleans; both by gather
METHODS = {f"window, {method}": method for method in (ULYSSES, GATHER, RING)}
WINDOW = f"window, {GATHER}"

FASTER, LINEAR = 0.1, 1.25  # the bars

DESCRIPTION = """\
With --attention --window N: time causal attention to the newest N keys, in a zigzag layout, at 8,192 to
65,536 tokens by default, in these ways:

- causal: gather without a window;
- mask: gather with an S x S mask of booleans, up to 16,384 tokens;
- window, METHOD: window=(N - 1, 0), by each method.

Each step makes its mask or its spans. The CPU time of a step is that of the process, the slowest rank's;
waits of the exchanges are in it. Error: from the mask's results, else from those by ulysses."""


@dataclass
class Row:
    """Times in seconds, memory in bytes."""

    tokens: int
    way: str
    step: float
    cpu: float
    peak: float = 0.0
    error: float = 0.0


Step = Callable[[], list[Tensor]]


def steps_of(tokens: int, window: int, args: Namespace) -> dict[str, Step]:
    """Return a function for each way that returns the output and the gradients."""
    layout = spar.SequenceLayout.zigzag(tokens)
    *inputs, upper = [x[:, layout.index()] for x in tensors_of(tokens, args, args.key_heads)]

    def step(**options: Any) -> list[Tensor]:
        return with_gradients(lambda q, k, v: spar.attention(q, k, v, layout, **options), inputs, upper)

    def masked() -> list[Tensor]:
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril_().triu_(1 - window)
        return step(mask=mask, method=GATHER)

    def windowed(method: str) -> list[Tensor]:
        closed.cache_clear()
        return step(window=(window - 1, 0), causal=True, method=method)

    steps: dict[str, Step] = {name: partial(windowed, method) for name, method in METHODS.items()}
    steps[CAUSAL] = partial(step, causal=True, method=GATHER)
    if tokens <= MOST_MASKED:
        steps[MASK] = masked
    return steps


def measure(tokens: int, args: Namespace) -> list[Row]:
    """Time the ways in alternating turns. Collective."""
    steps = steps_of(tokens, args.window, args)
    results = {name: step() for name, step in steps.items() if name != CAUSAL}
    expected = results.get(MASK, results[f"window, {ULYSSES}"])
    errors = {
        name: max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
        for name, found in results.items()
    }
    del results, expected
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    begin = time.perf_counter()
    while True:
        for name, step in steps.items():
            times[name].append(once(step)[:2])
        turns = len(times[CAUSAL])
        if turns >= 15 or reduced(time.perf_counter() - begin) * (turns + 1) / turns > args.seconds:
            break
    rows = []
    for name, step in steps.items():
        wall, cpu = (statistics.median(column) for column in zip(*times[name], strict=True))
        memory = reduced(peak(step, 1), dist.ReduceOp.SUM) / dist.get_world_size()
        error = reduced(errors.get(name, 0.0))
        rows.append(Row(tokens, name, reduced(wall), reduced(cpu), memory, error))
    return rows


def run(args: Namespace, ranks: Ranks) -> None:
    rows: list[Row] = []
    for tokens in progress(args.tokens, len(args.tokens), lambda n: f"{n} tokens", ranks.rank == 0):
        rows += measure(tokens, args)
    if ranks.rank == 0:
        mask = f"a window of {args.window}"
        report(args, ranks, mask, rows, table_of(rows), bars(rows), PANELS)
    dist.barrier()


def table_of(rows: list[Row]) -> str:
    lines = [["tokens", "way", "step", "CPU time", "peak", "error"]]
    by_way = {(row.tokens, row.way): row for row in rows}
    for row in rows:
        causal = by_way[row.tokens, CAUSAL].cpu
        faster = f" ({causal / row.cpu:.1f})" if row.way != CAUSAL else ""
        lines.append(
            [
                f"{row.tokens:6}",
                row.way,
                f"{row.step * 1e3:9.1f} ms",
                f"{row.cpu * 1e3:9.1f} ms{faster}",
                f"{row.peak / MIB:7.1f} MB",
                f"{row.error:.1e}" if row.way != CAUSAL else "",
            ]
        )
    return f"{table(lines)}\nin brackets: how many times less CPU time than causal attention without a window"


def bars(rows: list[Row]) -> list[Bar]:
    """Return what is to be held, the worst figure measured, and the most that it may be."""
    by_way = {(row.tokens, row.way): row for row in rows}
    claims = []
    for tokens in sorted({row.tokens for row in rows if row.way == MASK}):
        ratio = by_way[tokens, WINDOW].cpu / by_way[tokens, MASK].cpu
        claims.append((f"{WINDOW}: CPU time, of the mask's, at {tokens} tokens", ratio, FASTER))
    least, most = min(row.tokens for row in rows), max(row.tokens for row in rows)
    if least < most:
        growth = by_way[most, WINDOW].cpu / by_way[least, WINDOW].cpu / (most / least)
        claims.append((f"{WINDOW}: CPU time a token at {most} tokens, of that at {least}", growth, LINEAR))
    return claims


PANELS: tuple[Panel, ...] = (
    ("CPU time of a step, seconds", "log", lambda row: row.cpu),
    ("peak memory of a rank, MB", "log", lambda row: row.peak / MIB),
)
