# SPDX-License-Identifier: Apache-2.0
"""The ranks' side of a test of nccl exchanges in flight: torch's streams over the stand-in driver."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.nccl_ranks import DEVICE, Stream, driver, enqueue, set_up, wait
from spar._transports import cuda


class Event:
    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        driver("cuEventCreate", ctypes.pointer(self.handle), ctypes.c_uint(2))

    def record(self, stream: TorchStream) -> None:
        driver("cuEventRecord", self.handle, stream.handle)

    def query(self) -> bool:
        try:
            driver("cuEventQuery", self.handle)
        except AssertionError:
            return False
        return True


class TorchStream(Stream):
    """With what spar uses of torch.cuda.Stream."""

    @property
    def cuda_stream(self) -> int:
        return self.handle.value or 0

    def wait_event(self, event: Event) -> None:
        driver("cuStreamWaitEvent", self.handle, event.handle, ctypes.c_uint(0))

    def wait_stream(self, other: TorchStream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Streams:
    """torch.cuda, as far as spar's side streams use it."""

    Event = Event

    def __init__(self) -> None:
        self.current = TorchStream()

    def Stream(self, device: torch.device, priority: int) -> TorchStream:
        assert priority < 0
        return TorchStream()

    def current_stream(self, device: torch.device) -> TorchStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: TorchStream) -> Iterator[None]:
        before, self.current = self.current, stream
        with stream:
            yield
        self.current = before


class Kept:
    """A tensor that remembers on which streams it is used."""

    def __init__(self) -> None:
        self.streams: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


def check_side_stream(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """An exchange beside the current stream reads what that has written, which waits for it in join()."""
    comm = set_up(group, SPAR_STAGING_MAX=8192)
    streams, kept = Streams(), Kept()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_streams", streams)
        cuda._side_stream.cache_clear()
        caller = streams.current
        with caller:
            for turn in range(6):
                x = torch.full((30, 20), float(100 * turn + rank))
                first = enqueue(comm, "all_to_all", (1, 0, 30 * world), x)  # in the caller's stream
                tensors: Any = [kept]
                beside = cuda.Beside(DEVICE, tensors)
                with beside.entered():
                    second = enqueue(comm, "all_to_all", (1, 0, 30 * world), x + 50)
                assert streams.current is caller
                beside.join()
                caller.synchronize()
                assert beside.is_over(), "the caller's stream has waited for it"
                for got, more in ((first, 0.0), (second, 50.0)):
                    whole = [torch.full((30, 20), 100.0 * turn + p + more) for p in range(world)]
                    wanted = torch.cat([part.tensor_split(world, 1)[rank] for part in whole])
                    assert torch.equal(got, wanted), (turn, more)
        side = cuda._side_stream(DEVICE)
        assert kept.streams == [side] * 6 and side is not caller
    cuda._side_stream.cache_clear()
    wait(comm)
    comm.close()
