# SPDX-License-Identifier: Apache-2.0
"""A benchmark's figures: a row for each operation, direction and size; as a table, JSON, and a heat map."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from importlib.util import find_spec
from math import log
from pathlib import Path
from typing import Any

import spar

from ..printing import size_text, table, time_text

LEGEND = """\
formulation: how many times faster spar is than the usual code over torch.distributed
copy_: spar's time as a multiple of copy_'s
engine: the part of the median that torch's engine takes
other way: spar's time in that way"""

SMALL = 1 << 20  # bytes: below, a call in Python takes longer than the copy


@dataclass
class Time:
    """In seconds."""

    median: float
    p99: float


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
    libraries: dict[str, Time] = field(default_factory=dict)  # other libraries' time, by their names


def read(path: Path) -> tuple[str, list[Row]]:
    """Return the title and the rows of a file that `save` made.

    Raises:
        OSError, ValueError, KeyError, TypeError: it is not such a file.
    """
    times = {"median", "p99"}
    facts = json.loads(path.read_text(), object_hook=lambda x: Time(**x) if x.keys() == times else x)
    return facts["title"], [Row(**row) for row in facts["rows"]]


def median_of(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the median of each figure over several runs of the same operations and sizes."""

    def middle(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            common = [name for name in values[0] if all(name in mapping for mapping in values)]
            return {name: middle([mapping[name] for mapping in values]) for name in common}
        times = [value for value in values if isinstance(value, Time)]
        if not times:
            return values[0]
        return Time(statistics.median(t.median for t in times), statistics.median(t.p99 for t in times))

    names = [column.name for column in fields(Row)]
    return [
        Row(**{name: middle([getattr(row, name) for row in same]) for name in names})
        for same in zip(*runs, strict=True)
    ]


def table_of(rows: Sequence[Row]) -> str:
    def us(seconds: float) -> str:
        return f"{seconds * 1e6:.1f} us"

    def faster(name: str, row: Row) -> str:
        theirs = {"formulation": row.formulation, **row.libraries}.get(name)
        return f"{theirs.median / row.spar.median:.1f} x" if theirs else ""

    names = list(dict.fromkeys(name for row in rows for name in row.libraries))
    columns: dict[str, Callable[[Row], str]] = {
        "operation": lambda row: f"{row.operation}, {row.direction}",
        "part": lambda row: size_text(row.size),
        "median": lambda row: us(row.spar.median),
        "p99": lambda row: us(row.spar.p99),
        "GB/s": lambda row: f"{row.bytes / row.spar.median / 1e9:.2f}",
        "formulation": partial(faster, "formulation"),
        "copy_": lambda row: f"{row.spar.median / row.copy.median:.2f} x",
        **{name: partial(faster, name) for name in names},
        "engine": lambda row: us(row.engine.median) if row.engine else "",
        "other way": lambda row: f"{us(row.other.median)} ({row.other_name})" if row.other else "",
    }
    lines = [[*columns], *([cell(row) for cell in columns.values()] for row in rows)]
    legend = f"{LEGEND}\n{', '.join(names)}: how many times faster spar is than it" if names else LEGEND
    return f"{table(lines, right=range(1, len(columns) - 1))}\n{legend}"


def save(
    out: Path, title: str, rows: Sequence[Any], draw: Callable[[Path, Any, str], None], **more: Any
) -> str:
    """Write the rows, which are dataclasses, as JSON, and draw them if matplotlib is installed.

    Returns the names of the files, to print.
    """
    facts = {"title": title, "spar": spar.__version__, "rows": [asdict(row) for row in rows], **more}
    Path(f"{out}.json").write_text(json.dumps(facts, indent=1))
    if find_spec("matplotlib") is None:
        return f"{out}.json, no PNG, because matplotlib is not installed"
    draw(Path(f"{out}.png"), rows, title)
    return f"{out}.json, {out}.png"


def is_view(row: Row, rows: Sequence[Row]) -> bool:
    """Whether the operation copies nothing: the largest of its sizes takes less than a tenth of a copy."""
    same = [r for r in rows if (r.operation, r.direction) == (row.operation, row.direction)]
    largest = max(same, key=lambda r: r.size)
    return largest.spar.median < largest.copy.median / 10


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draw each operation's ratios by size, but times where a call takes longer than a copy in any case.

    Views are left out: they take no time that grows with the size. Needs matplotlib.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.direction != "recorded" and not is_view(row, rows)]
    names = list(dict.fromkeys(f"{row.operation}, {row.direction}" for row in rows))
    sizes = sorted({row.size for row in rows})
    panels: dict[str, tuple[float, Callable[[Row], float]]] = {
        "speed, of the usual formulation's (more is better)": (
            100,
            lambda r: r.formulation.median / r.spar.median,
        ),
        "speed, of Tensor.copy_'s (more is better); below 1 MB the time": (
            4,
            lambda r: r.copy.median / r.spar.median,
        ),
    }
    figure = Figure(figsize=(13, 0.36 * len(names) + 1.6), layout="constrained")
    figure.suptitle(title)
    for axes, (label, (most, ratio)) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        values = [[float("nan")] * len(sizes) for _ in names]
        for row in rows:
            y, x, value = names.index(f"{row.operation}, {row.direction}"), sizes.index(row.size), ratio(row)
            text = f"{value:.{int(value < 10)}f}"
            if "copy_" in label and row.size < SMALL:
                text = time_text(row.spar.median)
            else:
                values[y][x] = value
            is_dark = abs(log(values[y][x], most)) > 0.7  # never for nan
            axes.text(x, y, text, ha="center", va="center", size=8, color="white" if is_dark else "black")
        axes.imshow(values, aspect="auto", cmap="RdYlGn", norm=LogNorm(1 / most, most))
        axes.set_xticks(range(len(sizes)), [size_text(size) for size in sizes])
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel="a rank's part", title=label)
    figure.savefig(path, dpi=90)
