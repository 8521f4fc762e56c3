"""setup.py on systems that cannot build spar: three lines that name what to install, no compiler output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = [
    f"apt-get install gcc libc6-dev python3.{sys.version_info[1]}-dev",
    "dnf install gcc python3-devel",
]


def rejected_build(tmp_path: Path, *python: str, command: str = "build_ext", **environment: str) -> list[str]:
    """Return the lines that setup.py prints; check that it builds nothing."""
    folders = {"build": ["--build-base"], "build_ext": ["--build-lib", "--build-temp"]}[command]
    arguments = [command, *(item for option in folders for item in (option, str(tmp_path / "built")))]
    done = subprocess.run(
        [sys.executable, *(python or ("setup.py",)), "-q", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert not (tmp_path / "built").exists()
    return (done.stdout + done.stderr).splitlines()


def check_packages(lines: list[str]) -> None:
    assert len(lines) == 3, lines
    for line, packages in zip(lines[1:], PACKAGES, strict=True):
        assert packages in line


@pytest.mark.parametrize("command", ["build", "build_ext"])
@pytest.mark.parametrize("environment", [{"CC": "/nonexistent"}, {"PATH": "/nonexistent", "CC": "gcc"}])
def test_missing_compiler_is_reported(tmp_path: Path, command: str, environment: dict[str, str]) -> None:
    lines = rejected_build(tmp_path, command=command, **environment)
    assert lines[0].startswith("spar needs a C compiler: No such file or directory: " + environment["CC"])
    check_packages(lines)


@pytest.mark.parametrize(
    ("without", "what"), [("Python.h", "CPython's headers (Python.h"), ("stdio.h", "the C library's headers")]
)
def test_missing_headers_are_reported(tmp_path: Path, without: str, what: str) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text(
        f'#!/bin/sh\nif grep -q {without}; then echo "fatal error: {without}: No such file" >&2; exit 1; fi\n'
    )
    compiler.chmod(0o755)
    lines = rejected_build(tmp_path, CC=str(compiler))
    assert lines[0].startswith(f"spar needs {what}")
    assert lines[0].endswith(f"failed: fatal error: {without}: No such file")
    check_packages(lines)


def test_other_systems_are_rejected(tmp_path: Path) -> None:
    code = "import runpy, setuptools.command.build_ext, sys; sys.platform = 'darwin'; "
    lines = rejected_build(tmp_path, "-c", code + "sys.argv[0] = 'setup.py'; runpy.run_path('setup.py')")
    assert len(lines) == 3
    assert "spar builds on Linux only: on darwin there is no shared memory transport" in lines[0]
    assert "over torch.distributed" in lines[2]
