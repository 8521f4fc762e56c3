# SPDX-License-Identifier: Apache-2.0
"""The ranks' side of tests of the push transport over stand-in libraries: the checks of nccl_ranks.py and
nccl_faults.py, in groups whose ranks map each other's slots.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import spar
from helpers import nccl_ranks
from helpers.nccl_ranks import (
    Cell,
    Stream,
    core_of,
    driver,
    enqueue,
    exchange_cells,
    expect_broken,
    set_up,
    within,
)
from spar import _C
from spar._group import setup
from spar._transports import push


def synchronize(device: torch.device) -> None:
    driver("cuCtxSynchronize")


push._synchronize = synchronize  # also after a test


def check_environment(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """The stand-ins read variables on other threads while this one adds some."""
    read = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
    found, status, done = ctypes.c_void_p(), ctypes.c_int(), threading.Event()

    def read_often() -> None:
        while not done.is_set():
            read(b"", ctypes.byref(found), 0, ctypes.c_uint64(0), ctypes.byref(status))

    thread = threading.Thread(target=read_often)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        for number in range(3000):
            patch.setenv(f"STANDIN_{number}", "")
    done.set()
    thread.join()


def settle() -> None:
    """Let the memory of earlier groups go: that of outputs in a failure's frames, too, and behind closes."""
    gc.collect()
    time.sleep(1)


def over_push(
    rank: int, world: int, group: dist.ProcessGroup, slot: int, check: Callable[..., Any], *args: Any
) -> Any:
    """Run a check of the nccl transport, or of any other, in groups that push through slots of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPAR_PUSH_SLOT", str(slot))
        patch.setattr(nccl_ranks, "CHOICE", "")
        patch.setattr(setup, "_has_rival", lambda *args: False)  # test_trial.py has the choice by time
        return check(rank, world, group, *args)


def check_cells(rank: int, world: int, group: dist.ProcessGroup, cells: list[Cell]) -> str:
    comm = set_up(group)
    transport = comm.transport("cuda")
    assert transport.name == "push", transport
    exchange_cells(comm, rank, cells)
    comm.close()
    return transport.reason


def check_closed(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """After a rank closed the group, its peers may finish their calls; one more call is rejected."""
    comm = set_up(group)
    x = torch.full((2, world), float(rank))
    with Stream() as stream:
        got = enqueue(comm, "all_to_all", (1, 0, 2 * world), x)
        if rank == world - 1:
            comm.close()
        stream.synchronize()
        assert torch.equal(got[:, 0], torch.arange(float(world)).repeat_interleave(2))
        dist.barrier(group)
        time.sleep(0.3)  # the close is published when the call is complete
        if rank != world - 1:
            with pytest.raises(
                spar.GroupBrokenError, match=f"rank {world - 1} closed the group before call 2"
            ):
                enqueue(comm, "all_to_all", (1, 0, 2 * world), x)
    dist.barrier(group)
    comm.close()


def check_closed_without_threads(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A group is closed, and the peers learn of it, also where no thread can be started, as at exit."""
    comm = set_up(group)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            start = mock.Mock(side_effect=RuntimeError("can't create new thread at interpreter shutdown"))
            patch.setattr(threading.Thread, "start", start)
            comm.close()
            assert start.called and not comm.channels
    dist.barrier(group)
    if rank != 0:
        with pytest.raises(spar.GroupBrokenError, match="rank 0 closed the group before call 1"):
            enqueue(comm, "gather", (0,), torch.zeros(2))
    dist.barrier(group)
    comm.close()


def check_fall_back(rank: int, world: int, group: dist.ProcessGroup, function: str) -> None:
    """If a function of the driver fails on one rank, all take the next transport, with the reason."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("STANDIN_FAIL", f"{function}:1:801")
        begin = time.monotonic()
        comm = set_up(group)
        assert time.monotonic() - begin < 5
    transport = comm.transport("cuda")
    assert transport.name == "nccl", transport
    reason = f"rank 1: {function}: error 801 (CUDA_ERROR_OF_A_STAND_IN)"
    assert dict(transport.rejected)["push"] == reason, transport
    comm.close()


class Silent:
    """A rank's core that fails in the second stage of the set-up, and has no ring to tell the peers by."""

    def __init__(self, core: _C.Comm) -> None:
        self.core, self.close, self.setup_result = core, core.close, core.setup_result

    def connect(self, results: bytes, deadline: float) -> None:
        result = bytearray(self.setup_result)
        result[0], result[8:18] = 1, b"of silence"  # failed, reason
        self.setup_result = bytes(result)


