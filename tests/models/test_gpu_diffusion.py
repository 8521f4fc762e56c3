# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu_diffusion.py, with CPUs in the place of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = TESTS.parent / "benchmarks" / "gpu_diffusion.py"
SECOND_IS_SUMMED = """
from helpers import averages
averaged, factors = averages.averaged, iter([1, 2])

def scaled(tensors, group):
    factor = next(factors)
    return [x * factor for x in averaged(tensors, group)]

averages.averaged = scaled
"""


def test_gradients_are_compared(tmp_path: Path) -> None:
    """They are averaged over the ranks; those of the second model are summed here."""
    Path(tmp_path, "sitecustomize.py").write_text(SECOND_IS_SUMMED)
    names = ["PixArtTransformer2DModel", "WanTransformer3DModel"]
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--models", *names]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}:{TESTS}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    rows = [line.split(" | ")[0] for line in lines if line.startswith("| ")][2:]
    wrong = [line for line in lines if "**wrong**" in line]
    assert rows == [f"| {name}" for name in names], done.stdout + done.stderr
    text = "**wrong**: WanTransformer3DModel: an error of gradients of 1e+00"
    assert wrong == [text] and done.returncode == 1, done.stdout + done.stderr
