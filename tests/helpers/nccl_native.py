# SPDX-License-Identifier: Apache-2.0
"""The ranks' side of tests of the nccl transport over torch's communicators: torch's watchdog and limits."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

import spar
from helpers import torch_nccl
from helpers.nccl_lifetime import setting
from helpers.nccl_ranks import DEVICE, Stream, communicator, enqueue, set_up, stalled, wait, within
from spar._control import collectives


def check_pointer(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """The public property is preferred; without it the private function serves."""
    with torch_nccl.torch_nccl(group) as backend:
        has_property = hasattr(type(backend), "comm_ptr")
        with pytest.MonkeyPatch.context() as patch:
            if has_property:
                patch.delattr(torch_nccl.ProcessGroupNCCL, "_comm_ptr")
                patch.delattr(torch_nccl.ProcessGroupNCCL2, "_comm_ptr")
            comm = set_up(group)
            channel: Any = comm.channels["cuda"]
            assert channel.has_native
            with Stream():
                got = enqueue(comm, "gather", (0,), torch.full((2,), float(rank)))
                wait(comm)
        assert torch.equal(got, torch.arange(float(world)).repeat_interleave(2))
        dist.barrier(group)
        comm.close()


def check_several(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Torch has a communicator for each of two groups; an abort ends that of its group only."""
    ranks = list(range(world))
    other = dist.new_group(ranks)
    with torch_nccl.torch_nccl(group) as first, torch_nccl.torch_nccl(other) as second:
        comms = [set_up(group), set_up(other)]
        pointers = [channel.device.native() for channel in (comm.channels["cuda"] for comm in comms)]  # type: ignore[attr-defined]
        assert pointers == [first._comm.value, second._comm.value] and len(set(pointers)) == 2
        with Stream() as stream:
            outputs = [enqueue(comm, "gather", (0,), torch.full((2,), float(rank))) for comm in comms]
            stream.synchronize()
            for output in outputs:
                assert torch.equal(output, torch.arange(float(world)).repeat_interleave(2))
            for comm in comms:
                wait(comm)
            dist.barrier(group)
            first.abort()
            with pytest.raises(spar.SparError, match="torch's communicator is gone"):
                enqueue(comms[0], "gather", (0,), torch.zeros(2))
            enqueue(comms[1], "gather", (0,), torch.zeros(2))
            wait(comms[1])
        dist.barrier(group)
        for comm in comms:
            comm.close()
    dist.destroy_process_group(other)


# ---- collectives that spar issues on torch's group ----


def issue(comm: Any, backend: torch_nccl.ProcessGroupNCCL) -> collectives.Unfinished:
    """Issue a collective as the set-up of a group that has no backend for the CPU."""
    buffers: Any = (SimpleNamespace(device=DEVICE),)
    start: Any = backend.allreduce
    return collectives._issue(comm, "init", comm.deadline(), buffers, AllreduceOptions(), start, buffers)


def check_limit(rank: int, world: int, group: dist.ProcessGroup, own_s: float, folder: str) -> None:
    """A peer does not make a collective that spar issued: spar's limit raises, and the process goes on.

    own_s: the group's own timeout in seconds, after which torch's watchdog ends the process.
    """
    with torch_nccl.torch_nccl(group) as backend, pytest.MonkeyPatch.context() as patch:
        comm = communicator(group)
        comm.timeout = 5.0
        collectives._wait(comm, "init", issue(comm, backend), comm.deadline())  # it has a communicator
        patch.setattr(collectives, "group_timeout", lambda group: own_s)
        comm.timeout = 0.4
        if rank == 0:
            with pytest.raises(spar.ExchangeTimeoutError, match="did not make this call in time"):
                collectives._wait(comm, "init", issue(comm, backend), comm.deadline())
            Path(folder, "raised").touch()
            time.sleep(3.0)  # torch's watchdog polls
        dist.barrier(group)


def check_announced(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A collective that no peer makes, and that spar does not await, does not end the process either."""
    with torch_nccl.torch_nccl(group) as backend:
        comm = communicator(group)
        comm.timeout = 5.0
        collectives._wait(comm, "init", issue(comm, backend), comm.deadline())
        comm.timeout = 0.3
        if rank == 0:
            issue(comm, backend)
            time.sleep(1.0)
        dist.barrier(group)


# ---- a communicator that torch creates in the first collective ----


def _late(rank: int, world: int, group: dist.ProcessGroup, kind: type[BaseException], limit: float) -> None:
    """Rank 0 issues the first collective, in which torch creates the communicator; the peers come later."""
    with torch_nccl.torch_nccl(group) as backend:
        comm = communicator(group)
        comm.timeout = limit if rank == 0 else 20.0
        begin = time.monotonic()
        if rank == 0:
            with pytest.raises(kind):
                issue(comm, backend)
            assert 0.2 < time.monotonic() - begin < 2.0
        else:
            time.sleep(2.5)
            issue(comm, backend)
        within(10, lambda: backend._comm.value is not None)  # the thread that was left alone has ended
        dist.barrier(group)


def check_late_peer(rank: int, world: int, group: dist.ProcessGroup) -> None:
    _late(rank, world, group, spar.ExchangeTimeoutError, 0.3)


def check_interrupt(rank: int, world: int, group: dist.ProcessGroup) -> None:
    if rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    _late(rank, world, group, KeyboardInterrupt, 20.0)


def check_failed_issue(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """torch's error in the first collective is the cause of spar's."""
    with torch_nccl.torch_nccl(group) as backend, pytest.MonkeyPatch.context() as patch:

        def fail(*args: object) -> None:
            raise dist.DistBackendError("Tensor found on device cuda:1")

        patch.setattr(backend, "allreduce", fail)
        comm = communicator(group)
        comm.timeout = 5.0
        with pytest.raises(spar.TransportError, match="the process group failed: Tensor found") as caught:
            issue(comm, backend)
        assert isinstance(caught.value.__cause__, dist.DistBackendError)
        dist.barrier(group)


# ---- errors of the communicator ----


def check_error(rank: int, world: int, group: dist.ProcessGroup, handling: str) -> None:
    """NCCL reports an error after a call: spar raises it, if torch's watchdog leaves the process."""
    with setting(TORCH_NCCL_ASYNC_ERROR_HANDLING=handling), torch_nccl.torch_nccl(group) as backend:
        comm = set_up(group)
        dist.barrier(group)
        with Stream() as stream:
            with stalled("remote"):
                enqueue(comm, "gather", (0,), torch.zeros(2))
                time.sleep(0.3)
            with pytest.raises((spar.TransportError, spar.GroupBrokenError), match="remote error"):
                enqueue(comm, "gather", (0,), torch.zeros(2))
            within(3, backend.has_ended)
            stream.synchronize()
        dist.barrier(group)
        comm.close()


# ---- kernels ----


def check_compilation(rank: int, world: int, group: dist.ProcessGroup, folder: str) -> None:
    """Python's threads run while a set-up compiles the kernels."""
    gaps, stop = [], threading.Event()

    def tick() -> None:
        before = time.monotonic()
        while not stop.wait(0.01):
            gaps.append(time.monotonic() - before)
            before = time.monotonic()

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.monotonic()
    with setting(STANDIN_NVRTC_MS=1500, XDG_CACHE_HOME=Path(folder, str(rank))):
        comm = set_up(group, torch.device("cuda", 2))  # a device that no other test prepares
    took = time.monotonic() - begin
    stop.set()
    thread.join()
    assert comm.transport("cuda").name == "nccl"
    assert took > 1.4, "the kernels were not compiled"
    assert max(gaps) < 1.0
    dist.barrier(group)
    comm.close()