def check_silent_rank(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Where a rank does not pass its slot on, all take the next transport before the set-up's limit."""
    set_up(group).close()  # the processes are connected
    connect, made = setup.connect, []

    def connect_silently(group: Any, core: Any, *rest: Any) -> str:
        made.append(core)  # the first is of push, the next of nccl
        silent: Any = Silent(core) if len(made) == 1 else core
        return connect(group, silent, *rest)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(setup, "connect", connect_silently)
        patch.setenv("SPAR_TIMEOUT", "6")
        begin = time.monotonic()
        comm = set_up(group)
        assert time.monotonic() - begin < 5
    assert comm.transport("cuda").name == "nccl"
    assert dict(comm.transport("cuda").rejected)["push"] == "rank 1: of silence"
    comm.close()


def check_late_kernels(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Where a rank's GPU is busy beyond the set-up, its slots stay mapped until its kernels have ended."""
    settle()
    before = _C.device_stats()[2]
    set_up(group).close()  # the kernels are loaded
    within(5, lambda: _C.device_stats()[2] == before)
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("STANDIN_LATE_MS", "9500")
        patch.setenv("SPAR_TIMEOUT", "3")
        with pytest.raises(spar.ExchangeTimeoutError):
            set_up(group)
    assert time.monotonic() - begin < 9
    within(12, lambda: _C.device_stats()[2] == before)
    assert (time.monotonic() - begin > 9) == (rank == 1)


def check_other_terms(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """The smallest cap of all ranks applies; one that is too small for the ranks moves all to nccl."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPAR_PUSH_SLOT", str(1 << 20 if rank else 1 << 16))
        settle()
        before = _C.device_stats()[2]
        comm = set_up(group)
        assert comm.transport("cuda").name == "push"
        assert _C.device_stats()[2] - before == 1 << 13  # the halves take as much
        comm.close()
        patch.setenv("SPAR_PUSH_SLOT", str(1 << 20 if rank else 2047))
        comm = set_up(group)
    reason = "rank 0: SPAR_PUSH_SLOT is 1536; 3 ranks need at least 2048"
    assert dict(comm.transport("cuda").rejected)["push"] == reason
    comm.close()


def check_warning(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Ranks whose push fails are told once what they lost, and why; none of those without."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("spar")
    logger.addHandler(handler)
    try:
        set_up(group).close()
        assert not records
        check_fall_back(rank, world, group, "cuMemCreate")
    finally:
        logger.removeHandler(handler)
    assert len(records) == (rank == 0), records
    text = "share this host, but the set-up of push failed, and nccl, which is slower, moves their tensors: "
    assert all(text + "rank 1: cuMemCreate: error 801" in record for record in records)


def check_absent_replay(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """If a rank does not replay its graph, the others' kernels end by their own limit."""
    comm = set_up(group)
    comm.timeout = 0.5
    graph, x = ctypes.c_void_p(), torch.zeros(5)
    with Stream() as stream:
        driver("cuStreamBeginCapture", stream.handle, ctypes.c_int(0))
        enqueue(comm, "gather", (0,), x)
        driver("cuStreamEndCapture", stream.handle, ctypes.pointer(graph))
        dist.barrier(group)
        if rank != 1:
            begin = time.monotonic()
            driver("cuGraphLaunch", graph, stream.handle)
            stream.synchronize()
            assert 1 < time.monotonic() - begin < 4  # the limit is a second behind the call's
            within(2, lambda: core_of(comm).broken is not None)
            text = r"rank 1 did not send its part of a call or of a graph's replay in time"
            expect_broken(comm, spar.ExchangeTimeoutError, text)
    dist.barrier(group)
    assert core_of(comm).captured
    comm.close()
