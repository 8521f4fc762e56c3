# SPDX-License-Identifier: Apache-2.0
"""What a check or a stage of the bring-up found: lines of Markdown, failures, and figures for programs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import kit

FAILED, SKIPPED = 1, 2  # exit statuses


class Report:
    """Print each line, and keep `file` up to date: what was found before a crash or a timeout is not lost."""

    def __init__(self, file: str | None = None, prints: bool = True) -> None:
        self.prints = prints
        self.file = Path(file) if file else None
        self.lines: list[str] = []
        self.failures: list[str] = []
        self.figures: dict[str, Any] = {}
        self.reason = ""

    def say(self, line: str = "") -> None:
        if self.prints:
            print(line, flush=True)
        self.lines.append(line)
        self.save()

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.failures.append(what)
            self.say(f"**wrong**: {what}")

    def figure(self, name: str, value: Any) -> None:
        self.figures[name] = value
        self.save()

    def table(self, *columns: str) -> None:
        self.say()
        self.row(*columns)
        self.row(*["---"] * len(columns))

    def row(self, *cells: str) -> None:
        self.say(f"| {' | '.join(cells)} |")

    def skip(self, reason: str) -> NoReturn:
        """End the process: nothing can be checked here."""
        self.reason = reason
        self.save()
        print(reason, file=sys.stderr)
        sys.exit(SKIPPED)

    def save(self) -> None:
        if self.file:
            found = {name: getattr(self, name) for name in ("reason", "lines", "failures", "figures")}
            part = self.file.with_suffix(".part")  # a process that is killed leaves a whole file
            part.write_text(json.dumps(found))
            part.replace(self.file)

    def status(self) -> int:
        return FAILED if self.failures else 0


def stage(description: str | None) -> tuple[Report, argparse.Namespace]:
    """Return a bring-up stage's report and options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", help="write what was found to this file, as JSON")
    parser.add_argument("--kit", default=str(kit.FOLDER), help="what `make bring-up-kit` built")
    parser.add_argument("--stand-ins", action="store_true", help="run over the tests' stand-ins for CUDA")
    options = parser.parse_args()
    return Report(options.data), options
