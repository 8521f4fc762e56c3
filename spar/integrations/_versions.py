# SPDX-License-Identifier: Apache-2.0
"""Versions of other libraries, whose undocumented parts an integration needs."""

from __future__ import annotations

import importlib.metadata
import re


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
