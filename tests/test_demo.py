# SPDX-License-Identifier: Apache-2.0
"""What `make demo` runs: it compares with one process, and reports memory and exchanges."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
pytest.importorskip("matplotlib", reason="make demo's, with tqdm")
SMALL = ["--steps", "12", "--batch", "1", "--seq", "130", "--dim", "48", "--layers", "1"]


def run(script: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launch, str(script), *SMALL, *arguments]
    return subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("layout", ["plain", "hybrid", "packed"])
def test_demo_reports_a_rank_share_of_memory_and_its_exchanges(tmp_path: Path, layout: str) -> None:
    done = run(EXAMPLES / "train.py", 2, "--layout", layout, "--out", str(tmp_path / "demo.png"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    report = [line for line in done.stdout.splitlines() if line]
    assert len(report) <= 14, done.stdout
    (share,) = re.findall(r"MB on a rank \((\d+)%\)", done.stdout)
    assert 49 <= int(share) <= 55
    (longest,) = re.findall(r"([\d,]+) tokens instead of 130", done.stdout)
    assert 235 <= int(longest) <= 265
    (exchanges, part) = re.findall(r"^(\d+) exchanges of a step: .*, (\d+)% of it$", done.stdout, re.M)[0]
    assert 5 <= int(exchanges) <= 7 and 0 < int(part) < 100


def test_demo_fails_where_a_loss_differs_from_one_process(tmp_path: Path) -> None:
    script = tmp_path / "differs.py"
    add = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import train"
    script.write_text(f"{add}; train.TOLERANCE = -1; train.main()")
    done = run(script, 2)
    assert done.returncode != 0 and not (tmp_path / "demo.png").exists()
    assert "step 0: the loss differs from one process on ranks [0, 1]" in done.stderr
