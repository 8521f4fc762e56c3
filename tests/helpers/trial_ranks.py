# SPDX-License-Identifier: Apache-2.0
"""The ranks' side of tests of the choice between push and nccl by time, over stand-in libraries."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import spar
from helpers import nccl_ranks, push_direct, push_ranks
from helpers.nccl_ranks import OnDevice, Stream, allocator, enqueue, set_up, wait, within
from helpers.torch_nccl import torch_nccl
from spar import _C
from spar._control.state import Transport
from spar._group import trial
from spar._group.group import Group
from spar._transports import nccl, push

# These modules stand in for pools of outputs, and for the wait before they are freed.
assert push_direct.Pool and push._synchronize is push_ranks.synchronize
SLOT = 1 << 20
SENT = 10 * 2 * 2048  # bytes that a rank of 3 sends in a call of the trial, whose image is 64 KiB at most

_kept: list[torch.Tensor] = []  # unlike CUDA's, CPU memory may be reused as soon as it is freed


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Any:
    if dtype is torch.uint8 or allocator.pool is not None:  # staging, or an output in a slot
        return allocator(shape, strides, dtype)
    _kept.append(torch.empty_strided(shape, strides, dtype=dtype))
    return OnDevice(_kept[-1])


@contextlib.contextmanager
def choosing(rank: int = 0, seconds: dict[str, float] | None = None, fails: str = "") -> Iterator[None]:
    """Let groups choose by time: by the true times, or by these of each transport.

    fails: the transport over which rank 1 makes no calls.
    """
    shortest = trial._shortest

    def measured(core: _C.Comm, calls: Any, deadline: float) -> float:
        name = "push" if core.room else "nccl"
        if name == fails and rank == 1:
            raise RuntimeError("no memory for it")
        true = shortest(core, calls, deadline)
        return true if seconds is None else seconds[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPAR_PUSH_SLOT", str(SLOT))
        patch.setattr(nccl_ranks, "CHOICE", "")
        patch.setattr(nccl, "empty", _empty)
        patch.setattr(trial, "empty", _empty)
        patch.setattr(trial, "_shortest", measured)
        yield


@contextlib.contextmanager
def slow_link() -> Iterator[None]:
    """Let all calls be long enough to show that a link is slow, as all are here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "LEAST_BYTES", 0)
        yield


def first_collective(group: dist.ProcessGroup, backend: Any) -> None:
    """Let torch make its communicator."""
    if not backend._comm:
        backend._create()
    dist.barrier(group)


def exchange(comm: Group, rank: int) -> None:
    with Stream() as stream:
        got = enqueue(comm, "gather", (0,), torch.full((2,), float(rank)))
        stream.synchronize()
    assert torch.equal(got, torch.arange(float(comm.world)).repeat_interleave(2))
    wait(comm)


def chosen(comm: Group, rank: int) -> Transport:
    """Return the transport, over which calls work."""
    transport = comm.transport("cuda")
    exchange(comm, rank)
    return transport


def slots() -> int:
    return _C.device_stats()[2]


def check_times(rank: int, world: int, group: dist.ProcessGroup, seconds: Any, name: str) -> None:
    """Torch has a communicator: both are timed, and the same one is taken on all ranks.

    seconds: by transport, of all ranks or of each.
    """
    time.sleep(1)  # the memory of groups before is freed behind their closes
    before = slots()
    times = {key: value[rank] if isinstance(value, tuple) else value for key, value in seconds.items()}
    slowest = {key: max(value) if isinstance(value, tuple) else value for key, value in seconds.items()}
    push, other = (f"{SENT / slowest[key] / 1e9:.3g} GB/s" for key in ("push", "nccl"))
    with torch_nccl(group) as backend:
        first_collective(group, backend)
        with choosing(rank, times):
            comm = set_up(group)
        transport = chosen(comm, rank)
        assert transport.name == name, transport
        assert transport.reason.endswith(f": push {push}; nccl {other}"), transport
        if name == "nccl":
            assert dict(transport.rejected)["push"] == f"push {push}; nccl {other}"
            within(5, lambda: slots() == before)  # push is closed
        else:
            assert "nccl" not in dict(transport.rejected) and slots() > before
        dist.barrier(group)
        comm.close()
        time.sleep(0.3)
        assert not backend.has_ended()


