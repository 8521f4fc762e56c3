# SPDX-License-Identifier: Apache-2.0
"""Ranks that make no call, die or are interrupted: their peers raise in time, and the processes end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS
from helpers import tables
from helpers.processes import await_report, finish, report, start

import spar
from spar._group.registry import group_of

pytestmark = [pytest.mark.waits, pytest.mark.spread]


def call_with_missing_rank(rank: int, folder: Path) -> None:
    if rank == 2:
        time.sleep(60)
    begin = time.monotonic()
    # over shm, a rank that sees a peer abort raises GroupBrokenError
    with pytest.raises((spar.ExchangeTimeoutError, spar.GroupBrokenError)) as caught:
        spar.gather_forward_split_backward(torch.zeros(4), None, 0)
    waited = time.monotonic() - begin
    error = caught.value
    if isinstance(error, spar.ExchangeTimeoutError):
        assert isinstance(error, TimeoutError)
        assert "SPAR_TIMEOUT" in str(error)
    assert (error.op, error.rank, error.call) == ("gather_forward_split_backward", rank, 2)
    with pytest.raises(spar.GroupBrokenError, match="call 2"):
        spar.gather_forward_split_backward(torch.zeros(4), None, 0)
    report(folder, rank, f"{waited}")


@pytest.mark.parametrize("transport", [*TRANSPORTS, tables.ACROSS])
def test_missing_rank_times_out(tmp_path: Path, transport: str) -> None:
    processes = start(call_with_missing_rank, 3, tmp_path, SPAR_TIMEOUT="2", SPAR_TRANSPORT=transport)
    for rank in (0, 1):
        assert 1.5 < float(await_report(tmp_path, rank)) < 4
    assert finish(processes[:2], 5) == [0, 0], "the processes must have ended, too"
    processes[2].kill()


WAYS_TO_DIE: dict[str, tuple[Callable[[], object], int]] = {  # and the exit code
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "aborted": (os.abort, -signal.SIGABRT),
    "exited": (lambda: os._exit(3), 3),
}


def call_while_peer_dies(rank: int, folder: Path, how: str) -> None:
    if rank == 1:
        time.sleep(0.5)  # its peers wait by now
        WAYS_TO_DIE[how][0]()
    begin = time.monotonic()
    with pytest.raises(spar.PeerLostError, match=r"is gone|rank 1 \(process \d+\) died"):
        spar.all_to_all(torch.zeros(3, 3), None, 0, 1)
    with pytest.raises(spar.GroupBrokenError):
        spar.all_to_all(torch.zeros(3, 3), None, 0, 1)
    report(folder, rank, f"{time.monotonic() - begin}")


@pytest.mark.parametrize("how", WAYS_TO_DIE)
@pytest.mark.parametrize("transport", [*TRANSPORTS, tables.ACROSS])
def test_peer_death_raises(tmp_path: Path, transport: str, how: str) -> None:
    world = 2 if transport == tables.ACROSS else 3  # gloo's survivors also disconnect from each other
    processes = start(call_while_peer_dies, world, tmp_path, how, SPAR_TRANSPORT=transport)
    for rank in range(0, world, 2):
        assert float(await_report(tmp_path, rank)) < 2.5
    assert finish(processes, 5) == [0, WAYS_TO_DIE[how][1], 0][:world]


def call_until_interrupted(rank: int, folder: Path) -> None:
    if rank == 1:
        await_report(folder, 0)
        return
    with pytest.raises(KeyboardInterrupt):
        report(folder, 7, f"{os.getpid()}")
        spar.all_to_all(torch.zeros(2, 2), None, 0, 1)
    report(folder, 0, f"{time.time()}")
    with pytest.raises(spar.GroupBrokenError, match=r"interrupted on rank 0|rank 0 was interrupted"):
        spar.all_to_all(torch.zeros(2, 2), None, 0, 1)


@pytest.mark.parametrize("transport", [*TRANSPORTS, tables.ACROSS])
def test_ctrl_c_interrupts_a_call(tmp_path: Path, transport: str) -> None:
    processes = start(call_until_interrupted, 2, tmp_path, SPAR_TRANSPORT=transport)
    pid = int(await_report(tmp_path, 7))
    time.sleep(0.5)  # it waits by now
    sent = time.time()
    os.kill(pid, signal.SIGINT)
    assert float(await_report(tmp_path, 0)) - sent < 1
    # gloo's thread ends when the other rank does, or at the timeout
    assert finish(processes, 15) == [0, 0]


def set_up_with_missing_rank(rank: int, folder: Path) -> None:
    """The set-up in a group's first exchange ends at the timeout, as any other wait."""
    group = dist.new_group([0, 1])
    if rank == 1:
        time.sleep(60)
    with pytest.raises(spar.ExchangeTimeoutError):
        spar.gather_forward_split_backward(torch.zeros(4), group, 0)
    with pytest.raises(spar.GroupBrokenError):
        spar.gather_forward_split_backward(torch.zeros(4), group, 0)
    report(folder, rank, "")


