# SPDX-License-Identifier: Apache-2.0
"""Groups that span hosts: faults that processes survive, on ranks of either host."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.fault_cases import FAULTS, LIMIT
from helpers.hosts import SHAPES, WORLD, Hosts, group_with, pool_of
from helpers.processes import finish
from test_fault_matrix import attempt, check_fault, make_scene, run_fault

import spar

Group = dist.ProcessGroup


@pytest.fixture(scope="module", params=SHAPES)
def pool(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield from pool_of(request.param)


# ---- the faults of the matrix, with the last rank as the odd one ----

# The cap on shared memory need not bound what comes from other hosts.
LEFT_OUT = {"out of memory"}
NAMES = [name for name in FAULTS if name not in LEFT_OUT]


def run_faults(rank: int, folder: Path) -> None:
    scene = make_scene(rank, WORLD)
    results = {}
    for name in NAMES:
        results[name] = run_fault(FAULTS[name], rank, WORLD, scene)
        (folder / f"{rank}.part").write_text(json.dumps(results))
        (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    dist.barrier()


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[dict[str, Any]], list[Any]]]:
    """Return by shape each rank's results, to the last fault that it ended, and the processes."""
    found = {}
    all_hosts = {name: Hosts(shape) for name, shape in SHAPES.items()}
    folders = {name: tmp_path_factory.mktemp("faults") for name in SHAPES}
    started = {name: hosts.start(run_faults, folders[name]) for name, hosts in all_hosts.items()}
    for name, hosts in all_hosts.items():
        codes = finish(started[name], 100)
        paths = [folders[name] / f"{rank}.json" for rank in range(WORLD)]
        results = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
        found[name] = results, [codes, [process.pid for process in started[name]]]
        hosts.close()
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_fault(faults: Any, name: str, shape: str) -> None:
    """The odd rank is the last, on the second host: in 3 + 1 the only one there."""
    results, (_, pids) = faults[shape]
    check_fault(FAULTS[name], [of_rank[name] for of_rank in results], pids[-1])


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_end_after_faults(faults: Any, shape: str) -> None:
    assert faults[shape][1][0] == [0] * WORLD


def differ_from(rank: int, world: int, group: Group, odd: int) -> tuple[str, str, list[int]]:
    """Another shape on one rank; then a good call, on the same group."""
    own = group_with(10)
    with pytest.raises(spar.MismatchError) as caught:
        spar.all_gather(torch.zeros(2, 3 + (rank == odd)), own)
    assert spar.all_gather(torch.full((1,), float(rank)), own).tolist() == [0.0, 1.0, 2.0, 3.0]
    text = str(caught.value)
    return text.split(":", 1)[1], text, list(caught.value.ranks)


@pytest.mark.parametrize("odd", range(WORLD))
def test_rank_of_either_host_may_differ(pool: Ranks, odd: int) -> None:
    found = pool(WORLD, differ_from, odd)
    assert len({same for same, _, _ in found}) == 1
    for _, text, ranks in found:
        assert "all_gather [8, 3]" in text and "all_gather [8, 4]" in text and ranks == [odd]


def fail_before(rank: int, world: int, group: Group, odd: int) -> None:
    own = group_with(10)
    error, text = (
        (ValueError, "dim is 7") if rank == odd else (spar.MismatchError, f"rank {odd} failed: .*dim is 7")
    )
    with pytest.raises(error, match=text) as caught:
        spar.all_gather(torch.zeros(2), own, 7 if rank == odd else 0)
    assert rank == odd or caught.value.ranks == (odd,)  # type: ignore[attr-defined]
    assert spar.all_gather(torch.full((1,), float(rank)), own).tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("odd", [0, 1])
def test_rank_of_the_first_host_may_fail_before_its_call(pool: Ranks, odd: int) -> None:
    pool(WORLD, fail_before, odd)


# ---- absent and interrupted ranks of any place: the faults have the last rank ----


def miss_call(rank: int, world: int, group: Group, absent: list[int]) -> dict[str, Any]:
    own = group_with(LIMIT)
    if rank in absent:
        time.sleep(LIMIT + 0.6)
        return {}
    return attempt(lambda: spar.all_gather(torch.zeros(4), own))


@pytest.mark.parametrize("absent", [[0], [1, 3], [0, 1, 2]], ids=str)
def test_timeout_names_all_absent_ranks(pool: Ranks, absent: list[int]) -> None:
    results = pool(WORLD, miss_call, absent)
    for rank in set(range(WORLD)) - set(absent):
        result = results[rank]
        assert (result["error"], result["ranks"]) == ("ExchangeTimeoutError", absent), result
        assert LIMIT - 0.1 < result["seconds"] < LIMIT + 2


def interrupt_one(rank: int, world: int, group: Group, odd: int) -> dict[str, Any]:
    own = group_with(10)
    if rank == odd:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    elif rank == WORLD - 1 - odd:
        time.sleep(0.6)  # so that the others wait in the call
    return attempt(lambda: spar.all_gather(torch.zeros(4), own))


def test_ctrl_c_on_the_first_host_is_reported_to_all(pool: Ranks) -> None:
    odd = 1
    results = pool(WORLD, interrupt_one, odd)
    assert results[odd]["error"] == "KeyboardInterrupt"
    for result in (results[rank] for rank in range(WORLD) if rank != odd):
        assert result["error"] == "GroupBrokenError", result
        assert re.search(rf"rank {odd} was interrupted in call \d", result["text"])
        assert result["seconds"] < 2
