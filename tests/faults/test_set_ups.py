# SPDX-License-Identifier: Apache-2.0
"""Settings and set-ups: environment variables, concurrent set-ups, init and close."""

from __future__ import annotations

import datetime
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS
from helpers import core, tables
from helpers.processes import finish, start
from helpers.reference import assert_same

import spar
from spar import _C
from spar._control import agreement, collectives, speeds
from spar._group import setup as rendezvous
from spar._group.registry import group_of

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's here"),
    pytest.mark.waits,
    pytest.mark.spread,
]

gather = spar.gather_forward_split_backward


# ---- settings ----


def resize_torch_outputs(rank: int, folder: Path) -> None:
    """With SPAR_OUTPUT=torch, outputs are in torch's memory and can be resized."""
    y = gather(torch.full((4,), float(rank)), None, 0)
    assert spar.transport().name == "shm"
    assert_same(y, torch.tensor([0.0] * 4 + [1.0] * 4))
    y.resize_(100)
    y.untyped_storage().resize_(0)
    assert spar.memory_stats()["arena.allocated_bytes"] < 4096, "the mailbox alone"


def test_outputs_in_torch_memory(tmp_path: Path) -> None:
    assert finish(start(resize_torch_outputs, 2, tmp_path, SPAR_OUTPUT="torch"), 40) == [0, 0]


def resize_outputs(rank: int, folder: Path) -> None:
    """Outputs in shared memory cannot be resized; operations within the storage work."""

    def output() -> torch.Tensor:
        return gather(torch.full((4,), float(rank)), None, 0)

    refused: tuple[Callable[[torch.Tensor], object], ...] = (
        lambda y: y.resize_(100),
        lambda y: y.untyped_storage().resize_(0),
        lambda y: y.untyped_storage().resize_(16),
        lambda y: y.untyped_storage().resize_(400),
        lambda y: torch.add(torch.ones(100), 1, out=y),
    )
    for call in refused:
        with pytest.raises(RuntimeError, match="not resizable"):
            call(output())
    assert_same(output().resize_(2), torch.zeros(2))
    assert_same(output().resize_(2).resize_(8), torch.tensor([0.0] * 4 + [1.0] * 4))
    before = spar.memory_stats()["arena.allocated_bytes"]
    z = output()
    z.set_()  # type: ignore[call-overload]
    assert z.shape == (0,) and spar.memory_stats()["arena.allocated_bytes"] == before
    z.resize_(100)
    assert output().clone().resize_(100).shape == (100,)


def test_outputs_cannot_be_resized(tmp_path: Path) -> None:
    assert finish(start(resize_outputs, 2, tmp_path, SPAR_TRANSPORT="shm"), 40) == [0, 0]


def exchange_often(rank: int, folder: Path) -> None:
    for i in range(200):
        assert_same(
            gather(torch.full((1,), float(rank + i)), None, 0), torch.tensor([0.0 + i, 1.0 + i, 2.0 + i])
        )


@pytest.mark.parametrize("microseconds", ["0", "1", "300"])
def test_exchanges_with_any_spin_time(tmp_path: Path, microseconds: str) -> None:
    ranks = start(exchange_often, 3, tmp_path, SPAR_SPIN_US=microseconds, SPAR_TRANSPORT="shm")
    assert finish(ranks, 60) == [0, 0, 0]


def count_own_cores(rank: int, folder: Path, cores: list[set[int]], counts: list[int]) -> None:
    os.sched_setaffinity(0, cores[rank])  # as a launcher binds ranks, before torch starts its threads
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(cores))
    gather(torch.zeros(1), None, 0)
    assert dist.group.WORLD is not None
    assert group_of(dist.group.WORLD).core_share == counts[rank]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_know_whether_a_core_is_their_own(tmp_path: Path, transport: str) -> None:
    first, second, *_ = [*sorted(os.sched_getaffinity(0)), None]
    if second is None or _C.limits()[0] < 2:
        pytest.skip("needs two cores")
    cases = (
        ([{first}, {second}], [1, 1]),  # bound apart
        ([{first, second}, {first, second}], [1, 1]),  # not bound
        ([{first}, {first}], [0, 0]),
        ([{first}, {first, second}], [0, 1]),  # the second knows no better
        ([{first}, {second}, {first}, {second}], [0, 0, 0, 0]),
    )
    for i, (cores, counts) in enumerate(cases):
        (folder := tmp_path / str(i)).mkdir()
        settings = {"SPAR_TRANSPORT": transport, "LOCAL_WORLD_SIZE": str(len(cores))}
        ranks = start(count_own_cores, len(cores), folder, cores, counts, initialize=False, **settings)
        assert finish(ranks, 60) == [0] * len(cores), cores


def poll_for_late_rank(rank: int, folder: Path, cores: list[int]) -> None:
    os.sched_setaffinity(0, {cores[rank]})
    gather(torch.zeros(1), None, 0)  # publishes the core
    used = []
    for _ in range(9):
        time.sleep(0.04 * rank)
        begin = time.thread_time()
        gather(torch.zeros(1), None, 0)
        used.append(time.thread_time() - begin)
    if rank == 0 and cores[0] == cores[1]:
        assert statistics.median(used) < 0.0005, f"polled for a rank on its own core: {used}"
    elif rank == 0:
        assert max(used) > 0.0005, f"blocked at once for a rank on another core: {used}"


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's here")
def test_ranks_poll_only_for_ranks_on_other_cores(tmp_path: Path) -> None:
    """By the CPU time of rank 0 in a wait of 40 ms, of which it may poll for half."""
    first, *others = sorted(os.sched_getaffinity(0))
    for second in [first, *others[:1]]:
        (folder := tmp_path / str(second)).mkdir()
        settings = {"SPAR_SPIN_US": "20000", "SPAR_TRANSPORT": "shm"}
        assert finish(start(poll_for_late_rank, 2, folder, [first, second], **settings), 60) == [0, 0]


