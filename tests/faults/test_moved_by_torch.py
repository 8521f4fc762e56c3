# SPDX-License-Identifier: Apache-2.0
"""Faults while torch's process group moves the bytes, of ranks that share a host and of ranks that do not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import tables
from helpers.processes import await_report, finish, report, start

import spar
from spar._control import collectives
from spar._control.status import CallState

LIMIT = "3"


def gather() -> torch.Tensor:
    return spar.gather_forward_split_backward(torch.zeros(4), None, 0)


def hold_bytes(wait: Callable[[], None]) -> None:
    """This rank sends nothing, and runs `wait` instead of a slice of its wait."""
    work = SimpleNamespace(is_completed=lambda: False)

    def issue(group: Any, op: str, deadline: float, buffers: Any, *_: object, **__: object) -> Any:
        return collectives.Unfinished(group.process_group, work, buffers)  # type: ignore[arg-type]

    def ended(*_: object) -> bool:
        wait()
        return False

    collectives._issue, collectives._ended = issue, ended


def run(tmp_path: Path, function: Callable[..., None], world: int, transport: str = "torch") -> list[Any]:
    return start(function, world, tmp_path, SPAR_TRANSPORT=transport, SPAR_TIMEOUT=LIMIT)


# ---- ranks of one host ----


def stop_under_way(rank: int, folder: Path) -> None:
    polls: list[None] = []

    def wait() -> None:
        polls.append(time.sleep(0.05))
        if len(polls) == 4:
            os.kill(os.getpid(), signal.SIGSTOP)

    if rank == 2:
        hold_bytes(wait)
    with pytest.raises(
        spar.ExchangeTimeoutError, match=r"rank 2 \(process \d+\) did not end call 2"
    ) as caught:
        gather()
    assert caught.value.ranks == (2,)
    assert "2: is in gather_forward_split_backward, call 2" in str(caught.value)


def test_only_the_stopped_rank_is_named(tmp_path: Path) -> None:
    """The others wait for bytes, too, and had polled as often as it had."""
    processes = run(tmp_path, stop_under_way, 3)
    assert finish(processes[:2], 30) == [0, 0]
    processes[2].kill()


def fail_in_torch(rank: int, folder: Path) -> None:
    if rank == 0:
        issue = collectives._issue

        def wrong_sizes(*args: Any, **settings: Any) -> Any:
            return issue(*args[:-2], [1], [1], **settings)

        collectives._issue = wrong_sizes  # type: ignore[assignment]
    begin = time.monotonic()
    with pytest.raises(spar.GroupBrokenError if rank else spar.TransportError, match="splits"):
        gather()
    assert time.monotonic() - begin < float(LIMIT) - 1
    report(folder, rank, "")
    await_report(folder, 1 - rank)


def test_failure_of_torch_on_one_rank_ends_the_peers_call(tmp_path: Path) -> None:
    assert finish(run(tmp_path, fail_in_torch, 2), 30) == [0, 0]


def die_late(rank: int, folder: Path) -> None:
    """Rank 0 has ended its call when rank 2 dies in it, as rank 1 finds."""
    move = collectives.all_to_all

    def move_and_die(*args: Any) -> None:
        move(*args)
        time.sleep(0.3)
        os._exit(0)

    if rank == 2:
        collectives.all_to_all = move_and_die
    if rank == 1:
        collectives._ended = lambda *_: bool(time.sleep(0.05))
    if rank == 0:
        gather()
        time.sleep(1)
    with pytest.raises(spar.PeerLostError, match=r"rank 2 \(process \d+\) died") as caught:
        gather()
    assert caught.value.ranks == (2,)
    with pytest.raises(spar.GroupBrokenError, match=r"rank 2 \(process \d+\) died") as again:
        gather()
    assert again.value.ranks == (2,)


def test_death_is_reported_by_all_survivors(tmp_path: Path) -> None:
    assert finish(run(tmp_path, die_late, 3), 30) == [0, 0, 0]


def interrupt_turn(rank: int, folder: Path) -> None:
    """A handler's exception ends rank 0's wait for its turn, while its other thread's call is under way."""
    if rank == 1:
        issue = collectives._issue
        collectives._issue = lambda *a, **k: (time.sleep(1), issue(*a, **k))[1]
        with contextlib.suppress(spar.GroupBrokenError):
            gather()
        begin = time.monotonic()
        with pytest.raises(spar.GroupBrokenError, match="rank 0"):
            gather()
        assert time.monotonic() - begin < 1
        report(folder, 1, "")
        return
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    raised: list[BaseException] = []

    def call() -> None:
        try:
            gather()
        except spar.GroupBrokenError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.2)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        gather()
    thread.join()
    assert raised
    await_report(folder, 1)


def test_interrupt_beside_a_call_reaches_the_peers(tmp_path: Path) -> None:
    assert finish(run(tmp_path, interrupt_turn, 2), 30) == [0, 0]


# ---- ranks of several hosts ----


def find_old_keys(rank: int, folder: Path) -> None:
    """A group of the same name, over the same store, gave up in a call of the same number."""
    store = dist.distributed_c10d._get_default_store()
    old = json.dumps([CallState.TIMED_OUT, "gather_forward_split_backward", 2, "0", "another token"])
    for key in (
        f"spar/last_call/{rank}",
        f"spar/gave_up/0/another token/{rank}",
        "spar/gave_up/0/another token",
    ):
        store.set(key, old)
    dist.barrier()
    time.sleep(1.2 * rank)
    gather()


def test_keys_of_an_older_group_end_no_call(tmp_path: Path) -> None:
    assert finish(run(tmp_path, find_old_keys, 2, tables.ACROSS), 30) == [0, 0]


def miss_the_call(rank: int, folder: Path) -> None:
    """Rank 1 makes no call, and its key of an older group says that it is in one of the same number."""
    if rank == 1:
        store = dist.distributed_c10d._get_default_store()
        op = "gather_forward_split_backward"
        store.set("spar/last_call/1", json.dumps([CallState.RUNNING, op, 2, "0", "another token"]))
        await_report(folder, 0)
        return
    time.sleep(0.2)
    with pytest.raises(spar.ExchangeTimeoutError) as caught:
        gather()
    assert caught.value.ranks == (1,)
    report(folder, 0, "")


def test_keys_of_an_older_group_hide_no_rank(tmp_path: Path) -> None:
    assert finish(run(tmp_path, miss_the_call, 2, tables.ACROSS), 30) == [0, 0]
