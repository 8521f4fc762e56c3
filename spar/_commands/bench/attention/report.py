# SPDX-License-Identifier: Apache-2.0
"""Print, save and draw what was measured of attention layers: figures of each way by the number of tokens."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...ranks import Ranks
from ..busy import beside
from ..report import save
from .ways import GATHER, RING, ULYSSES

# What is to be held, the worst figure measured, and the most that it may be.
Bar = tuple[str, float, float]
# What a figure is, the scale of its axis, and the figure of a row.
Panel = tuple[str, str, Callable[[Any], float]]


def report(
    args: Namespace,
    ranks: Ranks,
    mask: str,
    rows: Sequence[Any],
    table: str,
    bars: Sequence[Bar],
    panels: Sequence[Panel],
) -> None:
    """Print the table and the bars, and save the rows, which are dataclasses with `tokens` and `way`.

    mask: what queries attend to, for the title.
    """
    heads = f"{args.heads} heads and {args.key_heads} key heads of {args.width}"
    placement = f"{ranks.world} ranks on {len(os.sched_getaffinity(0))} cores{beside(args.busy)}"
    title = f"{placement}, {args.dtype}, {heads}, {mask}, torch {torch.__version__}"
    print(title, table, sep="\n")
    for claim, worst, most in bars:
        print(f"{claim}: {worst:.3f}, of at most {most}: {'held' if worst <= most else 'MISSED'}")
    print(save(args.out, title, rows, partial(_draw, panels), bars=bars))


def _draw(panels: Sequence[Panel], path: Path, rows: Sequence[Any], title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4 * len(panels), 4.2), layout="constrained")
    figure.suptitle(title, fontsize=10)
    tokens = sorted({row.tokens for row in rows})
    for axes, (meaning, scale, value) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        colors: dict[str, str] = {}  # a method's, its usual formulation's and its window's are one
        for way in dict.fromkeys(row.way for row in rows):
            method = way.removeprefix("window, ").removeprefix("usual ")
            color = colors.setdefault(method, f"C{len(colors)}")
            points = [(row.tokens, value(row)) for row in rows if row.way == way and value(row) > 0]
            if points:
                style = "-" if way.removeprefix("window, ") in (ULYSSES, GATHER, RING) else "--"
                axes.plot(*zip(*points, strict=True), style, color=color, marker=".", label=way)
        axes.set(title=f"{meaning} (less is better)", xlabel="tokens", xscale="log", yscale=scale)
        axes.set_xticks(tokens, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in tokens])
        axes.minorticks_off()
        if scale == "linear":
            axes.set_ylim(0)
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)
