# SPDX-License-Identifier: Apache-2.0
"""Survivors that close a group release all memory that only the dead rank could still use."""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.processes import await_report, finish, report, start

import spar

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's here"),
    pytest.mark.spread,
]

gather = spar.gather_forward_split_backward
MAILBOXES = 64 << 10  # bytes: more than those of a few groups
ITEMS = 1 << 20  # of a tensor of 4 MiB, which each arena holds beside the mailboxes


def arenas() -> int:
    """Count the arenas that this process maps, its own included."""
    return Path("/proc/self/maps").read_text().count("memfd:spar")


def open_death_event(rank: int, world: int) -> select.poll:
    """Collectively open a descriptor that is readable once the rank is dead, after its connections end."""
    processes: list[int] = [0] * world
    dist.all_gather_object(processes, os.getpid())
    death = select.poll()
    death.register(os.pidfd_open(processes[rank]), select.POLLIN)
    return death


def end(how: str) -> None:
    if how == "destroy":
        dist.destroy_process_group()
    else:
        spar.close()


def lose_rank(rank: int, folder: Path, world: int, how: str, keeps: bool) -> None:
    """The last rank dies before a call of its peers, which then close one after the other."""
    pair = dist.new_group(list(range(world)))
    kept = [gather(torch.full((ITEMS,), float(rank)), group, 0) for group in (None, pair)]
    if not keeps:
        kept.clear()
    death = open_death_event(world - 1, world)
    dist.barrier()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for group in (None, pair):
        with pytest.raises(spar.PeerLostError):
            gather(torch.zeros(ITEMS), group, 0)
    assert arenas() == world
    assert death.poll(30_000)
    report(folder, world + rank, "lost")
    for other in range(world - 1):  # a peer still in its call holds what the others published
        await_report(folder, world + other)
    if rank:
        await_report(folder, rank - 1)
    if how == "close":
        spar.close(pair)
    del pair, group
    end(how)
    assert arenas() == world - 1, Path("/proc/self/maps").read_text()
    stats = spar.memory_stats()
    last = rank == world - 2
    assert stats["arena.quarantined_bytes"] <= (0 if last else MAILBOXES), stats
    if keeps:
        for y in kept:
            assert y[::ITEMS].tolist() == list(range(world))
    else:
        assert stats["arena.allocated_bytes"] == 0
    report(folder, rank, "closed")
    for other in range(world - 1):
        await_report(folder, other)


@pytest.mark.parametrize("keeps", [False, True], ids=["no outputs", "outputs held"])
@pytest.mark.parametrize("how", ["close", "destroy"])
@pytest.mark.parametrize("world", [2, 3])
def test_close_unmaps_dead_rank(tmp_path: Path, world: int, how: str, keeps: bool) -> None:
    ranks = start(lose_rank, world, tmp_path, world, how, keeps, SPAR_TRANSPORT="shm")
    assert finish(ranks, 90) == [0] * (world - 1) + [-signal.SIGKILL]


def keep_quarantine_of_stopped_rank(rank: int, folder: Path) -> None:
    """Blocks that a stopped rank may still write to stay quarantined; the dead rank's arena is unmapped."""
    gather(torch.full((4 << 20,), float(rank)), None, 0)
    death = open_death_event(2, 3)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        report(folder, 1, str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    await_report(folder, 1)
    with pytest.raises(spar.PeerLostError):
        gather(torch.zeros(4 << 20), None, 0)
    assert death.poll(30_000)
    spar.close()
    assert arenas() == 2
    assert spar.memory_stats()["arena.quarantined_bytes"] > 32 << 20
    os.kill(int(await_report(folder, 1)), signal.SIGKILL)
    while arenas() > 1:
        spar.empty_cache()
    stats = spar.memory_stats()
    assert (stats["arena.quarantined_bytes"], stats["arena.reserved_bytes"]) == (0, 0)


def test_quarantine_does_not_keep_dead_rank_mapped(tmp_path: Path) -> None:
    ranks = start(keep_quarantine_of_stopped_rank, 3, tmp_path, SPAR_TRANSPORT="shm")
    assert finish(ranks, 60) == [0, -signal.SIGKILL, -signal.SIGKILL]
