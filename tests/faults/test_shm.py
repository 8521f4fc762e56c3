# SPDX-License-Identifier: Apache-2.0
"""Shared memory: lifetime of outputs, effects of slow, stopped and dead peers, leaks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing as mp
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.processes import await_report, finish, report, start
from helpers.reference import assert_same

import spar
from spar._group import registry

Group = dist.ProcessGroup
gather = spar.gather_forward_split_backward

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's here")


@pytest.fixture
def shm(pool: Ranks) -> Ranks:
    pool.transport = "shm"
    return pool


class Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2: memory in use, not the pages that the allocator keeps."""

    _fields_ = (
        ("free", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),  # bytes in separate mappings
        ("more", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),  # bytes of all other allocations
        ("rest", ctypes.c_size_t * 2),
    )


class Growth:
    """Growth since the construction: descriptors, threads, memory in use, Python's blocks."""

    def __init__(self) -> None:
        gc.collect()
        self.descriptors = len(os.listdir("/proc/self/fd"))
        self.threads = len(os.listdir("/proc/self/task"))
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = Mallinfo
        used = mallinfo2()
        self.bytes = used.uordblks + used.hblkhd
        self.blocks = sys.getallocatedblocks()

    def check(self, most_bytes: int, most_blocks: int) -> None:
        now = Growth()
        assert now.descriptors <= self.descriptors
        assert now.threads <= self.threads
        assert now.bytes - self.bytes <= most_bytes
        assert now.blocks - self.blocks <= most_blocks


# ---- outputs ----


