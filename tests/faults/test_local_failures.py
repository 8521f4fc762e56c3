# SPDX-License-Identifier: Apache-2.0
"""A failure of one rank alone is reported to its peers in that call, or breaks the group on every rank.

Calls never match the wrong ones: after each failure either all later calls match, or all raise.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS
from helpers import tables
from helpers.processes import await_report, finish, report, start
from torch.utils._python_dispatch import TorchDispatchMode

import spar
from spar._control import collectives
from spar.parallel_state import set_sequence_parallel_group

pytestmark = [pytest.mark.waits, pytest.mark.spread]

gather = spar.gather_forward_split_backward
REPORTED_WITHIN = 2.0  # seconds
Group = dist.ProcessGroup


class Alarm(Exception):
    """What a SIGALRM handler raises."""


def raise_alarm(*_: object) -> None:
    raise Alarm("the alarm went off")


class RaisingInt(int):
    """A dim that raises Alarm when it is checked, as a signal handler could."""

    def __mod__(self, other: int) -> int:
        raise Alarm("the alarm went off")


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


HUGE = 2**64
LOCAL: dict[str, tuple[Callable[[Group], object], type[Exception], str]] = {
    "a dim": (lambda g: gather(torch.zeros(2), g, 7), ValueError, "dim is 7"),
    "not a tensor": (lambda g: gather([1.0], g, 0), TypeError, "input_ is a list"),  # type: ignore[arg-type]
    "a huge size": (lambda g: gather(torch.zeros(2), g, 0, [HUGE, 2, 0]), ValueError, "less than 2.63"),
    "a huge product": (
        lambda g: spar.all_to_all(torch.zeros(1).expand(1, 2**62), g, 0, 1),
        ValueError,
        "expected a size that is below 2.63 on 3 ranks together",
    ),
    "a huge total": (
        lambda g: spar.all_to_all(torch.zeros(4, 2), g, 0, 1, HUGE),
        ValueError,
        "gather_size is 18446744073709551616",
    ),
    "a nested tensor": (lambda g: gather(nested(), g, 0), TypeError, "a nested tensor"),
    "an alarm": (lambda g: gather(torch.zeros(2), g, RaisingInt(0)), Alarm, "went off"),
}


def check_later_calls(rank: int, world: int, group: Group) -> None:
    """Check that calls of one signature match in the order of their calls."""
    for i in range(5):
        whole = gather(torch.tensor([100.0 * i + rank]), group, 0)
        assert whole.tolist() == [100.0 * i + peer for peer in range(world)]


def fail_on_one_rank(rank: int, folder: Path, world: int, kind: str, odd: int) -> None:
    call, error, text = LOCAL[kind]
    for warm in (False, True):
        group = dist.new_group(list(range(world)))
        if warm:
            check_later_calls(rank, world, group)
        dist.barrier()
        begin = time.monotonic()
        if rank == odd:
            with pytest.raises(error, match=text):
                call(group)
        else:
            with pytest.raises(
                spar.MismatchError, match=f"rank {odd} failed: {error.__name__}: .*{text}"
            ) as caught:
                gather(torch.zeros(2), group, 0)
            assert caught.value.ranks == (odd,)
        assert time.monotonic() - begin < REPORTED_WITHIN
        check_later_calls(rank, world, group)
        spar.close(group)


@pytest.mark.parametrize("transport", [*TRANSPORTS, tables.ACROSS])
@pytest.mark.parametrize("kind", LOCAL)
def test_local_failure_is_reported_in_the_same_call(tmp_path: Path, transport: str, kind: str) -> None:
    world, odd = 3, 1
    processes = start(
        fail_on_one_rank, world, tmp_path, world, kind, odd, SPAR_TRANSPORT=transport, SPAR_TIMEOUT="20"
    )
    assert finish(processes, 60) == [0] * world


def run_out_of_memory(rank: int, folder: Path) -> None:
    """torch's allocator fails on one rank alone."""
    check_later_calls(rank, 2, dist.group.WORLD)
    wide = torch.zeros(1).expand(1 << 26)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (64 << 20), limits[1]))
        with pytest.raises(RuntimeError, match="allocate memory"):
            gather(wide, None, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
    else:
        with pytest.raises(spar.OutOfMemoryError, match=r"rank 1 failed: .*allocate memory"):
            gather(wide, None, 0)
    check_later_calls(rank, 2, dist.group.WORLD)


def test_out_of_memory_over_torch_raises_on_all_ranks(tmp_path: Path) -> None:
    processes = start(run_out_of_memory, 2, tmp_path, SPAR_TRANSPORT="torch", SPAR_TIMEOUT="20")
    assert finish(processes, 60) == [0, 0]


def fail_twice(rank: int, folder: Path) -> None:
    """A rank that fails in two consecutive calls reports both; its peers raise twice."""
    for _ in range(2):
        with pytest.raises((ValueError, spar.MismatchError), match="dim is 7"):
            gather(torch.zeros(2), None, 7 if rank == 0 else 0)
    check_later_calls(rank, 2, dist.group.WORLD)


@pytest.mark.parametrize("transport", [*TRANSPORTS, tables.ACROSS])
def test_two_consecutive_local_failures(tmp_path: Path, transport: str) -> None:
    assert finish(start(fail_twice, 2, tmp_path, SPAR_TRANSPORT=transport), 60) == [0, 0]


def fail_without_comparison(rank: int, folder: Path) -> None:
    """Without comparisons a failure cannot be reported: the group breaks on every rank within the timeout."""
    os.environ["GLOO_SOCKET_IFNAME"] = "none"  # so that ranks do not connect; gloo has
    check_later_calls(rank, 2, dist.group.WORLD)
    if rank == 1:
        with pytest.raises(ValueError, match="dim is 7"):
            gather(torch.zeros(2), None, 7)
        with pytest.raises(spar.GroupBrokenError, match="failed on rank 1: ValueError"):
            gather(torch.zeros(2), None, 0)
        await_report(folder, 0)
    else:
        with pytest.raises(spar.ExchangeTimeoutError):
            gather(torch.zeros(2), None, 0)
        report(folder, 0, "")


def test_local_failure_without_comparison_breaks_the_group(tmp_path: Path) -> None:
    settings = {"SPAR_TRANSPORT": tables.ACROSS, "SPAR_CHECK": "0", "SPAR_TIMEOUT": "1.5"}
    processes = start(fail_without_comparison, 2, tmp_path, set_up=False, **settings)
    assert finish(processes, 60) == [0, 0]


def fail_and_exit(rank: int, folder: Path) -> None:
    if rank == 1:
        with pytest.raises(ValueError, match="dim is 7"):
            gather(torch.zeros(2), None, 7)
        if os.environ["DESTROY"] == "1":
            dist.destroy_process_group()
        return
    assert not await_report(folder, 9)
    with pytest.raises(spar.SparError):  # the peer's failure, or its exit
        gather(torch.zeros(2), None, 0)


@pytest.mark.parametrize("destroy", ["0", "1"])
@pytest.mark.parametrize("transport", [*TRANSPORTS, tables.ACROSS])
def test_failed_rank_exits_without_waiting(tmp_path: Path, transport: str, destroy: str) -> None:
    processes = start(fail_and_exit, 2, tmp_path, SPAR_TRANSPORT=transport, DESTROY=destroy)
    assert finish(processes[1:], 20) == [0], "its exit does not wait for the peers"
    report(tmp_path, 9, "")
    processes[0].join(30)
    assert processes[0].exitcode == 0


def pass_meta_on_one_rank(rank: int, folder: Path) -> None:
    """A meta tensor on one rank puts it one call ahead: every later call raises, with the call numbers."""
    check_later_calls(rank, 2, dist.group.WORLD)
    if rank == 1:
        assert gather(torch.zeros(2, device="meta"), None, 0).shape == (4,)
    for _ in range(2):
        with pytest.raises(spar.MismatchError, match=r"rank 0: .*\(call \d+\)\n  rank 1: .*\(call \d+\)"):
            gather(torch.zeros(2), None, 0)


@pytest.mark.parametrize("transport", [*TRANSPORTS, tables.ACROSS])
def test_meta_tensor_on_one_rank_raises_mismatch(tmp_path: Path, transport: str) -> None:
    assert finish(start(pass_meta_on_one_rank, 2, tmp_path, SPAR_TRANSPORT=transport), 60) == [0, 0]


# ---- a death that a peer detected first ----


def call_after_a_death(rank: int, folder: Path) -> None:
    check_later_calls(rank, 3, dist.group.WORLD)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        assert not await_report(folder, 0)
    with pytest.raises(spar.PeerLostError, match=r"rank 2 \(process") as caught:
        gather(torch.zeros(2), None, 0)
    assert caught.value.ranks == (2,)
    if rank == 0:
        report(folder, 0, "")
    with pytest.raises(spar.GroupBrokenError):
        gather(torch.zeros(2), None, 0)
    report(folder, 10 + rank, "")
    await_report(folder, 11 - rank)


def test_late_rank_reports_a_death_that_a_peer_detected(tmp_path: Path) -> None:
    processes = start(call_after_a_death, 3, tmp_path, SPAR_TRANSPORT="shm")
    assert finish(processes, 30) == [0, 0, -signal.SIGKILL]


# ---- leaks ----


def fail_in_many_groups(rank: int, folder: Path) -> None:
    """A reported failure keeps neither the group nor its threads alive."""
    for _ in range(20):
        group = dist.new_group([0, 1])
        with pytest.raises((ValueError, spar.MismatchError)):
            gather(torch.zeros(2), group, 7 if rank == 0 else 0)
        dist.barrier(group)
        seen = weakref.ref(group)
        spar.close(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        collectives.forget_finished()
        assert seen() is None
    assert not collectives._unfinished


def test_reported_failures_release_the_group(tmp_path: Path) -> None:
    assert finish(start(fail_in_many_groups, 2, tmp_path, SPAR_TRANSPORT="torch"), 60) == [0, 0]


# ---- errors after the exchange ----


class Guard(TorchDispatchMode):
    """Raise after the exchange has returned, as a check of its values would."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.spar.exchange.default:
            raise ValueError("nan found")
        return out


def fail_after_the_exchange(rank: int, folder: Path) -> None:
    """The peers have made the call: the error is this rank's alone, and later calls match."""
    if rank == 1:
        with pytest.raises(ValueError, match="nan found"), Guard():
            gather(torch.zeros(2), None, 0)
    else:
        assert gather(torch.zeros(2), None, 0).shape == (4,)
    check_later_calls(rank, 2, dist.group.WORLD)


@pytest.mark.parametrize("transport", [*TRANSPORTS, tables.ACROSS])
def test_error_after_the_exchange_is_local(tmp_path: Path, transport: str) -> None:
    assert finish(start(fail_after_the_exchange, 2, tmp_path, SPAR_TRANSPORT=transport), 60) == [0, 0]


def fail_between_exchanges(rank: int, folder: Path) -> None:
    """sp_gather makes two exchanges: a failure of one rank after the first is reported in the second."""
    set_sequence_parallel_group(dist.group.WORLD)
    if rank == 1:
        with pytest.raises(ValueError, match="nan found"), Guard():
            spar.sharding.sp_gather(torch.zeros(2), 0)
    else:
        with pytest.raises(spar.MismatchError, match="rank 1 failed: ValueError: nan found"):
            spar.sharding.sp_gather(torch.zeros(2), 0)
    check_later_calls(rank, 2, dist.group.WORLD)


@pytest.mark.parametrize("transport", [*TRANSPORTS, tables.ACROSS])
def test_error_between_two_exchanges_is_reported(tmp_path: Path, transport: str) -> None:
    assert finish(start(fail_between_exchanges, 2, tmp_path, SPAR_TRANSPORT=transport), 60) == [0, 0]


def fail_ahead(rank: int, folder: Path, failures: int) -> None:
    """Rank 0 fails calls ahead of a rank that is late; then both make one, unless rank 0 has closed."""
    error = ValueError if rank == 0 else spar.MismatchError
    if rank == 1:
        time.sleep(0.5)
    for _ in range(failures):
        with pytest.raises(error, match="dim is 7"):
            gather(torch.zeros(2), None, 7 if rank == 0 else 0)
    if failures > 2:
        gather(torch.zeros(2), None, 0)
    elif rank == 0:
        spar.close()
    else:
        with pytest.raises(spar.GroupBrokenError, match="rank 0 closed the group"):
            gather(torch.zeros(2), None, 0)


@pytest.mark.parametrize("failures", [2, 3000])
@pytest.mark.parametrize("transport", [*TRANSPORTS, tables.ACROSS])
def test_failures_ahead_of_a_late_rank_are_reported(tmp_path: Path, transport: str, failures: int) -> None:
    """However many, and also if the rank leaves then."""
    ranks = start(fail_ahead, 2, tmp_path, failures, SPAR_TRANSPORT=transport, SPAR_TIMEOUT="20")
    assert finish(ranks, 60) == [0, 0]
