# SPDX-License-Identifier: Apache-2.0
"""benchmarks/memory.py runs, and a rank of two needs about half of the memory of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory.py"


def test_memory_of_a_rank_is_printed_and_falls() -> None:
    command = [sys.executable, str(BENCHMARK), "--ranks", "2", "--tokens", "2048"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=240
    )
    peaks = {int(ranks): int(mib) for ranks, mib in re.findall(r"^ +(\d+) +(\d+) MiB$", done.stdout, re.M)}
    assert peaks[1] / peaks[2] > 1.5, done.stdout
