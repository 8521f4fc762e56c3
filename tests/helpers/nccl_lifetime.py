# SPDX-License-Identifier: Apache-2.0
"""The nccl transport over stand-in libraries: when communicators and device memory are freed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import spar
from helpers.nccl_ranks import Stream, communicator, core_of, driver, enqueue, set_up, stalled, wait, within
from helpers.torch_nccl import torch_nccl
from spar._exchange.exchange import Exchange
from spar._exchange.layouts import even, pair
from spar._group.group import Group
from spar._transports import nccl


@contextlib.contextmanager
def setting(**variables: object) -> Iterator[None]:
    """Environment variables of the stand-ins, which they read at each call."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, str(value))
        yield


def check_close(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """The watchdog polls on beside a closed group, whose communicator is freed."""
    other = set_up(group)
    for _ in range(3):
        comm = set_up(group)
        enqueue(comm, "gather", (0,), torch.zeros(2))
        wait(comm)
        comm.close()
        time.sleep(0.35)
        dist.barrier(group)
        enqueue(other, "gather", (0,), torch.zeros(2))
        wait(other)
    other.close()


def check_slow_close(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """The end of a closed group's communicator takes long: peers learn of the close before it."""
    comm = set_up(group)
    enqueue(comm, "gather", (0,), torch.zeros(2))
    wait(comm)
    with setting(STANDIN_NCCL_ABORT_MS=1500):
        if rank == 1:
            comm.close()
            time.sleep(0.4)  # the abort has begun
        dist.barrier(group)
        if rank == 0:
            with pytest.raises(spar.GroupBrokenError, match="rank 1 closed the group before call 2"):
                enqueue(comm, "gather", (0,), torch.zeros(2))
    dist.barrier(group)
    comm.close()


def check_slow_call(rank: int, world: int, group: dist.ProcessGroup, native: bool) -> None:
    """A timeout while a call is inside NCCL: the communicator is freed later, and no further step begins."""
    with torch_nccl(group) if native else contextlib.nullcontext():
        comm = set_up(group, SPAR_STAGING_MAX=4096 * (world - 1))
        comm.timeout = 0.15
        if rank != 0:
            with Stream() as stream:
                begin = time.monotonic()
                with setting(STANDIN_NCCL_SLOW_MS=400), pytest.raises(spar.ExchangeTimeoutError):
                    enqueue(comm, "gather", (0,), torch.zeros(2000))  # in many steps
                assert time.monotonic() - begin < 1.0, "it did not stop between two steps"
                with pytest.raises(spar.GroupBrokenError, match="did not end in time"):
                    enqueue(comm, "gather", (0,), torch.zeros(2))
                stream.synchronize()
        dist.barrier(group)
        comm.close()
        time.sleep(0.3)


def check_full_queue(rank: int, world: int, group: dist.ProcessGroup, native: bool) -> None:
    """A launch blocks on a full queue: the timeout ends it, and the stream."""
    with torch_nccl(group) if native else contextlib.nullcontext():
        comm = set_up(group)
        comm.timeout = 0.3
        if rank != 0:
            begin = time.monotonic()
            with Stream() as stream, setting(STANDIN_QUEUE=2), stalled():
                with pytest.raises((spar.ExchangeTimeoutError, spar.GroupBrokenError)):
                    for _ in range(10):
                        enqueue(comm, "gather", (0,), torch.zeros(2))
                stream.synchronize()
            assert time.monotonic() - begin < 4
        dist.barrier(group)
        comm.close()
        time.sleep(0.3)


def check_abandoned_setup(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A set-up times out while its thread is inside NCCL: nothing is freed under that thread."""
    comm = communicator(group)
    comm.timeout = 0.4
    failed = pytest.raises(spar.ExchangeTimeoutError)
    with setting(STANDIN_NCCL_SLOW_MS=900), failed:
        comm.channel("init", torch.device("cuda", 0))
    time.sleep(0.8)
    dist.barrier(group)


def check_frees(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Set-ups, failed ones and closes beside a capture on another stream: they do not invalidate it."""
    comm, live = set_up(group), ctypes.CDLL("libcuda.so.1").standin_live
    before = live() + 2  # with a stream and a graph
    closed = set_up(group)
    enqueue(closed, "gather", (0,), torch.zeros(2))
    wait(closed)
    graph = ctypes.c_void_p()
    with Stream() as stream:
        driver("cuStreamBeginCapture", stream.handle, ctypes.c_int(0))
        closed.close()
        within(3, lambda: live() <= before)
        with setting(STANDIN_NCCL_FAIL="CommInitRank:1"):
            refused = set_up(group)
        assert refused.transport("cuda").name == "torch"
        within(3, lambda: live() <= before)
        refused.close()
        driver("cuStreamEndCapture", stream.handle, ctypes.pointer(graph))
    driver("cuGraphDestroy", graph)
    dist.barrier(group)
    comm.close()


def check_replay_after_close(rank: int, world: int, group: dist.ProcessGroup, native: bool) -> None:
    """A graph is replayed after its group was closed: its communicator is still there."""
    with torch_nccl(group) if native else contextlib.nullcontext():
        comm = set_up(group, SPAR_STAGING_MAX=4096 * (world - 1))
        graph = ctypes.c_void_p()
        x = torch.zeros(40, 12)
        with Stream() as stream:
            enqueue(comm, "all_to_all", (1, 0, 40 * world), x)
            stream.synchronize()
            driver("cuStreamBeginCapture", stream.handle, ctypes.c_int(0))
            got = enqueue(comm, "all_to_all", (1, 0, 40 * world), x)
            driver("cuStreamEndCapture", stream.handle, ctypes.pointer(graph))
            dist.barrier(group)
            comm.close()
            time.sleep(0.5)
            x.copy_(torch.arange(480.0).view(40, 12) + 1000 * rank)
            dist.barrier(group)
            driver("cuGraphLaunch", graph, stream.handle)
            stream.synchronize()
        wanted = [torch.arange(480.0).view(40, 12) + 1000 * p for p in range(world)]
        assert torch.equal(got, torch.cat([w.tensor_split(world, 1)[rank] for w in wanted]))
        driver("cuGraphDestroy", graph)
        dist.barrier(group)


def check_close_under_way(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A group is closed while its calls wait in the stream: they complete."""
    comm = set_up(group, SPAR_STAGING_MAX=8192 * (world - 1))
    x = torch.arange(4800.0).view(400, 12) + 10000 * rank
    with Stream() as stream:
        slow = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda unused: time.sleep(0.5))
        ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(stream.handle, slow, None)
        got = [enqueue(comm, "all_to_all", (1, 0, 400 * world), x) for _ in range(3)]
        comm.close()
        stream.synchronize()
    parts = [torch.arange(4800.0).view(400, 12) + 10000 * p for p in range(world)]
    wanted = torch.cat([part.tensor_split(world, 1)[rank] for part in parts])
    assert all(torch.equal(each, wanted) for each in got)
    dist.barrier(group)


def check_no_staging(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """One rank finds no memory to stage a call: its peers raise, and do not wait for its bytes."""
    comm = set_up(group)
    channel: Any = comm.channels["cuda"]
    comm.channels["cpu"], comm.transports["cpu"] = channel, comm.transports["cuda"]  # CPU tensors, too
    args = pair(even(0, 2 * world), even(1, 10000 * world))  # more than the group keeps
    exchange, x = Exchange("all_to_all", comm, (args,)), torch.zeros(2, 10000 * world)

    def fail(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype is torch.uint8:
            raise torch.OutOfMemoryError(f"no {shape[0]} bytes")
        return torch.empty_strided(shape, strides, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch, Stream():
        if rank == 0:
            patch.setattr(nccl, "empty", fail)
        begin = time.monotonic()
        with pytest.raises((torch.OutOfMemoryError, spar.SparError)) as caught:
            for _ in range(2):  # a rank that was earlier raises in its next call
                exchange.run([x])
                wait(comm)
        assert "no " in str(caught.value) and "bytes" in str(caught.value)
        assert isinstance(caught.value, torch.OutOfMemoryError) == (rank == 0)
        assert time.monotonic() - begin < 5
    dist.barrier(group)
    comm.close()


def check_exit(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A process exits beside an abort: it waits for that, and the abort does not outlive the driver."""
    comm = set_up(group)
    enqueue(comm, "gather", (0,), torch.zeros(2))
    wait(comm)
    os.environ.update(STANDIN_NCCL_ABORT_MS="300", STANDIN_UNLOAD_MS="600")
    comm.close()
    if rank == 1:
        time.sleep(0.15)  # the abort has begun
    ctypes.CDLL(None).exit(0)  # multiprocessing's own end leaves out what is to be done at exit


# ---- torch's communicator ----


def expect(comm: Group, kind: type[spar.SparError], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        enqueue(comm, "gather", (0,), torch.zeros(2))
    assert type(caught.value) is kind


def check_native_aborted(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A timeout aborts torch's communicator: calls raise what broke the group, and not torch's error."""
    with torch_nccl(group) as backend:
        comm = set_up(group)
        comm.timeout = 0.3
        with Stream() as stream:
            with stalled():
                enqueue(comm, "gather", (0,), torch.zeros(2))
            within(3, backend.has_ended)
            expect(comm, spar.ExchangeTimeoutError, "did not end in time")
            expect(comm, spar.GroupBrokenError, "did not end in time")
            stream.synchronize()
        dist.barrier(group)
        comm.close()


def check_native_destroyed(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """torch's communicator was destroyed: an error of spar's."""
    with torch_nccl(group) as backend:
        comm = set_up(group)
        enqueue(comm, "gather", (0,), torch.zeros(2))
        wait(comm)
        dist.barrier(group)
        backend.abort()
        with pytest.raises(spar.SparError, match="torch's communicator is gone: was the group destroyed"):
            enqueue(comm, "gather", (0,), torch.zeros(2))
        dist.barrier(group)
        comm.close()


def check_native_device(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """The group's device is not the current one, as on a thread that set none."""
    device = torch.device("cuda", rank)
    with torch_nccl(group, rank) as backend:
        comm = set_up(group, device)
        got = []

        def run() -> None:
            with Stream():
                got.append(enqueue(comm, "gather", (0,), torch.full((2,), float(rank))))
                wait(comm)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert torch.equal(got[0], torch.arange(float(world)).repeat_interleave(2))
        assert not backend.has_ended()
        dist.barrier(group)
        comm.close()


def check_open_group(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Inside torch's _coalescing_manager, which defers NCCL's transfers, set-up and calls are rejected."""
    comm = communicator(group)
    text = "was called inside torch's _coalescing_manager"
    rejected = pytest.raises(spar.SparError, match=text)
    with dist.distributed_c10d._coalescing_manager(group), rejected:
        comm.channel("init", torch.device("cuda", 0))
    ready = set_up(group)
    with dist.distributed_c10d._coalescing_manager(group), pytest.raises(spar.SparError, match=text):
        enqueue(ready, "gather", (0,), torch.zeros(2))
    dist.barrier(group)
    ready.close()
    assert core_of(set_up(group)) is not None
