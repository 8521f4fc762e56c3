# SPDX-License-Identifier: Apache-2.0
"""CUDA's installed headers, with which declarations are compared, and its libraries: no GPU is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.core_abi import CSRC


def packaged(*patterns: str) -> list[Path]:
    """Files of the installed CUDA packages and of the system's toolkit."""
    roots = [Path(root, "nvidia") for root in sys.path] + [Path("/usr/local/cuda")]
    return [path for root in roots for pattern in patterns for path in sorted(root.glob(pattern))]


def check_declarations(tmp_path: Path, header: str, text: str) -> None:
    folders = {path.parent for path in packaged(f"include/{header}", f"*/include/{header}")}
    if not folders:
        pytest.skip(f"no {header} here: neither a toolkit nor the package nvidia-cuda-runtime or -nvrtc")
    source = tmp_path / "check.c"
    source.write_text(text)
    for folder in folders:
        command = ["cc", "-std=c11", "-fsyntax-only", "-isystem", str(folder), f"-I{CSRC}", str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{folder}: {done.stderr}"
