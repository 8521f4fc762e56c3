# SPDX-License-Identifier: Apache-2.0
"""The structure that docs/architecture.md describes: folders are layers, without import circles."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
SPAR = ROOT / "spar"

# Folders of csrc, lowest first ("." is the root). A file includes headers of its own folder or lower.
FOLDERS = ["base", "ops", "plan", "devices", "devices/cpu", "devices/cuda"]
FOLDERS += ["ipc", "control", "transports", "transports/cuda", "transports/push", "transports/nccl"]
FOLDERS += ["not_linux", ".", "python"]


# Folders of spar, and modules beside them, lowest first: a module imports from its own folder or lower ones.
LAYERS = ["_version", "_extension", "errors", "sizes", "_deprecated", "_tracing", "_checks", "topology"]
LAYERS += ["_control", "_transports", "_group", "_exchange", "groups", "random", "sequence_layout", "loss"]
LAYERS += ["ops", "_attention", "_model", "_doctor", "testing", "integrations"]
LAYERS += ["parallel_state", "utils", "data", "sharding", "__init__", "_commands", "__main__"]


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


def circular(uses: dict[Any, set[Any]]) -> list[Any]:
    """Return what is part of a circle, or uses one that is."""
    pending = dict(uses)
    while free := [name for name, used in pending.items() if not used & set(pending)]:
        for name in free:
            del pending[name]
    return sorted(pending)


def test_c_files_call_each_other_without_a_circle() -> None:
    """A name is of the file that defines it: at a line's begin, as clang-format puts it, and not static."""
    defines = re.compile(r"^(?!static|extern|typedef)\w[\w *]*?\b(spar_\w+)(?:\([^;{]*\)\n\{|\[| =|;)", re.M)
    comments = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
    files = {path.relative_to(CSRC).as_posix(): path.read_text() for path in CSRC.rglob("*.c")}
    code = {name: comments.sub(" ", text) for name, text in files.items() if "not_linux" not in name}
    owner = {symbol: name for name, text in code.items() for symbol in defines.findall(text)}
    uses = {
        name: {owner[symbol] for symbol in re.findall(r"\bspar_\w+", text) if symbol in owner} - {name}
        for name, text in code.items()
    }
    assert "control/mailbox.c" in uses["control/group.c"] and "base/error.c" in uses["spar.c"]
    assert not circular(uses)


def test_plan_is_portable_and_only_the_binding_includes_python() -> None:
    for path in (CSRC / "ops/layout.c", CSRC / "plan/plan.c", *(CSRC / "ops").glob("*.c")):
        system = set(re.findall(r"#include <(.+?)>", path.read_text()))
        assert system <= {"stdint.h", "stdio.h", "stdlib.h", "string.h", "stdarg.h", "stddef.h"}, path
    bound = {path.name for path in CSRC.rglob("*.[ch]") if "<Python.h>" in path.read_text()}
    assert bound == {"binding.h"}
    users = {path.parent.name for path in CSRC.rglob("*.c") if "binding.h" in path.read_text()}
    assert users == {"python"}


def modules() -> dict[str, Path]:
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SPAR.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imports_of(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of spar that a module imports, at any place, also for types alone.

    Importing a submodule also runs its packages; their imports do not count.
    """
    found: set[str] = set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            origin = ".".join(part for part in base if part) if node.level else node.module or ""
            for alias in node.names:
                if alias.name != "_C":  # the extension imports no module
                    found.add(f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in known else origin)
    return found & set(known) - {name}


def test_no_import_circle() -> None:
    known = modules()
    assert not circular({name: imports_of(name, path, known) for name, path in known.items()})


def layer_of(path: Path) -> str:
    return path.relative_to(SPAR).parts[0].removesuffix(".py")


def test_folders_of_spar_import_only_folders_below() -> None:
    known = modules()
    assert {layer_of(path) for path in known.values()} == set(LAYERS)
    upwards = {
        (name, layer_of(known[imported]))
        for name, path in known.items()
        for imported in imports_of(name, path, known)
        if LAYERS.index(layer_of(known[imported])) > LAYERS.index(layer_of(path))
    }
    assert not upwards


def test_only_transports_ask_for_cuda() -> None:
    asked = re.compile(r"[!=]= *\"cuda\"|\"cuda\" *[!=]=|is_cuda")
    found = {
        path.relative_to(SPAR).parts[:1] for path in SPAR.rglob("*.py") if asked.search(path.read_text())
    }
    assert found <= {("_transports",)}
