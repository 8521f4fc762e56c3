"""The structure that docs/architecture.md describes: folders are layers, and nothing imports in a circle."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
SPAR = ROOT / "spar"

# csrc's folders, lowest first; "." is the root. A file includes headers of its own folder and of those before it.
FOLDERS = [
    "base",
    "ops",
    "plan",
    "devices",
    "devices/cpu",
    "devices/cuda",
    "ipc",
    "transports",
    "transports/nccl",
]
FOLDERS += [".", "python"]


def includes(path: Path) -> list[Path]:
    return [Path(name) for name in re.findall(r'#include "(.+?\.h)"', path.read_text())]


def test_folders_of_csrc_include_only_folders_below() -> None:
    files = [*CSRC.rglob("*.[ch]")]
    assert {path.parent.relative_to(CSRC).as_posix() for path in files} == set(FOLDERS)
    for path in files:
        own = FOLDERS.index(path.parent.relative_to(CSRC).as_posix())
        for header in includes(path):
            assert (CSRC / header).exists(), f"{path} includes {header}"
            assert FOLDERS.index(header.parent.as_posix()) <= own, f"{path} includes {header}"


def test_the_plan_knows_no_system_and_python_is_bound_in_few_files() -> None:
    for path in (CSRC / "ops/layout.c", CSRC / "plan/plan.c", *(CSRC / "ops").glob("*.c")):
        system = set(re.findall(r"#include <(.+?)>", path.read_text()))
        assert system <= {"stdint.h", "stdio.h", "stdlib.h", "string.h", "stdarg.h", "stddef.h"}, path
    bound = {path.name for path in CSRC.rglob("*.[ch]") if "<Python.h>" in path.read_text()}
    assert bound == {"binding.h"}
    users = {path.parent.name for path in CSRC.rglob("*.c") if "binding.h" in path.read_text()}
    assert users == {"python"}