def check_lifetime(rank: int, world: int, group: Group) -> None:
    """Outputs outlive their group, and are freed in any order on any thread."""
    before = spar.memory_stats()["arena.allocated_bytes"]
    fresh = dist.new_group(list(range(7)))
    kept = [gather(torch.full((1000 + i,), float(rank + i)), fresh, 0) for i in range(12)]
    assert spar.transport(fresh).name == "shm"
    spar.close(fresh)
    dist.destroy_process_group(fresh)
    del fresh
    gc.collect()
    others = [gather(torch.zeros(5000), group, 0) for _ in range(5)]  # must not overlap the kept ones
    for i, x in enumerate(kept):
        assert_same(x, torch.cat([torch.full((1000 + i,), float(p + i)) for p in range(7)]))
    del others

    def free(which: list[int]) -> None:
        for i in which:
            kept[i] = torch.empty(0)

    threads = [
        threading.Thread(target=free, args=(which,)) for which in ([11, 0, 5, 7], [2, 9, 1, 10], [3, 8, 4, 6])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del x
    dist.barrier()
    gather(torch.zeros(1), group, 0)  # frees what has left quarantine
    assert spar.memory_stats()["arena.allocated_bytes"] <= before + 8192


def test_outputs_outlive_their_group(shm: Ranks) -> None:
    shm(7, check_lifetime)


def check_poison(rank: int, world: int, group: Group) -> None:
    """A freed output is reused; it must not receive late writes of an earlier call."""
    for turn in range(200):
        x = torch.full((3, 64), float(turn * world + rank))
        y = gather(x, group, 0)
        assert_same(
            y,
            torch.arange(turn * world, (turn + 1) * world)
            .float()
            .repeat_interleave(3)[:, None]
            .expand(-1, 64),
        )
        y.fill_(float("nan"))
        del y


def test_freed_outputs_receive_no_late_writes(shm: Ranks) -> None:
    shm(4, check_poison)


def check_growth(rank: int, world: int, group: Group, calls: int) -> None:
    def go(count: int) -> None:
        for i in range(count):
            gather(torch.zeros(1 + i % 97, 1 + i % 13), group, 0)

    go(3000)
    stats, growth = spar.memory_stats(), Growth()
    go(calls)
    growth.check(2**18, 1000)
    after = spar.memory_stats()
    assert after["arena.reserved_bytes"] == stats["arena.reserved_bytes"]
    assert after["arena.allocated_bytes"] <= stats["arena.allocated_bytes"] + 4096
    assert after["arena.quarantined_bytes"] == 0
    assert after["calls.shm"] - stats["calls.shm"] == calls
    assert after["plans.cached"] <= 1024


def test_calls_do_not_leak(shm: Ranks) -> None:
    # If each call kept malloc's smallest block, of 32 bytes, they would exceed the limit.
    shm(2, check_growth, 12_000)


def create_and_close(rank: int, folder: Path) -> None:
    def go(count: int, make: bool) -> None:
        for i in range(count):
            group = dist.new_group([0, 1]) if make else dist.group.WORLD
            x = gather(torch.full((10,), float(i), requires_grad=True), group, 0)
            assert_same(x.detach(), torch.full((20,), float(i)))
            spar.close(group)
            if make:
                assert group is not None
                dist.destroy_process_group(group)

    go(20, True)
    go(800, False)  # the C library's memory grows for the first 700
    stats, growth = spar.memory_stats(), Growth()
    go(300, False)
    growth.check(50_000, 200)  # a group takes 2 KiB in C, and a dozen blocks in Python
    go(50, True)
    growth.check(2**21, 20_000)  # torch's groups leak some
    after = spar.memory_stats()
    assert after["arena.reserved_bytes"] == stats["arena.reserved_bytes"]
    assert after["arena.allocated_bytes"] <= stats["arena.allocated_bytes"] + 65536
    assert not registry.by_process_group and not registry._by_handle


def test_closed_groups_do_not_leak(tmp_path: Path) -> None:
    assert finish(start(create_and_close, 2, tmp_path, SPAR_TRANSPORT="shm"), 90) == [0, 0]


def calls_of(tokens: int) -> list[Callable[[], torch.Tensor]]:
    x = torch.ones(1, tokens, 16, 64)
    whole = x.clone().requires_grad_()
    part = spar.split_forward_gather_backward(whole, None, 1)
    grad = torch.ones_like(part)
    return [
        lambda: spar.all_to_all(x, None, 2, 1),
        lambda: spar.all_to_all(x.transpose(1, 2), None, 2, 1),
        lambda: spar.load_balanced_split_forward_gather_backward(x, None, 1),
        lambda: gather(x, None, 1),
        lambda: spar.load_balanced_gather_forward_split_backward(x, None, 1),
        lambda: torch.autograd.grad(part, whole, grad, retain_graph=True)[0],
    ]


def check_peak(rank: int, folder: Path) -> None:
    """A call allocates its output only: no other address space, and nothing else in the arena."""
    for call in calls_of(8):  # what Python and torch load lazily
        call()
    calls = calls_of(4 << 10)  # 16 MiB
    dist.barrier()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 20), resource.RLIM_INFINITY))
    most = 0
    for call in calls:
        before = spar.memory_stats()["arena.allocated_bytes"]
        most = max(most, before + call().nbytes)
        assert spar.memory_stats()["arena.peak_bytes"] <= most + 4096
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_peak_memory_is_the_output(tmp_path: Path) -> None:
    assert finish(start(check_peak, 2, tmp_path, SPAR_TRANSPORT="shm"), 60) == [0, 0]


def check_empty_cache(rank: int, world: int, group: Group) -> None:
    y = gather(torch.zeros(4_000_000), group, 0)
    assert spar.memory_stats()["arena.reserved_bytes"] >= 4 * 4_000_000 * world
    del y
    gather(torch.zeros(1), group, 0)
    dist.barrier(group)
    spar.empty_cache()
    assert spar.memory_stats()["arena.reserved_bytes"] < 2**23
    assert spar.memory_stats()["arena.returned_bytes"] > 0
    dist.barrier(group)
    assert_same(gather(torch.ones(1_000_000), group, 0), torch.ones(1_000_000 * world))


def test_empty_cache(shm: Ranks) -> None:
    shm(2, check_empty_cache)


# ---- failures of one rank ----


def check_argument_error(rank: int, world: int, group: Group) -> None:
    """A rank's bad argument raises ValueError there, and a MismatchError that quotes it on the peers."""
    gather(torch.zeros(1), group, 0)
    if rank == 1:
        with pytest.raises(ValueError, match="dim is 5"):
            gather(torch.zeros(1), group, 5)
    else:
        with pytest.raises(
            spar.MismatchError, match=r"rank 1 failed: .*dim is 5; expected -1 to 0"
        ) as caught:
            gather(torch.zeros(1), group, 0)
        assert caught.value.ranks == (1,)
    assert_same(gather(torch.full((1,), float(rank)), group, 0), torch.arange(float(world)))


