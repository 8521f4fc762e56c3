# SPDX-License-Identifier: Apache-2.0
"""A benchmark's figures: one row for each operation, direction and size; kept as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .timing import Time


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
    """Return the title and the rows of a file that `report.save` made.

    Raises:
        OSError, ValueError, KeyError, TypeError: it is not such a file.
    """
    facts = json.loads(path.read_text())
    rows = []
    for row in facts["rows"]:
        libraries = {name: Time(**value) for name, value in row.pop("libraries", {}).items()}
        times = {name: Time(**value) for name, value in row.items() if isinstance(value, dict)}
        rows.append(Row(**{**row, **times, "libraries": libraries}))
    return facts["title"], rows


def median_of(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the median of each figure over several runs of the same operations and sizes."""

    def middle(times: list[Time]) -> Time:
        return Time(statistics.median(t.median for t in times), statistics.median(t.p99 for t in times))

    rows = []
    for same in zip(*runs, strict=True):
        times = {way: middle([getattr(row, way) for row in same]) for way in ("spar", "formulation", "copy")}
        for way in ("engine", "other"):
            found = [getattr(row, way) for row in same if getattr(row, way)]
            if found:
                times[way] = middle(found)
        names = [name for name in same[0].libraries if all(name in row.libraries for row in same)]
        libraries = {name: middle([row.libraries[name] for row in same]) for name in names}
        rows.append(replace(same[0], **times, libraries=libraries))
    return rows