def wait_for_late_rank(rank: int, folder: Path) -> None:
    """Timeouts beyond a year, of SPAR_TIMEOUT or the group, neither overflow nor end a wait early."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(days=400_000))
    for _ in range(2):  # with the set-up and without
        time.sleep(0.3 * rank)
        assert_same(gather(torch.full((1,), float(rank)), group, 0), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("timeout", ["", "31536000"])
def test_longest_timeouts(tmp_path: Path, transport: str, timeout: str) -> None:
    settings = {"SPAR_TIMEOUT": timeout, "SPAR_TRANSPORT": transport, "LOCAL_WORLD_SIZE": ""}
    assert finish(start(wait_for_late_rank, 2, tmp_path, **settings), 40) == [0, 0]


def reach_cap(rank: int, folder: Path) -> None:
    stats = spar.memory_stats()
    assert stats["arena.cap_bytes"] == 3 << 20
    y = gather(torch.zeros(1 << 18), None, 0)
    assert spar.memory_stats()["arena.allocated_bytes"] >= y.nbytes
    assert 2 << 20 <= spar.memory_stats()["arena.reserved_bytes"] <= 3 << 20
    with pytest.raises(torch.OutOfMemoryError):
        gather(torch.zeros(1 << 18), None, 0)
    with pytest.raises(spar.OutOfMemoryError, match="more than the arena's 3145728"):
        gather(torch.zeros(1 << 20), None, 0)


def test_arena_cap(tmp_path: Path) -> None:
    assert finish(start(reach_cap, 2, tmp_path, SPAR_ARENA_MAX=str(3 << 20)), 40) == [0, 0]


def check_default_cap(rank: int, folder: Path) -> None:
    """The default cap is half of the memory, divided by the number of local ranks that the launcher sets."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = min(host, core.library().spar_cgroup_memory(b""))
    cap = spar.memory_stats()["arena.cap_bytes"]
    assert 0 <= limit // 2 // 8 - cap < 1 << 18


def test_default_arena_cap(tmp_path: Path) -> None:
    assert finish(start(check_default_cap, 2, tmp_path, LOCAL_WORLD_SIZE="8"), 40) == [0, 0]


def set_up_concurrently(rank: int, folder: Path) -> None:
    """Groups of one pair of processes, set up by concurrent threads, share one connection."""
    groups = [dist.new_group([0, 1]) for _ in range(4)]
    results: list[torch.Tensor] = []

    def work(group: dist.ProcessGroup) -> None:
        results.extend(gather(torch.full((2,), float(rank)), group, 0) for _ in range(20))

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for y in results:
        assert_same(y, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert all(spar.transport(group).name == "shm" for group in groups)
    maps = Path("/proc/self/maps").read_text().count("memfd:spar")
    assert maps == 2, "each arena is mapped once"
    dist.barrier()


def test_concurrent_set_ups(tmp_path: Path) -> None:
    assert finish(start(set_up_concurrently, 2, tmp_path, set_up=False), 60) == [0, 0]


# ---- collectives ----


def test_peer_info_fits_into_an_agreement() -> None:
    own = bytes(8) + speeds.Measured().pack() + _C.peer_info(rendezvous._host_id())
    assert len(own) == agreement.ROOM


def count_collectives(rank: int, folder: Path) -> None:
    """Each stage of a set-up takes one collective: the peer info, the set-up results, the connections."""
    issued, issue = [], collectives._issue
    collectives._issue = lambda *args: issued.append(args) or issue(*args)  # type: ignore[func-returns-value]
    for transport, expected in (("shm", 3), ("tcp", 3), ("torch", 3), (tables.ACROSS, 3)):
        tables.use_transport(transport, rank)
        issued.clear()
        assert spar.init().name == transport.split()[0]
        assert len(issued) == expected
        spar.close()


def test_set_up_takes_one_collective_per_stage(tmp_path: Path) -> None:
    assert finish(start(count_collectives, 2, tmp_path, set_up=False), 40) == [0, 0]


# ---- init, close ----


def init_and_close(rank: int, folder: Path) -> None:
    assert spar.transport().name is None
    chosen = spar.init()
    assert chosen.name == "shm" and chosen == spar.transport()
    calls = spar.memory_stats()["calls.shm"]
    assert spar.init(device="cpu") == chosen  # a second time has no effect
    assert spar.memory_stats()["calls.shm"] == calls == 0
    alone = [dist.new_group([other]) for other in range(2)][rank]
    assert spar.init(alone).reason == "a group of one exchanges nothing"
    if rank == 1:
        spar.close()
    dist.barrier()
    if rank == 0:  # the peers' calls end at once
        with pytest.raises(spar.GroupBrokenError, match="closed the group before call"):
            gather(torch.zeros(1), None, 0)
        spar.close()
        spar.close()  # a second close has no effect
    dist.barrier()
    assert spar.transport().name is None
    assert spar.init().name == "shm"
    assert_same(gather(torch.full((1,), float(rank)), None, 0), torch.tensor([0.0, 1.0]))


def test_init_and_close(tmp_path: Path) -> None:
    assert finish(start(init_and_close, 2, tmp_path, set_up=False), 40) == [0, 0]
