# SPDX-License-Identifier: Apache-2.0
"""The table, the bars and the plot of attention layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...printing import MIB, table
from ..report import save
from .measure import Row
from .ways import GATHER, RING, ULYSSES, USUAL, WHOLE

OUTSIDE, SLOWEST, KEYS = 0.25, 1.1, 0.6  # the bars


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


def bars(rows: list[Row], world: int) -> list[tuple[str, float, float]]:
    """Return what is to be held, the worst figure measured, and the most that it may be."""
    by_name = {(row.tokens, row.way): row for row in rows}
    found = []
    for way in (ULYSSES, GATHER, RING):
        parts = [
            row.outside / by_name[row.tokens, USUAL[way]].outside
            for row in rows
            if row.way == way and (row.tokens, USUAL[way]) in by_name
        ]
        if parts:
            found.append((f"{way}: time outside the kernel, of the {USUAL[way]}'s", max(parts), OUTSIDE))
    largest = by_name[max(row.tokens for row in rows), RING]
    gather = by_name[largest.tokens, GATHER]
    at = f"at {largest.tokens} tokens"
    found.append((f"ring: multiply-adds of the slowest rank, of the mean, {at}", largest.products, SLOWEST))
    found.append((f"ring: kernel time of the slowest rank, of the mean, {at}", largest.seconds, SLOWEST))
    if world >= 4 and gather.keys > 0:
        found.append((f"ring: peak memory for K and V, of gather's, {at}", largest.keys / gather.keys, KEYS))
    return found


def draw(path: Path, rows: list[Row], title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    figure.suptitle(title)
    panels: list[tuple[str, Callable[[Row], float]]] = [
        ("a step, seconds", lambda row: row.step),
        ("outside the kernel, milliseconds", lambda row: row.outside * 1e3),
        ("peak memory of a rank, MB", lambda row: row.peak / MIB),
    ]
    for axes, (meaning, value) in zip(figure.subplots(1, 3), panels, strict=True):
        for i, way in enumerate(dict.fromkeys(row.way for row in rows)):
            points = [(row.tokens, value(row)) for row in rows if row.way == way and value(row) > 0]
            if points:
                style = "--" if way.startswith("usual") else ":" if way == WHOLE else "-"
                axes.plot(*zip(*points, strict=True), style, color=f"C{i}", marker=".", label=way)
        axes.set(title=meaning, xlabel="tokens", xscale="log", yscale="log")
        tokens = sorted({row.tokens for row in rows})
        axes.set_xticks(tokens, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in tokens])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)


def report(out: Path, title: str, rows: list[Row], world: int) -> None:
    """Print a table and whether the bars hold; write JSON and, with matplotlib, a plot."""
    print(title)
    print(table_of(rows))
    held = bars(rows, world)
    for what, found, most in held:
        print(f"{what}: {found:.3f}, of at most {most}: {'held' if found <= most else 'MISSED'}")
    print(save(out, title, rows, draw, bars=held))
