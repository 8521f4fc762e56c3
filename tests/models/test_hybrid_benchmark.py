# SPDX-License-Identifier: Apache-2.0
"""benchmarks/hybrid.py runs: bytes are those of the documentation, and a rank's peak memory falls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(world: int, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(ROOT / "benchmarks" / "hybrid.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_of_a_layer_are_those_expected(world: int) -> None:
    rows = [line.split() for line in run(world, "256", "1024", "--turns", "1").splitlines()[-2:]]
    assert [row[0] for row in rows] == ["256", "1024"] and all(row[4] == row[5] for row in rows), rows


def test_peak_memory_of_a_rank_falls_as_one_over_the_ranks() -> None:
    peaks = {}
    for world in (1, 2, 4):
        found = re.search(rf"{world} ranks, 2048 tokens: (\d+) MiB", run(world, "--memory", "2048"))
        assert found is not None
        peaks[world] = int(found[1])
    # Of a shard alone: what does not fall, such as gradients of parameters, is there before.
    assert peaks[1] / peaks[2] > 1.6 and peaks[1] / peaks[4] > 2.8, peaks
