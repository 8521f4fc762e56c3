# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu_models.py, with CPUs in the place of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = TESTS.parent / "benchmarks" / "gpu_models.py"
SECOND_IS_SUMMED = """
import spar.testing
compare, ways = spar.testing.compare, iter(["mean", "sum"])
spar.testing.compare = lambda *args, **given: compare(*args, **given | {"reduce": next(ways)})
"""


def test_gradients_are_compared(tmp_path: Path) -> None:
    """They are to be averaged over the ranks; those of the second model are summed here."""
    Path(tmp_path, "sitecustomize.py").write_text(SECOND_IS_SUMMED)
    options = ["--device", "cpu", "--tokens", "61", "--models", "Llama", "Mistral"]
    command = [sys.executable, str(SCRIPT), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}:{TESTS}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    rows = [line.split(" | ")[0] for line in lines if line.startswith(("| Llama", "| Mistral"))]
    wrong = [line.partition(": Entry")[0] for line in lines if "**wrong**" in line]
    assert rows == ["| Llama", "| Mistral"], done.stdout + done.stderr
    assert wrong == ["**wrong**: Mistral"] and done.returncode == 1, done.stdout + done.stderr
