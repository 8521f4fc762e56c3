# SPDX-License-Identifier: Apache-2.0
"""benchmarks/hybrid.py runs: bytes are those of the documentation, and a rank's peak memory falls."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from helpers.launched import launch

PRELOAD = ["transformers.models.qwen3_5.modeling_qwen3_5"]
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "hybrid.py"


def run_benchmark(folder: Path, arguments: tuple[str, ...]) -> None:
    sys.argv = ["hybrid.py", *arguments]
    with (folder / f"printed {os.environ['RANK']}").open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(BENCHMARK), run_name="__main__")


def run(folder: Path, world: int, *arguments: str) -> str:
    launch(run_benchmark, world, folder, arguments, limit=240)
    return (folder / "printed 0").read_text()


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_of_a_layer_are_those_expected(world: int, tmp_path: Path) -> None:
    rows = [line.split() for line in run(tmp_path, world, "256", "1024", "--turns", "1").splitlines()[-2:]]
    assert [row[0] for row in rows] == ["256", "1024"] and all(row[4] == row[5] for row in rows), rows


def test_peak_memory_of_a_rank_falls_as_one_over_the_ranks(tmp_path: Path) -> None:
    peaks = {}
    for world in (1, 4):
        found = re.search(rf"{world} ranks, 2048 tokens: (\d+) MiB", run(tmp_path, world, "--memory", "2048"))
        assert found is not None
        peaks[world] = int(found[1])
    # Of a shard alone: what does not fall, such as gradients of parameters, is there before.
    assert peaks[1] / peaks[4] > 2.8, peaks
