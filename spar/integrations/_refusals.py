# SPDX-License-Identifier: Apache-2.0
"""What an integration refuses: other versions of a library, and options that were not tested."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence


def check_version(where: str, name: str, oldest: tuple[int, ...], newest: tuple[int, ...]) -> None:
    """Raise ImportError if a package is not installed in a version from oldest to newest, such as (5, 23)."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    numbers = tuple(map(int, re.findall(r"\d+", version or "")[: len(newest)]))
    if not oldest <= numbers <= newest:
        found = "is not" if version is None else f"{version} is"
        past = *newest[:-1], newest[-1] + 1
        first, last, end = (".".join(map(str, x)) for x in (oldest, newest, past))
        expected = first if oldest == newest else f"{first} to {last}"
        raise ImportError(
            f"{where}: {name} {found} installed; expected {expected}, with which this was tested: "
            f"pip install '{name}>={first},<{end}'"
        )


def refuse(
    where: str, refused: Sequence[tuple[object, str, str]], beside: str = "sequence parallelism"
) -> None:
    """Raise ValueError for the first that is to be refused of (whether it is, problem, what is expected)."""
    for is_refused, problem, expected in refused:
        if is_refused:
            raise ValueError(f"{where}: {problem}; with {beside} expected {expected}")
