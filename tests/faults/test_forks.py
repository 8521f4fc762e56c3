# SPDX-License-Identifier: Apache-2.0
"""Forks while other threads are inside spar, and exchanges of a forked child on its parent's groups."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS
from helpers.processes import finish, start

import spar

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"), pytest.mark.spread]

gather, split = spar.gather_forward_split_backward, spar.split_forward_gather_backward


def in_child(
    work: Callable[[], None], seconds: float, forked: Callable[[], None] = lambda: None
) -> int | None:
    """Run `work` in a forked child, `forked` in the parent; return the exit code, or None if it hangs."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr, flush=True)
        os._exit(status)
    forked()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def fork_beside_threads(rank: int, folder: Path) -> None:
    over, busy = threading.Event(), threading.Event()
    pair = dist.new_group([0, 1])

    def allocate() -> None:
        while not over.is_set():  # new plans, and shared memory
            for rows in range(2, 600, 2):
                busy.wait()
                split(torch.ones(rows, 3).t(), None, 1, grad_scale=None)
            spar.empty_cache()

    def read() -> None:
        while not over.is_set():
            busy.wait()
            spar.memory_stats()

    def use() -> None:
        assert spar.memory_stats()["arena.cap_bytes"] > 0
        part = split(torch.arange(14.0).view(7, 2).t(), None, 1, split_sizes=[3, 4])
        assert part.shape == (2, 3 + rank)
        assert split(torch.zeros(2), pair, 0).shape == (1,)  # a group that is new to spar

    sys.setswitchinterval(2e-4)  # else the main thread waits 5 ms for each of the others
    threads = [threading.Thread(target=work, daemon=True) for work in (allocate, allocate, read)]
    for thread in threads:
        thread.start()
    for n in range(80):
        busy.set()
        time.sleep(0.001)  # the threads are inside spar
        assert in_child(use, 20, busy.clear) == 0, n  # and leave the cores to the child
    over.set()
    busy.set()
    for thread in threads:
        thread.join()
    gather(torch.zeros(1), None, 0)


def test_fork_while_threads_are_inside_spar(tmp_path: Path) -> None:
    assert finish(start(fork_beside_threads, 2, tmp_path, SPAR_TRANSPORT="shm"), 150) == [0, 0]


def exchange_in_child(rank: int, folder: Path, seen: bool) -> None:
    """Raise at once on a group that is set up, on a group that is new to spar, and after spar.close."""
    fresh = dist.new_group([0, 1])
    if seen:
        gather(torch.zeros(1), None, 0)

    def use() -> None:
        for group in (None, fresh):
            begin = time.monotonic()
            with pytest.raises(spar.TransportError, match=r"forked child cannot exchange.*make a group"):
                gather(torch.zeros(1), group, 0)
            with pytest.raises(spar.TransportError, match="forked child"):
                spar.init(group)
            assert time.monotonic() - begin < 1
            spar.close(group)
            with pytest.raises(spar.TransportError, match="forked child"):
                gather(torch.zeros(1), group, 0)

    assert in_child(use, 20) == 0
    for group in (None, fresh):
        assert gather(torch.ones(2), group, 0).tolist() == [1.0] * 4
    dist.barrier()


@pytest.mark.parametrize("seen", [False, True], ids=["before the set-up", "after the set-up"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_forked_child_cannot_exchange(tmp_path: Path, transport: str, seen: bool) -> None:
    ranks = start(exchange_in_child, 2, tmp_path, seen, set_up=False, SPAR_TRANSPORT=transport)
    assert finish(ranks, 60) == [0, 0]


def create_group_in_child(rank: int, folder: Path) -> None:
    """A child exchanges on a group that it creates itself; its parent has none."""

    def use() -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        assert gather(torch.full((1,), float(rank)), None, 0).tolist() == [0.0, 1.0]
        assert spar.transport().name == "shm"
        dist.destroy_process_group()

    assert in_child(use, 30) == 0


def test_forked_child_exchanges_on_its_own_group(tmp_path: Path) -> None:
    assert finish(start(create_group_in_child, 2, tmp_path, initialize=False), 60) == [0, 0]


# ---- a child that no handler of a fork prepared ----

CLONE = {"x86_64": 56, "aarch64": 220}  # the system call's number


def clone_without_handlers(rank: int, folder: Path) -> None:
    x = torch.full((2, 3), float(rank))
    held = spar.all_gather(x)
    before = spar.memory_stats()["arena.allocated_bytes"]
    if rank == 0:
        child = ctypes.PyDLL(None).syscall(CLONE[platform.machine()], signal.SIGCHLD, 0, 0, 0, 0)
        if child == 0:
            status = 1
            try:
                with pytest.raises(spar.TransportError, match="a forked child cannot exchange"):
                    spar.all_gather(x)
                del held  # must not free what the parent holds
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert status == 0
    assert spar.memory_stats()["arena.allocated_bytes"] == before
    assert held.tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert spar.all_gather(x).tolist() == held.tolist()


@pytest.mark.skipif(platform.machine() not in CLONE, reason="the number of clone is not known")
def test_child_of_a_raw_clone_cannot_exchange(tmp_path: Path) -> None:
    processes = start(clone_without_handlers, 2, tmp_path, SPAR_TRANSPORT="shm", SPAR_TIMEOUT="10")
    assert finish(processes, 60) == [0, 0]
