# SPDX-License-Identifier: Apache-2.0
"""Write the page of a bring-up: the machine, a table of the stages, and what each found."""

from __future__ import annotations

import datetime
import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSION = Path(__file__).resolve().parent.parent / "spar" / "_version.py"
OUTPUT = 40  # lines of a stage that did not pass


def write(file: Path, results: Sequence[dict[str, Any]]) -> None:
    facts: dict[str, Any] = next(
        (result["data"].get("figures", {}) for result in results if result["stage"] == "facts"), {}
    )
    lines = [f"## {devices(facts)}, {datetime.date.today()}", "", versions(facts), ""]
    lines += ["| stage | status | seconds | |", "|---|---|---|---|"]
    lines += [
        f"| {r['stage']}: {r['title']} | {r['status']} | {r['seconds']:.1f} | {cell(r['reason'])} |"
        for r in results
    ]
    for result in results:
        found = result["data"].get("lines", [])
        is_well = result["status"] in ("passed", "skipped")
        if found or not is_well:
            lines += ["", f"### {result['title']}", "", *source(result, facts)]
            lines += [re.sub(r"^#+", "####", line) for line in found]
        if not is_well:
            lines += ["", f"The stage {result['status']} ({result['reason']}). The end of its output:", ""]
            lines += [f"    {line}".rstrip() for line in result["output"].splitlines()[-OUTPUT:]]
    file.write_text("\n".join(lines) + "\n")


def cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def devices(facts: dict[str, Any]) -> str:
    names = [str(each["name"]) for title, each in facts.items() if title.startswith("device ")]
    if not names:
        return "No GPU"
    return ", ".join(f"{name} x {names.count(name)}" for name in dict.fromkeys(names))


def source(result: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """Return what a stage's figures were found on: a part of the page may be quoted alone."""
    if result["stage"] == "facts" or not facts:
        return []
    kernel = re.search(r"\d+\.\d+(\.\d+)*", facts.get("machine", {}).get("kernel driver", ""))
    torch = facts.get("libraries", {}).get("torch", "unknown")
    driver = kernel[0] if kernel else "unknown"
    return [f"On {devices(facts)}, driver {driver}, torch {torch}:", ""]


def versions(facts: dict[str, Any]) -> str:
    parts = {"spar": runpy.run_path(str(VERSION))["__version__"]}
    parts["kernel driver"] = facts.get("machine", {}).get("kernel driver", "unknown")
    parts["driver for CUDA"] = facts.get("driver", {}).get("CUDA", "unknown")
    for name, value in facts.get("libraries", {}).items():
        parts[name] = ", ".join(map(str, value)) if isinstance(value, list) else value
    return "; ".join(f"{name}: {value}" for name, value in parts.items()) + "."
