# SPDX-License-Identifier: Apache-2.0
"""Text for a terminal or a file: tables, sizes, times, and a progress bar."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TypeVar

T = TypeVar("T")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ERASED = "\r\033[K"  # moves a terminal's cursor to the line's begin, and clears the line
INDENT = 22  # the column in which the text beside a name begins


def size_text(size: float) -> str:
    """Return a number of bytes, such as "64 KB" or "23.5 GB"; K, M and G are powers of 1,024."""
    if size >= GIB:
        return f"{size / GIB:.1f} GB"
    return f"{size / MIB:.0f} MB" if size >= MIB else f"{size / KIB:.0f} KB"


def parts_text(shared_memory: float, network: float) -> str:
    """Return how a rank's bytes move, such as "33% in shared memory, 67% over the network"."""
    parts = (
        (f"{shared_memory:.0%} in shared memory", shared_memory),
        (f"{network:.0%} over the network", network),
    )
    return ", ".join(text for text, part in parts if part) or "all inside the host"


def time_text(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def count_text(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


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


def progress(items: Iterable[T], total: int, text: Callable[[T], str], shown: bool) -> Iterator[T]:
    """Iterate over the items beside a progress bar on stderr: tqdm's if installed, else an overwritten line.

    Prints a line for each item if stderr is not a terminal: a log shows that the command is at work.
    """
    if not shown:
        yield from items
    elif not sys.stderr.isatty():
        for done, item in enumerate(items):
            print(f"{done + 1}/{total} {text(item)}", file=sys.stderr, flush=True)
            yield item
    elif find_spec("tqdm"):
        from tqdm import tqdm

        with tqdm(items, total=total, ascii=True, leave=False) as bar:
            for item in bar:
                bar.set_postfix_str(text(item))
                yield item
    else:
        try:
            for done, item in enumerate(items):
                print(f"{ERASED}{done}/{total} {text(item)}", end="", file=sys.stderr, flush=True)
                yield item
        finally:
            print(ERASED, end="", file=sys.stderr, flush=True)