def test_bad_argument_is_reported_to_peers(shm: Ranks) -> None:
    shm(3, check_argument_error)


def exceed_cap(rank: int, folder: Path) -> None:
    with pytest.raises(spar.OutOfMemoryError, match="SPAR_ARENA_MAX") as caught:
        gather(torch.zeros(2_000_000), None, 0)
    assert isinstance(caught.value, MemoryError)
    assert_same(gather(torch.ones(3), None, 0), torch.ones(6))  # the group is usable


def test_output_over_the_cap_raises_on_all_ranks(tmp_path: Path) -> None:
    assert finish(start(exceed_cap, 2, tmp_path, SPAR_ARENA_MAX="8000000"), 40) == [0, 0]


# ---- death ----


def sleep_in_worker() -> None:
    time.sleep(30)


def die_with_live_worker(rank: int, folder: Path) -> None:
    assert spar.transport().name == "shm"
    if rank == 1:
        worker = mp.get_context("fork").Process(target=sleep_in_worker)
        worker.start()
        time.sleep(0.5)
        report(folder, 7, str(worker.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(spar.PeerLostError, match=r"rank 1 \(process \d+\) died") as caught:
        gather(torch.zeros(3), None, 0)
    assert caught.value.ranks == (1,)
    with pytest.raises(spar.GroupBrokenError):
        gather(torch.zeros(3), None, 0)
    report(folder, rank, str(time.monotonic() - begin))


def test_dead_peer_with_live_worker_is_detected(tmp_path: Path) -> None:
    processes = start(die_with_live_worker, 3, tmp_path, SPAR_TRANSPORT="shm")
    try:
        for rank in (0, 2):
            assert float(await_report(tmp_path, rank)) < 2.5
        assert finish(processes, 10) == [0, -signal.SIGKILL, 0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(await_report(tmp_path, 7)), signal.SIGKILL)


def exit_early(rank: int, folder: Path) -> None:
    """A rank that exits normally causes no error on its peers."""
    y = gather(torch.full((100_000,), float(rank)), None, 0)
    if rank == 0:
        return
    time.sleep(0.5)
    assert y[0] == 0 and y[-1] == 2


def test_normal_exit_raises_nothing_on_peers(tmp_path: Path) -> None:
    assert finish(start(exit_early, 3, tmp_path, SPAR_TRANSPORT="shm"), 40) == [0, 0, 0]


def stop_and_resume(rank: int, folder: Path) -> None:
    """A rank that is stopped in a call and resumed after its peer timed out writes into no other tensor."""
    own = dist.new_group([0])
    pair = dist.new_group([0, 1])
    gather(torch.zeros(1), pair, 0)
    other = dist.new_group([0, 1])
    gather(torch.zeros(1), other, 0)
    if rank == 1:
        report(folder, 1, str(os.getpid()))
        x = torch.full((4_000_000,), 7.0)  # long enough to be stopped in it
        try:
            for _ in range(1000):
                gather(x, pair, 0)
        except spar.SparError:
            pass
        report(folder, 8, "")
        time.sleep(1)
        return
    del own
    with pytest.raises((spar.ExchangeTimeoutError, spar.GroupBrokenError)):
        for _ in range(1000):
            gather(torch.full((4_000_000,), 3.0), pair, 0)
    assert spar.memory_stats()["arena.quarantined_bytes"] >= 4 * 8_000_000
    report(folder, 0, "")
    mine = [torch.empty(0)]
    from spar import _C

    assert _C.arena_stats()[4] >= 4 * 8_000_000
    await_report(folder, 8)  # the peer was resumed, and has aborted
    del mine
    spar.close(pair)
    time.sleep(0.2)
    spar.empty_cache()
    assert spar.memory_stats()["arena.quarantined_bytes"] < 4 * 8_000_000


def test_quarantine(tmp_path: Path) -> None:
    processes = start(stop_and_resume, 2, tmp_path, SPAR_TRANSPORT="shm", SPAR_TIMEOUT="2")
    pid = int(await_report(tmp_path, 1))
    time.sleep(0.7)
    os.kill(pid, signal.SIGSTOP)
    await_report(tmp_path, 0)
    os.kill(pid, signal.SIGCONT)
    assert finish(processes, 20) == [0, 0]
