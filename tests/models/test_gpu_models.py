# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu_models.py, with CPUs in the place of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = TESTS.parent / "benchmarks" / "gpu_models.py"


def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tokens", "61", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)} | changes
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_models_are_those_of_one_process() -> None:
    done = run("--models", "Llama", "bamba")
    rows = [line.split(" | ")[:2] for line in done.stdout.splitlines() if line.startswith("| shard")]
    expected = [[f"| {way}", name] for way in ("shard_model", "shard") for name in ("Llama", "bamba")]
    assert done.returncode == 0 and rows == expected, done.stdout + done.stderr


def test_wrong_gradients_fail(tmp_path: Path) -> None:
    """With gradients of a view that are not averaged."""
    Path(tmp_path, "sitecustomize.py").write_text(
        "import spar.testing\n"
        "compare = spar.testing.compare\n"
        "spar.testing.compare = lambda *a, **k: compare(*a, **k | {'reduce': 'sum'})\n"
    )
    done = run("--models", "Llama", PYTHONPATH=f"{tmp_path}:{TESTS}")
    assert done.returncode == 1 and "**wrong**: shard_model of Llama" in done.stdout, (
        done.stdout + done.stderr
    )
