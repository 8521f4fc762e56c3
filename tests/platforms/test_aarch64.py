# SPDX-License-Identifier: Apache-2.0
"""The C tests, compiled for aarch64 with zig against the glibc of the wheels, under qemu's user emulation.

Not run: the CUDA device, whose stand-ins are libraries of this machine; and no limits of latency, which an
emulator does not keep.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import core

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "release"))
import cross  # noqa: E402

TESTS = ROOT / "tests" / "c"
INCLUDED = [ROOT / "csrc/devices/cpu" / name for name in ("scale.c", "sum.c")]  # by tests
GLIBC = "/usr/aarch64-linux-gnu"


@pytest.fixture(scope="module")
def emulator() -> list[str]:
    """Return the command that runs a program of aarch64; on such a machine, nothing is needed."""
    if platform.machine() == "aarch64":
        return []
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    assert qemu and os.path.isdir(GLIBC), "install Debian's qemu-user-static and libc6-arm64-cross"
    return [qemu, "-L", GLIBC]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("aarch64") / "program"
    compiler = cross.compiler(cross.TARGETS["aarch64-linux"])
    sources = [TESTS / "main.c", *sorted(TESTS.glob("test_*.c"))]
    core.compile_core(path, "-O3", *sources, compiler=compiler, without=INCLUDED)
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        "siphash",
        "arena",
        "items",
        "nontemporal",
        "scale",
        "sum 600",
        "wait",
        "core",
        "ring 3 5000",
        "peers groups 3 6 20",
        "peers refused",
        "shm processes 2 2000",
        "shm processes 4 500",
        "shm threads 4 500",
        *(f"shm processes 3 {2 * which + 1}" for which in range(5)),  # each invalid offset of an output
    ],
)
def test_core(emulator: list[str], program: Path, arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPAR_")}
    command = [*emulator, str(program), *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