def test_missing_rank_in_set_up_times_out(tmp_path: Path) -> None:
    processes = start(set_up_with_missing_rank, 2, tmp_path, SPAR_TIMEOUT="1.5")
    await_report(tmp_path, 0)
    assert finish(processes[:1], 5) == [0]
    processes[1].kill()


def call_in_handler(rank: int, folder: Path) -> None:
    def handler(*_: object) -> None:
        with pytest.raises(spar.SparError, match="inside a call on the same group"):
            spar.gather_forward_split_backward(torch.zeros(4), None, 0)
        report(folder, rank, "")

    if rank == 0:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    else:
        await_report(folder, 0)
    assert spar.gather_forward_split_backward(torch.zeros(4), None, 0).shape == (8,)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nested_call_on_the_same_group_raises(tmp_path: Path, transport: str) -> None:
    processes = start(call_in_handler, 2, tmp_path, SPAR_TRANSPORT=transport)
    await_report(tmp_path, 0)
    assert finish(processes, 15) == [0, 0]


def call_from_threads(rank: int, folder: Path) -> None:
    """Two threads call at the same time, each on its own group."""
    import threading

    group = dist.new_group([0, 1])
    errors: list[BaseException] = []

    def work(own: Any) -> None:
        try:
            for _ in range(20):
                y = spar.gather_forward_split_backward(torch.full((3,), float(rank)), own, 0)
                assert y.tolist() == [0.0] * 3 + [1.0] * 3
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(own,)) for own in (None, group)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors, errors
    dist.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_threads_with_one_group_each(tmp_path: Path, transport: str) -> None:
    assert finish(start(call_from_threads, 2, tmp_path, SPAR_TRANSPORT=transport), 60) == [0, 0]


def interrupt_before_the_call(rank: int, folder: Path) -> None:
    """The signal arrives after the thread acquired the lock, before it does anything else."""
    group = dist.new_group([0])
    state = group_of(group)
    lock, main = state._lock, threading.main_thread().ident
    assert main is not None

    def release_and_signal() -> None:
        time.sleep(0.1)  # the main thread waits for the lock
        lock.release()
        until = time.perf_counter() + 0.05
        while time.perf_counter() < until:  # by now it has the lock, but not the GIL
            pass
        signal.pthread_kill(main, signal.SIGINT)

    lock.acquire()
    switch = sys.getswitchinterval()
    sys.setswitchinterval(60)
    thread = threading.Thread(target=release_and_signal)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        state.in_turn("gather", "cpu", lambda deadline: time.sleep(5))
    thread.join()
    sys.setswitchinterval(switch)
    assert lock.acquire(timeout=1), "the lock is still held"
    lock.release()
    with pytest.raises(spar.GroupBrokenError, match="was interrupted"):
        state.in_turn("gather", "cpu", lambda deadline: None)
    dist.destroy_process_group()


def test_interrupt_after_taking_the_lock_releases_it(tmp_path: Path) -> None:
    assert finish(start(interrupt_before_the_call, 1, tmp_path, set_up=False), 30) == [0]
