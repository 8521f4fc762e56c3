"""What survivors keep of a dead rank after they close the group: nothing that only it could still use."""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_faults import await_report, finish, report, start

import spar

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's here")

gather = spar.gather_forward_split_backward
MAILBOXES = 64 << 10  # bytes: more than those of a few groups


def arenas() -> int:
    """Mapped into this process, its own included."""
    return Path("/proc/self/maps").read_text().count("memfd:spar")


def death_of(rank: int, world: int) -> select.poll:
    """Readable when the rank's process is gone, which is shortly after its connections end. Collective."""
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


def loses_a_rank(rank: int, folder: Path, world: int, how: str, keeps: bool) -> None:
    """The last rank dies before a call that the others make; these close, one after the other."""
    pair = dist.new_group(list(range(world)))
    kept = [gather(torch.full((4 << 20,), float(rank)), group, 0) for group in (None, pair)]
    if not keeps:
        kept.clear()
    death = death_of(world - 1, world)
    dist.barrier()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for group in (None, pair):
        with pytest.raises(spar.PeerLostError):
            gather(torch.zeros(4 << 20), group, 0)
    assert arenas() == world
    assert death.poll(30_000)
    report(folder, world + rank, "lost")
    for other in range(world - 1):  # one still in its calls holds what these have published
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
            assert y[:: 4 << 20].tolist() == list(range(world))
    else:
        assert stats["arena.allocated_bytes"] == 0
    report(folder, rank, "closed")
    for other in range(world - 1):
        await_report(folder, other)


@pytest.mark.parametrize("keeps", [False, True], ids=["no outputs", "outputs held"])
@pytest.mark.parametrize("how", ["close", "destroy"])
@pytest.mark.parametrize("world", [2, 3])
def test_close_unmaps_dead_rank(tmp_path: Path, world: int, how: str, keeps: bool) -> None:
    ranks = start(loses_a_rank, world, tmp_path, world, how, keeps, SPAR_TRANSPORT="shm")
    assert finish(ranks, 90) == [0] * (world - 1) + [-signal.SIGKILL]


def stopped_rank_holds_quarantine(rank: int, folder: Path) -> None:
    """Blocks that a stopped rank may still write to stay; the dead rank's arena is unmapped all the same."""
    gather(torch.full((4 << 20,), float(rank)), None, 0)
    death = death_of(2, 3)
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
    ranks = start(stopped_rank_holds_quarantine, 3, tmp_path, SPAR_TRANSPORT="shm")
    assert finish(ranks, 60) == [0, -signal.SIGKILL, -signal.SIGKILL]
