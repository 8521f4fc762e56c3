# SPDX-License-Identifier: Apache-2.0
"""async_op=True: errors in flight, groups and processes that end, and wrong arguments."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS, Ranks
from helpers import tables
from helpers.processes import await_report, finish, report, start

import spar

pytestmark = pytest.mark.waits

Group = dist.ProcessGroup


# ---- errors ----


def check_errors(rank: int, world: int, group: Group) -> None:
    """Each error is raised in its own wait(), and later calls of the queue match."""
    spar.init(group)
    x = torch.full((2,), float(rank))
    flights = [spar.all_gather(x, group, async_op=True)]
    flights.append(spar.all_gather(torch.zeros(2 + (rank == 1)), group, async_op=True))  # differs
    if rank == 1:
        with pytest.raises(ValueError, match="dim is 7"):
            spar.all_gather(x, group, 7, async_op=True)
    else:
        flights.append(spar.all_gather(x, group, async_op=True))
    flights.append(spar.all_gather(x, group, async_op=True))
    works = [work for _, work in flights]
    for _ in range(2):
        with pytest.raises(spar.MismatchError, match=r"(?s)calls differ .*pass sizes=\[2, 3"):
            works[1].wait()
    if rank != 1:
        with pytest.raises(spar.MismatchError, match=r"rank 1 failed: ValueError: .*dim is 7"):
            works[2].wait()
    for i in (0, -1):
        works[i].wait()
        assert flights[i][0].tolist() == [float(p) for p in range(world) for _ in range(2)]


def test_errors_are_raised_in_wait(ranks: Ranks) -> None:
    ranks(3, check_errors)


def check_wrong_keyword(rank: int, world: int, group: Group) -> None:
    with pytest.raises(TypeError, match=r"all_gather on rank . of 2: async_op is 'false'; expected a bool"):
        spar.all_gather(torch.zeros(2), group, async_op="false")  # type: ignore[call-overload]


def test_async_op_must_be_a_bool(ranks: Ranks) -> None:
    ranks(2, check_wrong_keyword)


def check_lost_errors(rank: int, world: int, group: Group) -> None:
    """An error that nothing waited for is logged when its Work is dropped."""
    spar.init(group)
    work: Any = spar.all_gather(torch.zeros(1 + rank), group, async_op=True)[1]
    while not work.is_completed():
        time.sleep(0.001)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("spar").addHandler(handler)
    del work
    gc.collect()
    logging.getLogger("spar").removeHandler(handler)
    assert ["failed, and nothing waited for it" in r.getMessage() for r in records] == [True]


def test_lost_errors_are_logged(ranks: Ranks) -> None:
    ranks(2, check_lost_errors)


def exceed_cap(rank: int, folder: Path) -> None:
    """A rank whose output does not fit raises at once, its peers in wait(); the group stays usable."""
    group = dist.group.WORLD
    held = spar.all_gather(torch.zeros(1 << 20), group)  # half of the arena
    held = held if rank == 1 else held.clone()
    _, before = spar.all_gather(torch.zeros(2), group, async_op=True)
    with pytest.raises(
        spar.OutOfMemoryError, match=r"^all_gather, call 4 on group .*SPAR_ARENA_MAX"
    ) as caught:
        spar.all_gather(torch.zeros(5 << 18), group, async_op=True)[1].wait()
    assert (caught.value.op, caught.value.call, caught.value.rank) == ("all_gather", 4, rank)
    before.wait()
    assert spar.all_gather(torch.full((1,), float(rank)), group).tolist() == [0.0, 1.0]
    assert held.numel() == 2 << 20


def test_out_of_memory_in_flight(tmp_path: Path) -> None:
    processes = start(exceed_cap, 2, tmp_path, SPAR_TRANSPORT="shm", SPAR_ARENA_MAX=str(16 << 20))
    assert finish(processes, 60) == [0, 0]


# ---- ends of groups and processes ----


def flights_of(group: Group | None = None, count: int = 3) -> list[spar.Work]:
    return [spar.all_gather(torch.zeros(1000), group, async_op=True)[1] for _ in range(count)]


def expect_broken(works: list[spar.Work], *errors: type[spar.SparError]) -> None:
    """All of them raise, the first one what broke the group."""
    for work, kinds in zip(works, [errors, *[(spar.GroupBrokenError, *errors)] * len(works)], strict=False):
        with pytest.raises(kinds):
            work.wait()
    with pytest.raises(spar.GroupBrokenError):
        spar.all_gather(torch.zeros(1))


def miss(rank: int, folder: Path) -> None:
    if rank == 1:
        time.sleep(3)
        return
    begin = time.monotonic()
    expect_broken(flights_of(), spar.ExchangeTimeoutError)
    assert 0.9 < time.monotonic() - begin < 2.5


def die(rank: int, folder: Path) -> None:
    works = flights_of()
    if rank == 1:
        for work in works:
            work.wait()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    expect_broken([*works[3:], *flights_of()], spar.PeerLostError)
    assert time.monotonic() - begin < 4


def close_in_flight(rank: int, folder: Path) -> None:
    if rank == 1:
        time.sleep(1.0)
        return
    works = flights_of()
    time.sleep(0.2)
    begin = time.monotonic()
    spar.close()
    assert time.monotonic() - begin < 0.1, "close() does not wait"
    for work in works:
        with pytest.raises(spar.GroupBrokenError, match="closed"):
            work.wait()
    assert time.monotonic() - begin < 0.5


def interrupt_wait(rank: int, folder: Path) -> None:
    """Ctrl-C ends the wait alone: the exchange goes on."""
    if rank == 1:
        await_report(folder, 0)
        time.sleep(0.2)
        _, work = spar.all_gather(torch.ones(4), async_op=True)
        work.wait()
        return
    y, work = spar.all_gather(torch.ones(4), async_op=True)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert 0.2 < time.monotonic() - begin < 1
    report(folder, 0, "interrupted")
    work.wait()
    assert y.tolist() == [1.0] * 8


def interrupt_sync(rank: int, folder: Path) -> None:
    """Ctrl-C in a sync call that waits for its turn breaks the group, as in any call."""
    if rank == 1:
        with pytest.raises((spar.GroupBrokenError, spar.PeerLostError, spar.ExchangeTimeoutError)):
            time.sleep(0.8)
            spar.all_gather(torch.zeros(1000))
        return
    (work,) = flights_of(count=1)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        spar.all_gather(torch.ones(4))
    begin = time.monotonic()
    with pytest.raises(spar.GroupBrokenError):
        work.wait()
    assert time.monotonic() - begin < 0.5


def fork_in_flight(rank: int, folder: Path) -> None:
    if rank == 1:
        time.sleep(0.6)
    (work,) = flights_of(count=1)
    if rank == 0:
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(spar.TransportError, match="a forked child cannot wait for an exchange"):
                    work.wait()
                with pytest.raises(spar.TransportError, match="a forked child cannot exchange"):
                    spar.all_gather(torch.zeros(1))
                with pytest.raises(ValueError, match="dim is 7"):
                    spar.all_gather(torch.zeros(1), None, 7)
                os._exit(7)
            except BaseException:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    work.wait()


def exit_in_flight(rank: int, folder: Path) -> None:
    """The process ends with works in flight: those whose peers come are completed."""
    if rank == 1:
        time.sleep(0.5)
    works = flights_of()
    if rank == 1:
        for work in works:
            work.wait()


def exit_alone(rank: int, folder: Path) -> None:
    """The peers never come; the process ends anyway, and they learn of it."""
    if rank == 0:
        flights_of()
        return
    time.sleep(3)
    with pytest.raises(spar.SparError):
        spar.all_gather(torch.zeros(1000))


ENDS: dict[str, Callable[[int, Path], None]] = {
    "miss": miss,
    "die": die,
    "close": close_in_flight,
    "interrupt wait": interrupt_wait,
    "interrupt sync": interrupt_sync,
    "fork": fork_in_flight,
    "exit": exit_in_flight,
    "exit alone": exit_alone,
}


@pytest.mark.parametrize("transport", [*TRANSPORTS, tables.ACROSS])
@pytest.mark.parametrize("name", ENDS)
def test_nothing_hangs(tmp_path: Path, transport: str, name: str) -> None:
    codes = [0, -signal.SIGKILL if name == "die" else 0]
    limit = {"miss": "1", "exit alone": "4", "interrupt sync": "3"}.get(name, "20")
    processes = start(ENDS[name], 2, tmp_path, SPAR_TRANSPORT=transport, SPAR_TIMEOUT=limit)
    assert finish(processes, 15) == codes
