# SPDX-License-Identifier: Apache-2.0
"""The push transport: CUDA tensors of ranks of one host, which write to memory of each other's GPUs.

Each rank has a slot that all ranks map. The core is given the addresses, whoever mapped them. `Slot` does so
by torch's symmetric memory, which needs a store and sockets, and no communicator. Outputs that peers write to
are of a pool of torch's allocator, whose segments lie in the slot.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from .._control.state import GroupState
from .core import CoreChannel
from .cuda import on_device, pooled_empty
from .nccl import Device, NcclChannel

_synchronize = torch.cuda.synchronize
_MEETING_S = 60.0  # the longest that ranks wait for each other in torch, whose own limit may be hours


class Slot:
    """This rank's slot, and the mappings of all ranks' slots. What is mapped stays until it is dropped."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate the slot; raises RuntimeError where torch cannot."""
        try:
            self._torch: Any = importlib.import_module("torch.distributed._symmetric_memory")
            allocate = self._torch._SymmetricMemory.empty_strided_p2p
        except (ImportError, AttributeError):
            raise RuntimeError("this torch has no symmetric memory") from None
        self._memory = allocate((size,), (1,), torch.uint8, device)  # not of a pool: its signals are 0

    def meet(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        """Map the peers' slots; return the size, the slots' addresses, and their signals'. Collective."""
        self._handle = self._torch.rendezvous(self._memory, group)
        return self._memory.numel(), *self._handle.buffer_ptrs, *self._handle.signal_pad_ptrs


class PushChannel(NcclChannel):
    """Calls are given to the current stream, as NCCL's are."""

    name = "push"

    def __init__(self, group: GroupState, device: torch.device, op: str, deadline: float) -> None:
        assert group.peer_info is not None
        self.device = Device(device)
        self.inside = self.has_native = False
        self._slot: Slot | None = None
        self._place = 0, 0  # the slot's address, and its bytes
        why = None
        _drop_unused()
        try:
            self._slot = Slot(_C.env("push_slot"), self.device.place)
            # torch zeroes it in a stream of its own: late zeros would overwrite what peers have written.
            _synchronize(self.device.place)
        except RuntimeError as error:
            why = _first_line(error)
        place = group.peer_info, group.rank, group.local_ranks, group.name
        CoreChannel.__init__(self, group, _C.comm("push", *place, self.device.index, 0, why))

    def meet(self, deadline: float) -> tuple[Any, ...]:
        """Map the slots on a thread: if a rank fails meanwhile, torch lets the others wait."""
        result: list[Any] = []
        group, slot = self.group.process_group, self._slot
        assert slot is not None

        def work() -> None:
            try:
                with on_device(self.device.place):
                    result.append(slot.meet(group))
            except Exception as error:
                result.append(_first_line(error))

        thread = threading.Thread(target=work, name="spar slots", daemon=True)
        thread.start()
        thread.join(min(_MEETING_S, (deadline - time.monotonic()) / 2))
        found = result[0] if result else "the ranks did not map each other's memory in time"
        if not isinstance(found, str):
            self._place = found[1 + self.group.rank], found[0]
        return (found,)

    def watch(self) -> None:
        self.pooled = pooled_empty(self.device.place)

    def close(self) -> None:
        """Unmap the slots when the device has ended its work; keep what a graph may still write to."""
        held: list[Any] = [self.pooled, self._slot]
        self.pooled = self._slot = None
        if self.core.captured:
            _kept.extend(held)
        elif held[1] is not None:
            what = held, self.device.place, self._place
            threading.Thread(target=_drop, args=what, daemon=True).start()
        super().close()


_kept: list[Any] = []  # for good
_used: list[tuple[Slot, tuple[int, int]]] = []  # slots of closed groups, in which outputs may lie
_lock = threading.Lock()


def _drop(held: list[Any], device: torch.device, place: tuple[int, int]) -> None:
    with contextlib.suppress(RuntimeError):  # the device is gone
        _synchronize(device)  # without the GIL; torch waits, too, but with it
    slot = held.pop()
    held.clear()  # the pool returns the segments that have no outputs
    with _lock:
        _used.append((slot, place))
    del slot
    _drop_unused()


def _drop_unused() -> None:
    with _lock:
        _used[:] = [(slot, place) for slot, place in _used if _C.outputs_in_use(*place)]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
