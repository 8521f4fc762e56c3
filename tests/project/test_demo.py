# SPDX-License-Identifier: Apache-2.0
"""What `make demo` runs: it compares with one process, and reports memory and exchanges."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.processes import finish, start

EXAMPLES = Path(__file__).parents[2] / "examples"
if importlib.util.find_spec("matplotlib") is None:  # its import takes half a second
    pytest.skip("matplotlib, which make demo installs, is not", allow_module_level=True)
SMALL = ["--steps", "12", "--batch", "1", "--seq", "130", "--dim", "48", "--layers", "1"]


def main_of(rank: int, folder: Path, port: int, arguments: list[str], tolerance: float | None) -> None:
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in environment.items()}, MASTER_ADDR="localhost")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_CREAT | os.O_WRONLY), descriptor)
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = ["train.py", *SMALL, *arguments]
    import train

    train.TOLERANCE = train.TOLERANCE if tolerance is None else tolerance
    train.main()


def run_forked(folder: Path, *arguments: str, tolerance: float | None = None) -> tuple[int, str, str]:
    """Run train.main as torchrun does on two ranks, which are forks: they need not import torch.

    Returns the exit status, stdout and stderr. `make demo` starts torchrun.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent
    ranks = start(main_of, 2, folder, store.port, list(arguments), tolerance, initialize=False)
    codes = finish(ranks, 200)
    out, err = (
        "".join((folder / f"{rank}.{name}").read_text() for rank in (0, 1)) for name in ("out", "err")
    )
    assert None not in codes, err
    return max(abs(code or 0) for code in codes), out, err


@pytest.mark.parametrize("layout", ["plain", "hybrid", "packed"])
def test_demo_reports_a_rank_share_of_memory_and_its_exchanges(tmp_path: Path, layout: str) -> None:
    arguments = ("--layout", layout, "--out", str(tmp_path / "demo.png"))
    code, out, err = run_forked(tmp_path, *arguments)
    assert code == 0, err
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    report = [line for line in out.splitlines() if line]
    assert len(report) <= 14, out
    (share,) = re.findall(r"MB on a rank \((\d+)%\)", out)
    assert 49 <= int(share) <= 55
    (longest,) = re.findall(r"([\d,]+) tokens instead of 130", out)
    assert 235 <= int(longest) <= 265
    (exchanges, part) = re.findall(r"^(\d+) exchanges of a step: .*, (\d+)% of it$", out, re.M)[0]
    assert 5 <= int(exchanges) <= 7 and 0 < int(part) < 100


def test_demo_fails_where_a_loss_differs_from_one_process(tmp_path: Path) -> None:
    code, _, err = run_forked(tmp_path, tolerance=-1)
    assert code != 0 and not (tmp_path / "demo.png").exists()
    assert "step 0: the loss differs from one process on ranks [0, 1]" in err
