# SPDX-License-Identifier: Apache-2.0
"""Groups that span hosts: deaths and cut links are reported on all hosts."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.fault_cases import LOST_WITHIN, OVER, gather
from helpers.hosts import SHAPES, WORLD, Hosts
from helpers.processes import await_report, finish, report
from helpers.reference import assert_same
from helpers.traffic import exchanges
from helpers.workers import machine
from test_fault_matrix import attempt

import spar

# ---- deaths ----


def call_until_death(rank: int, folder: Path, victim: int, how: str) -> None:
    """Make large calls until the victim dies: in a call, or in a pause before it that is within the limit."""
    big = torch.zeros(1 << 20)
    dist.barrier()
    if rank == victim:
        if how == "between calls":
            time.sleep(0.3)
            report(folder, 100, str(time.time()))
            os._exit(0)
        report(folder, 100, "")
    result = attempt(lambda: [gather(big, None, 0) for _ in range(10_000)])
    result["again"] = attempt(lambda: gather(torch.zeros(1), None, 0))
    (folder / f"{rank}.json").write_text(json.dumps(result))


DEATHS = {  # the shape, the victim, how it dies
    "in a call, beside a rank of its host": ("2 + 2", 2, "in a call"),
    "in a call, the only rank of its host": ("3 + 1", 3, "in a call"),
    "in a call, rank 0, which has the store": ("2 + 2", 0, "in a call"),
    "between calls": ("3 + 1", 1, "between calls"),
}


@pytest.mark.parametrize("name", DEATHS)
def test_death_is_reported_on_all_hosts(tmp_path: Path, name: str) -> None:
    shape, victim, how = DEATHS[name]
    with Hosts(SHAPES[shape]) as hosts, machine.alone():
        processes = hosts.start(call_until_death, tmp_path, victim, how, SPAR_TIMEOUT="30")
        died = await_report(tmp_path, 100)
        if how == "in a call":
            time.sleep(0.3)
            died = str(time.time())
            os.kill(processes[victim].pid, signal.SIGKILL)
        codes = finish(processes, 20)
    survivors = [rank for rank in range(WORLD) if rank != victim]
    assert [codes[rank] for rank in survivors] == [0] * 3
    for rank in survivors:
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result["error"] == "PeerLostError", (rank, result)
        assert result["ranks"] == [victim], (rank, result)
        assert f"rank {victim} " in result["text"]
        assert result["at"] - float(died) < LOST_WITHIN, (rank, result)
        assert result["again"]["error"] == "GroupBrokenError" and result["again"]["seconds"] < 0.3


# ---- cut links ----


def call_over_cut(rank: int, folder: Path, between: bool) -> None:
    """Call until the link is cut, or only then."""
    big = torch.zeros(1 << 18)
    dist.barrier()
    report(folder, rank, "")
    if between:
        await_report(folder, 100)
    result = attempt(lambda: [gather(big, None, 0) for _ in range(100_000)])
    result["again"] = attempt(lambda: gather(torch.zeros(1), None, 0))
    (folder / f"{rank}.json").write_text(json.dumps(result))


@pytest.mark.parametrize(
    ("shape", "between"), [("2 + 2", False), ("3 + 1", True)], ids=["in a call", "between calls"]
)
def test_cut_link_is_an_error_on_both_sides(tmp_path: Path, shape: str, between: bool) -> None:
    limit = 1.5
    with Hosts(SHAPES[shape]) as hosts, machine.alone():
        processes = hosts.start(call_over_cut, tmp_path, between, SPAR_TIMEOUT=str(limit))
        for rank in range(WORLD):
            await_report(tmp_path, rank)
        time.sleep(0.2)
        hosts.cut(1)
        cut = time.time()
        report(tmp_path, 100, "")
        codes = finish(processes, limit + OVER + 5)
        sides = [hosts.ranks_of(host) for host in range(2)]
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]
    for own, others in (sides, sides[::-1]):
        for result in (results[rank] for rank in own):
            assert result["error"] in ("ExchangeTimeoutError", "PeerLostError", "GroupBrokenError"), result
            assert result["at"] - cut < limit + 2, result
            assert result["again"]["error"] == "GroupBrokenError"
        timed_out = [results[rank] for rank in own if results[rank]["error"] == "ExchangeTimeoutError"]
        for result in timed_out:
            assert result["ranks"] and set(result["ranks"]) <= set(others), result
    assert codes == [0] * WORLD


def call_over_returning_link(rank: int, folder: Path) -> None:
    """Calls in which the link is cut for a second."""
    dist.barrier()
    report(folder, rank, "")
    for call in range(40):
        parts = [torch.full((50_000,), float(call + r)) for r in range(WORLD)]
        assert_same(spar.all_gather(parts[rank]), torch.cat(parts), call)
        time.sleep(0.02)
    assert exchanges() >= 41
    dist.barrier()


def test_link_that_returns_within_the_limit_costs_nothing(tmp_path: Path) -> None:
    with Hosts((2, 2)) as hosts:
        processes = hosts.start(call_over_returning_link, tmp_path, SPAR_TIMEOUT="20")
        for rank in range(WORLD):
            await_report(tmp_path, rank)
        time.sleep(0.2)
        hosts.cut(1)
        time.sleep(1)
        assert all(process.exitcode is None for process in processes), "no rank can have ended its calls"
        hosts.restore(1)
        assert finish(processes, 25) == [0] * WORLD