def check_true_times(rank: int, world: int, group: dist.ProcessGroup, check: str) -> str:
    """Over a slow link both are timed; also where calls are compared before they are issued."""
    with choosing(), slow_link():
        comm = set_up(group, SPAR_CHECK=check)
    assert comm.synchronous == (check == "1") and comm.calls == 0
    transport = chosen(comm, rank)
    assert re.search(r": push [\d.e-]+ GB/s; nccl [\d.e-]+ GB/s$", transport.reason), transport
    comm.close()
    return transport.reason


def check_fast_link(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Unless all ranks have a communicator of torch, nccl is not timed, and none is made."""
    has = trial.has_communicator

    def check(backend: Any, missing: bool) -> None:
        comm = set_up(group)
        transport = chosen(comm, rank)
        assert transport.name == "push", transport
        assert transport.reason.endswith(f": push {SENT / 1e9:.3g} GB/s"), transport
        assert bool(backend._comm) != missing
        comm.close()

    with torch_nccl(group) as backend, choosing(rank, {"push": 1.0, "nccl": 0.1}):
        check(backend, backend.is_lazy)
        first_collective(group, backend)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trial, "has_communicator", lambda *args: rank != 1 and has(*args))
            check(backend, False)


def check_short_calls(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Where the slot is small, calls are too short to show that the link is slow."""
    with choosing(rank, {"push": 1.0, "nccl": 0.1}):
        comm = set_up(group)
    assert chosen(comm, rank).name == "push"
    comm.close()


def check_forced(rank: int, world: int, group: dist.ProcessGroup, setting: str) -> None:
    """SPAR_TRANSPORT names push, or excludes nccl: nothing is timed."""
    with choosing(rank, {}), slow_link(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl_ranks, "CHOICE", setting)
        comm = set_up(group)
    transport = chosen(comm, rank)
    assert (transport.name, "GB/s" in transport.reason) == ("push", False), transport
    comm.close()


def check_no_nccl(rank: int, world: int, group: dist.ProcessGroup, how: str) -> None:
    """Where nccl's set-up or its calls fail on one rank, or its set-up does not end, push stays."""
    fails = "nccl" if how == "calls" else ""
    times = choosing(rank, {"push": 1.0, "nccl": 0.1}, fails)
    with times, slow_link(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "CONNECT_S", 2.0)
        if rank == 1 and how == "set-up":
            patch.setenv("STANDIN_NCCL_FAIL", "CommInitRank:1")
        if rank == 1 and how == "stall":
            patch.setenv("STANDIN_NCCL_LATER", "stall")
        begin = time.monotonic()
        comm = set_up(group)
        assert time.monotonic() - begin < 6
    why = {
        "set-up": r"rank 1: ncclCommInitRank: .*",
        "calls": r"rank 1: RuntimeError: no memory for it",
        "stall": r"rank \d: timed out while NCCL was set up: a rank is missing",
    }
    transport = chosen(comm, rank)
    assert transport.name == "push", transport
    assert re.search(rf": push {SENT / 1e9:.3g} GB/s; nccl {why[how]}$", transport.reason), transport
    comm.close()


def check_push_fails(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Where push's calls fail on one rank, all take nccl, whose set-up is then the usual one."""
    begin = time.monotonic()
    with choosing(rank, {}, "push"):
        comm = set_up(group)
    assert time.monotonic() - begin < 6
    transport = chosen(comm, rank)
    assert transport.name == "nccl", transport
    assert dict(transport.rejected)["push"] == "rank 1: RuntimeError: no memory for it"
    comm.close()


def check_no_memory(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A rank that has no memory for the calls of the trial keeps push, untimed, on all ranks."""

    def empty(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with choosing(rank, {}), pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(trial, "empty", empty)
        comm = set_up(group)
    transport = chosen(comm, rank)
    text = "push not timed: rank 1: OutOfMemoryError: CUDA out of memory"
    assert transport.name == "push" and transport.reason.endswith(f": {text}"), transport
    comm.close()


def check_interrupt(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Ctrl-C on a rank ends its trial at once, and its peers' by their deadline."""
    shortest = trial._shortest

    def interrupted(*args: Any) -> float:
        if rank == 1:
            raise KeyboardInterrupt
        return shortest(*args)

    with choosing(rank), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "_shortest", interrupted)
        patch.setenv("SPAR_TIMEOUT", "3")
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt if rank == 1 else spar.ExchangeTimeoutError):
            set_up(group)
        assert time.monotonic() - begin < 6
