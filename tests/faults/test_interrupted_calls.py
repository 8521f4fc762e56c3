# SPDX-License-Identifier: Apache-2.0
"""Calls that a signal handler's exception or spar.close ends, on one rank."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS, Ranks
from helpers import tables
from helpers.processes import await_report, finish, report, start
from test_local_failures import REPORTED_WITHIN, Alarm, Group, check_later_calls, gather, raise_alarm

import spar
from spar._group.registry import group_of

pytestmark = [pytest.mark.waits, pytest.mark.spread]


def raise_in_handler(rank: int, folder: Path, where: str) -> None:
    group = dist.new_group([0, 1])
    if where == "a call":
        check_later_calls(rank, 2, group)
    dist.barrier()
    if rank == 1:
        assert not await_report(folder, 0)
        with pytest.raises(spar.SparError) as caught:
            gather(torch.zeros(2), group, 0)
        assert isinstance(
            caught.value, (spar.GroupBrokenError, spar.ExchangeTimeoutError, spar.PeerLostError)
        )
        return
    signal.signal(signal.SIGALRM, raise_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.4)
    begin = time.monotonic()
    with pytest.raises(Alarm):
        gather(torch.zeros(2), group, 0)
    assert time.monotonic() - begin < 1.5
    report(folder, 0, "")
    with pytest.raises(spar.GroupBrokenError, match=r"went off|interrupted"):
        gather(torch.zeros(2), group, 0)


@pytest.mark.parametrize("where", ["the set-up", "a call"])
@pytest.mark.parametrize("transport", [*TRANSPORTS, tables.ACROSS])
def test_signal_handler_exception_breaks_the_group(tmp_path: Path, transport: str, where: str) -> None:
    processes = start(raise_in_handler, 2, tmp_path, where, SPAR_TRANSPORT=transport, SPAR_TIMEOUT="3")
    assert finish(processes, 30) == [0, 0]


def raise_before_the_exchange(rank: int, world: int, group: Group) -> None:
    """The signal arrives when the call is counted, and its transport does not have it yet."""
    check_later_calls(rank, world, group)
    if rank == 0:
        signal.signal(signal.SIGALRM, raise_alarm)
        state = group_of(group)
        looks = state._is_profiled

        def profiled_at_first() -> bool:
            state._is_profiled = looks
            signal.raise_signal(signal.SIGALRM)
            return False

        state._is_profiled = profiled_at_first
    begin = time.monotonic()
    with pytest.raises((Alarm, spar.MismatchError), match="went off"):
        gather(torch.zeros(2), group, 0)
    assert time.monotonic() - begin < REPORTED_WITHIN
    check_later_calls(rank, world, group)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_signal_handler_exception_before_the_exchange(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setenv("SPAR_TRANSPORT", transport)
    ranks(2, raise_before_the_exchange)


def raise_while_waiting_for_thread(rank: int, folder: Path, where: str) -> None:
    group = dist.new_group([0, 1])
    if where == "a call":
        check_later_calls(rank, 2, group)
    dist.barrier()
    if rank == 1:
        assert not await_report(folder, 0)
        return
    raised: list[BaseException] = []

    def gathers() -> None:
        try:
            gather(torch.zeros(2), group, 0)
        except spar.SparError as error:
            raised.append(error)

    thread = threading.Thread(target=gathers)
    thread.start()
    signal.signal(signal.SIGALRM, raise_alarm)
    time.sleep(0.2)  # the other thread holds the lock
    begin = time.monotonic()
    with pytest.raises(Alarm):
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        gather(torch.zeros(2), group, 0)
    assert time.monotonic() - begin < 1.5
    thread.join(2)
    assert not thread.is_alive()
    assert isinstance(raised[0], spar.GroupBrokenError), raised
    with pytest.raises(spar.GroupBrokenError, match=r"another thread's call|went off"):
        gather(torch.zeros(2), group, 0)
    report(folder, 0, "")


@pytest.mark.parametrize("where", ["the set-up", "a call"])
@pytest.mark.parametrize("transport", [*TRANSPORTS, tables.ACROSS])
def test_signal_handler_exception_ends_wait_for_another_thread(
    tmp_path: Path, transport: str, where: str
) -> None:
    processes = start(raise_while_waiting_for_thread, 2, tmp_path, where, SPAR_TRANSPORT=transport)
    assert finish(processes, 30) == [0, 0]


# ---- close during a call ----


def close_during_call(rank: int, folder: Path, where: str, caller: str) -> None:
    group = dist.new_group([0, 1])
    if where == "a call":
        check_later_calls(rank, 2, group)
    dist.barrier()
    if rank == 1:
        assert not await_report(folder, 0)
        return
    times: list[float] = []

    def close(*_: object) -> None:
        begin = time.monotonic()
        spar.close(group)
        times.append(time.monotonic() - begin)

    if caller == "a handler":
        signal.signal(signal.SIGALRM, close)
        signal.setitimer(signal.ITIMER_REAL, 0.4)
    else:
        threading.Timer(0.4, close).start()
    begin = time.monotonic()
    with pytest.raises(spar.GroupBrokenError, match="closed"):
        gather(torch.zeros(2), group, 0)
    assert time.monotonic() - begin < 2.0
    assert times[0] < 1.0
    report(folder, 0, "")


@pytest.mark.parametrize("caller", ["a handler", "another thread"])
@pytest.mark.parametrize("where", ["the set-up", "a call"])
@pytest.mark.parametrize("transport", [*TRANSPORTS, tables.ACROSS])
def test_close_ends_a_running_call(tmp_path: Path, transport: str, where: str, caller: str) -> None:
    processes = start(close_during_call, 2, tmp_path, where, caller, SPAR_TRANSPORT=transport)
    assert finish(processes, 30) == [0, 0]
