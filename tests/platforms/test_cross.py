# SPDX-License-Identifier: Apache-2.0
"""What the wheels depend on: CPython's headers for another target, and instruction sets that zig finds."""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "release"))
import cross  # noqa: E402


@pytest.mark.parametrize("multiarch", [True, False])
def test_headers_have_this_machines_pyconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, multiarch: bool
) -> None:
    include = tmp_path / "include" / "python3.99"
    include.mkdir(parents=True)
    (include / "Python.h").write_text('#include "pyconfig.h"')
    (include / "pyconfig.h").write_text("the target's" if multiarch else "this machine's")
    if multiarch:  # as on Debian
        own = tmp_path / "include" / "x86_64-linux-gnu" / "python3.99"
        own.mkdir(parents=True)
        (own / "pyconfig.h").write_text("this machine's")
    monkeypatch.setattr(cross, "BUILD", tmp_path / "build")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(include))
    monkeypatch.setattr(sysconfig, "get_config_h_filename", lambda: str(include / "pyconfig.h"))
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "x86_64-linux-gnu")
    folder = cross.headers()
    assert (folder / "Python.h").exists()
    assert (folder / "pyconfig.h").read_text() == "this machine's"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs the instruction sets of x86-64")
def test_wheels_find_the_instruction_sets(tmp_path: Path) -> None:
    """zig's own test of them is always false, which would make scaling in float16 13 times slower."""
    (tmp_path / "main.c").write_text(
        """#include "devices/cpu/processor.h"
        int main(void) { return spar_processor_has(SPAR_AVX2) | spar_processor_has(SPAR_AVX512) << 1; }"""
    )
    sources = [tmp_path / "main.c", ROOT / "csrc/devices/cpu/processor.c"]
    compiler = cross.compiler(cross.TARGETS["x86_64-linux"])
    subprocess.run([*compiler, f"-I{ROOT / 'csrc'}", *sources, "-o", tmp_path / "main"], check=True)
    flags = Path("/proc/cpuinfo").read_text().split()
    expected = ("avx2" in flags) | ("avx512vl" in flags) << 1
    assert subprocess.run([tmp_path / "main"]).returncode == expected
