# SPDX-License-Identifier: Apache-2.0
"""The nccl transport over stand-in libraries: aborts that wait for graphs, kernels and other aborts."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import spar
from helpers import torch_nccl
from helpers.nccl_lifetime import setting
from helpers.nccl_ranks import Stream, core_of, driver, enqueue, set_up, stalled, wait, within
from spar._group.group import Group


def communicators(group: dist.ProcessGroup, native: bool) -> contextlib.AbstractContextManager[object]:
    """The communicator of the group if it is set up inside: torch's, or spar's own."""
    return torch_nccl.torch_nccl(group) if native else contextlib.nullcontext()


@contextlib.contextmanager
def second(group: dist.ProcessGroup, native: bool) -> Iterator[dist.ProcessGroup]:
    """Another group of all ranks, with its communicators."""
    other = dist.new_group(list(range(group.size())))
    with communicators(other, native):
        yield other
    dist.barrier(other)
    dist.destroy_process_group(other)


@contextlib.contextmanager
def captured(comm: Group, stream: Stream, x: torch.Tensor) -> Iterator[ctypes.c_void_p]:
    """A graph of one call in many steps, after one call that was not captured."""
    graph, args = ctypes.c_void_p(), (1, 0, len(x) * comm.world)
    with stream:
        enqueue(comm, "all_to_all", args, x)
        stream.synchronize()
        driver("cuStreamBeginCapture", stream.handle, ctypes.c_int(0))
        enqueue(comm, "all_to_all", args, x)
        driver("cuStreamEndCapture", stream.handle, ctypes.pointer(graph))
    yield graph
    driver("cuGraphDestroy", graph)


def run_within(seconds: float, stream: Stream) -> None:
    """Check that the stream's work ends."""
    thread = threading.Thread(target=stream.synchronize, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "the stream does not continue"


def hang(comm: Group) -> None:
    """Enqueue a call that does not end."""
    with stalled():
        enqueue(comm, "gather", (0,), torch.zeros(2))


def check_replay_of_broken(rank: int, world: int, group: dist.ProcessGroup, native: bool) -> None:
    """The group of a graph breaks: replays return, and the communicator stays until the graph's end."""
    with communicators(group, native):
        comm = set_up(group, SPAR_STAGING_MAX=4096 * (world - 1))
        stream = Stream()
        with captured(comm, stream, torch.zeros(40, 12)) as graph:
            comm.timeout = 0.3
            with stream:
                hang(comm)
            within(3, lambda: core_of(comm).broken is not None)
            time.sleep(0.3)  # the abort has begun
            for _ in range(2):
                driver("cuGraphLaunch", graph, stream.handle)
            run_within(3, stream)
            dist.barrier(group)
            comm.close()
            time.sleep(0.3)
            driver("cuGraphLaunch", graph, stream.handle)
            run_within(3, stream)
        time.sleep(0.1)
        dist.barrier(group)


def check_late_launch(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A call launches after the revocation that it made necessary: no abort comes before its kernel's end."""
    live = ctypes.CDLL("libcuda.so.1").standin_live
    with Stream() as stream:
        before = live()
        comm = set_up(group)
        comm.timeout = 0.15
        with setting(STANDIN_NCCL_SLOW_MS=1600 + 600 * rank), pytest.raises(spar.SparError):
            enqueue(comm, "gather", (0,), torch.zeros(2))
            wait(comm)
        run_within(5, stream)
        dist.barrier(group)
        comm.close()
        within(3, lambda: live() <= before)
    dist.barrier(group)


def check_two_broken(rank: int, world: int, group: dist.ProcessGroup, native: bool, first: float) -> None:
    """A call of one group is in the stream behind another's, which hangs: the stream continues."""
    with communicators(group, native), Stream() as stream:
        behind = set_up(group)
        with second(group, native) as other:
            hung = set_up(other)
            behind.timeout, hung.timeout = first, 0.6
            hang(hung)
            with contextlib.suppress(spar.SparError):  # a peer was earlier
                enqueue(behind, "gather", (0,), torch.zeros(2))
            run_within(4, stream)
            within(2, lambda: None not in (core_of(behind).broken, core_of(hung).broken))
            dist.barrier(group)
            behind.close()
            hung.close()


def check_set_up_beside_abort(rank: int, world: int, group: dist.ProcessGroup, native: bool) -> None:
    """An abort waits for a graph's end: other groups are set up, work and break meanwhile."""
    with communicators(group, native):
        comm = set_up(group, SPAR_STAGING_MAX=4096 * (world - 1))
        stream = Stream()
        with captured(comm, stream, torch.zeros(40, 12)):
            comm.timeout = 0.3
            with stream:
                hang(comm)
            within(3, lambda: core_of(comm).broken is not None)
            time.sleep(0.3)
            with second(group, native) as another, stream:
                begin = time.monotonic()
                other = set_up(another)
                got = enqueue(other, "gather", (0,), torch.full((2,), float(rank)))
                wait(other)
                assert torch.equal(got, torch.arange(float(world)).repeat_interleave(2))
                other.timeout = 0.3
                hang(other)
                run_within(3, stream)
                assert time.monotonic() - begin < 5
                dist.barrier(group)
                other.close()
        dist.barrier(group)
        comm.close()


def check_abort_device(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """torch's communicator is aborted with its own device current: NCCL makes a context there."""
    found = []
    with torch_nccl.torch_nccl(group, rank) as backend, pytest.MonkeyPatch.context() as patch:
        comm, abort = set_up(group, torch.device("cuda", rank)), backend.abort

        def note_device() -> None:
            found.append(torch_nccl._thread.index)
            abort()

        patch.setattr(backend, "abort", note_device)
        comm.timeout = 0.3
        with Stream() as stream:
            hang(comm)
            run_within(3, stream)
        within(2, lambda: found == [rank])
        dist.barrier(group)
        comm.close()


def check_two_captures(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A second capture beside one that has calls of the group is refused; both and the group live."""
    comm = set_up(group, SPAR_STAGING_MAX=4096 * (world - 1))
    x, args = torch.arange(480.0).view(40, 12) + 1000 * rank, (1, 0, 40 * world)
    streams, graphs = [Stream(), Stream()], [ctypes.c_void_p(), ctypes.c_void_p()]
    for stream in streams:
        driver("cuStreamBeginCapture", stream.handle, ctypes.c_int(0))
    with streams[0]:
        enqueue(comm, "all_to_all", args, x)
        got = enqueue(comm, "all_to_all", args, x)
    with streams[1], pytest.raises(spar.TransportError, match="another capture has calls of this group"):
        enqueue(comm, "all_to_all", args, x)
    for stream, graph in zip(streams, graphs, strict=True):
        driver("cuStreamEndCapture", stream.handle, ctypes.pointer(graph))
    driver("cuGraphLaunch", graphs[0], streams[0].handle)
    streams[0].synchronize()
    wanted = [torch.arange(480.0).view(40, 12) + 1000 * p for p in range(world)]
    assert torch.equal(got, torch.cat([w.tensor_split(world, 1)[rank] for w in wanted]))
    for graph in graphs:
        driver("cuGraphDestroy", graph)
    dist.barrier(group)
    comm.close()
