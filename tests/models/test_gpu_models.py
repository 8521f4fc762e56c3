# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu_models.py, with CPUs in the place of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = TESTS.parent / "benchmarks" / "gpu_models.py"
NOT_SUMMED = """
import spar.testing
compare = spar.testing.compare
spar.testing.compare = lambda *args, **given: compare(*args, **given | {"reduce": "mean"})
"""


def test_gradients_are_compared(tmp_path: Path) -> None:
    """Of a view they are averaged over the ranks; those of `shard` are to be summed, and are not here."""
    Path(tmp_path, "sitecustomize.py").write_text(NOT_SUMMED)
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tokens", "61", "--models", "Llama"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}:{TESTS}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("| parallelize", "| shard"))]
    rows = [line.split(" | ")[:2] for line in lines]
    wrong = [line.partition(": Entry")[0] for line in done.stdout.splitlines() if "**wrong**" in line]
    assert rows == [["| parallelize", "Llama"], ["| shard", "Llama"]], done.stdout + done.stderr
    assert wrong == ["**wrong**: shard of Llama"] and done.returncode == 1, done.stdout + done.stderr
