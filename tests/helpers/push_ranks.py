# SPDX-License-Identifier: Apache-2.0
"""The ranks' side of tests of the push transport over stand-in libraries: the checks of nccl_ranks.py and
nccl_faults.py, in groups whose ranks map each other's slots.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

import spar
from helpers import nccl_ranks
from helpers.nccl_ranks import (
    Cell,
    Stream,
    core_of,
    device_address,
    driver,
    enqueue,
    exchange_cells,
    expect_broken,
    set_up,
    within,
)
from spar._transports import push

push._synchronize = lambda device: driver("cuCtxSynchronize")  # also after a test

FLAGS = 4096  # bytes of the flags, behind a slot


class SharedSlot:
    """A slot in memory of the host, as device memory of the stand-in is, which the ranks' processes map."""

    tests: ClassVar[Counter[int]] = Counter()  # by the number of ranks
    meetings = 0  # of the newest test

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.file = os.memfd_create("slot")
        os.ftruncate(self.file, size + FLAGS)

    def __del__(self) -> None:
        os.close(self.file)

    def meet(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        """Exchange descriptors through the store, as torch does."""
        world, store = dist.get_world_size(group), dist.distributed_c10d._get_process_group_store(group)
        SharedSlot.meetings += 1
        key = f"slot {SharedSlot.tests[world]} {SharedSlot.meetings}"
        store.set(f"{key} {dist.get_rank(group)}", f"/proc/{os.getpid()}/fd/{self.file}")
        self.maps = []
        for rank in range(world):
            file = os.open(store.get(f"{key} {rank}"), os.O_RDWR)
            self.maps.append(mmap.mmap(file, self.size + FLAGS))
            os.close(file)
        starts = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in self.maps]
        bases = [device_address(start) for start in starts]
        return self.size, *bases, *[base + self.size for base in bases]


def over_push(
    rank: int, world: int, group: dist.ProcessGroup, slot: int, check: Callable[..., Any], *args: Any
) -> Any:
    """Run a check of the nccl transport, or of any other, in groups that push through slots of this size."""
    SharedSlot.tests[world] += 1
    SharedSlot.meetings = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(push, "Slot", SharedSlot)
        patch.setenv("SPAR_PUSH_SLOT", str(slot))
        patch.setattr(nccl_ranks, "CHOICE", "")
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


def check_fall_back(rank: int, world: int, group: dist.ProcessGroup, stage: str) -> None:
    """If one rank has no slot, or cannot map the others', all take the next transport, with the reason."""

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("no such memory\nand where")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(SharedSlot, stage, fail)
        patch.setattr(push, "_MEETING_S", 1.0)
        begin = time.monotonic()
        comm = set_up(group)
        assert time.monotonic() - begin < 5
    transport = comm.transport("cuda")
    assert transport.name == "nccl", transport
    reasons = ["rank 1: no such memory", "rank 0: the ranks did not map each other's memory in time"]
    assert dict(transport.rejected)["push"] in reasons[: 1 + (stage == "meet")], transport
    comm.close()


def check_late_zeros(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A rank waits for the zeros in its slot before it meets its peers, whose words they may overwrite."""
    events: list[str] = []

    class Slot(SharedSlot):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            events.append("zeros are under way")

        def meet(self, group: dist.ProcessGroup) -> tuple[int, ...]:
            events.append("meets the peers")
            return super().meet(group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(push, "Slot", Slot)
        patch.setattr(push, "_synchronize", lambda device: events.append(f"{device} is idle"))
        check_cells(rank, world, group, [])
    assert events[:3] == ["zeros are under way", "cuda:0 is idle", "meets the peers"]


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
        check_fall_back(rank, world, group, "__init__")
    finally:
        logger.removeHandler(handler)
    assert len(records) == (rank == 0), records
    text = "share this host, but the set-up of push failed, and nccl, which is slower, moves their tensors: "
    assert all(text + "rank 1: no such memory. Remove the cause" in record for record in records)


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
