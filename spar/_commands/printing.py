# SPDX-License-Identifier: Apache-2.0
"""Text for a terminal or a file: tables, sizes, times, and a progress bar."""

from __future__ import annotations

import importlib
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ERASED = "\r\033[K"  # moves a terminal's cursor to the line's begin, and clears the line
INDENT = 22  # the column in which the text beside a name begins


def optional(name: str) -> Any | None:
    """Import a module that spar does not need; None if it is not installed, or cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def size_text(size: float) -> str:
    """Return a number of bytes, such as "64 KB" or "23.5 GB"; K, M and G are powers of 1,024."""
    if size >= GIB:
        return f"{size / GIB:.1f} GB"
    return f"{size / MIB:.0f} MB" if size >= MIB else f"{size / KIB:.0f} KB"


def time_text(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def count_text(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Align rows in columns, two spaces apart; the columns in `right` at their right ends."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def entry(name: str, text: str) -> str:
    """Return a name and its text, wrapped beside it to the terminal's width; 100 if there is no terminal."""
    width = max(60, shutil.get_terminal_size((100, 24)).columns) if sys.stdout.isatty() else 100
    lines = textwrap.wrap(text, width - INDENT, break_on_hyphens=False, break_long_words=False) or [""]
    return f"{'  ' + name:<{INDENT}}" + ("\n" + " " * INDENT).join(lines)


class Progress:
    """A progress bar on stderr: tqdm's if installed, else a line that is overwritten.

    Prints nothing if stderr is not a terminal.
    """

    def __init__(self, total: int, shown: bool) -> None:
        self.total, self.done = total, 0
        self.shown = shown and sys.stderr.isatty()
        tqdm = optional("tqdm") if self.shown else None
        self.bar = None if tqdm is None else tqdm.tqdm(total=total, ascii=True, leave=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
        elif self.shown:
            print(ERASED, end="", file=sys.stderr, flush=True)

    def begin(self, text: str) -> None:
        """Show what runs now."""
        if self.bar is not None:
            self.bar.set_postfix_str(text)
        elif self.shown:
            print(f"{ERASED}{self.done}/{self.total} {text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Count what `begin` announced as done."""
        self.done += 1
        if self.bar is not None:
            self.bar.update()
