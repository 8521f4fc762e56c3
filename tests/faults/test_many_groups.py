# SPDX-License-Identifier: Apache-2.0
"""Many groups at once, and many one after another: nothing grows."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS
from helpers.growth import Growth
from helpers.processes import finish, start
from helpers.reference import assert_same

import spar

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's here"),
    pytest.mark.waits,
    pytest.mark.spread,
]

gather = spar.gather_forward_split_backward


def create_and_close(rank: int, folder: Path, rounds: int) -> None:
    """Set up and close groups of spar on one ProcessGroup: state in C, mailbox, handle."""
    for i in range(rounds + 20):
        if i == 20:
            growth = Growth()
        y = gather(torch.full((1,), float(rank)), None, 0)
        spar.close()
    assert y.tolist() == [0.0, 1.0]
    growth.check()


def test_groups_do_not_leak(tmp_path: Path) -> None:
    rounds = int(os.environ.get("SOAK_GROUPS", "100"))  # `make soak` sets more
    ranks = start(create_and_close, 2, tmp_path, rounds, SPAR_TRANSPORT="shm")
    assert finish(ranks, 250) == [0, 0]


def mapped() -> int:
    """Count the mapped arenas of this process and its peers."""
    return Path("/proc/self/maps").read_text().count("memfd:spar")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def create_and_destroy(rank: int, folder: Path, rounds: int) -> None:
    """Create, use and destroy ProcessGroups of torch."""
    for i in range(rounds + 20):
        if i == 20:
            growth, maps, before = Growth(), mapped(), resident()
        group = dist.new_group([0, 1])
        y = gather(torch.full((1,), float(rank)), group, 0)
        assert y.tolist() == [0.0, 1.0]
        spar.close(group)
        dist.destroy_process_group(group)
        del group
    dist.barrier()
    growth.check()
    assert mapped() == maps == 2, "one's own arena and the other's"
    grown = resident() - before
    (folder / f"{rank}.grown").write_text(f"{grown} bytes in {rounds} groups")
    assert grown < (4 << 20) + rounds * 5000, grown  # one-time allocations, and what torch keeps per group


def test_torch_process_groups_do_not_leak(tmp_path: Path) -> None:
    ranks = start(create_and_destroy, 2, tmp_path, 80, SPAR_TRANSPORT="shm")
    assert finish(ranks, 120) == [0, 0]


def use_many_groups(rank: int, folder: Path) -> None:
    """Use 32 groups at once; then 8 threads with one group each, with calls of different sizes."""
    groups = [dist.new_group([0, 1, 2]) for _ in range(32)]
    kept = [gather(torch.full((3,), float(i + rank)), group, 0) for i, group in enumerate(groups)]
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for n in range(40):
                y = gather(torch.full((1 + 37 * n,), float(i + rank)), groups[i], 0)
                assert_same(y, torch.tensor([i, i + 1.0, i + 2.0]).repeat_interleave(1 + 37 * n))
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures
    for i, y in enumerate(kept):
        assert_same(y, torch.tensor([i, i + 1.0, i + 2.0]).repeat_interleave(3))
    assert len({spar.transport(group).name for group in groups}) == 1
    dist.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_groups_and_threads(tmp_path: Path, transport: str) -> None:
    """On most machines with more ranks than cores."""
    assert finish(start(use_many_groups, 3, tmp_path, SPAR_TRANSPORT=transport), 120) == [0, 0, 0]
