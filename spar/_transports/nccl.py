# SPDX-License-Identifier: Apache-2.0
"""The nccl transport: CUDA tensors on any number of hosts, in the current stream.

A call only gives work to the current stream. The output and the call's staging memory are allocated on that
stream, and the transport's own streams are joined to it before the call returns. So all three may be freed or
used as after any operation, and none needs `record_stream`. Small calls stage in memory that the group keeps.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from .. import _C
from .._control import collectives
from .._control.agreement import announce_failure, compare
from .._control.state import LOCAL, SHARED, GroupState
from ..errors import SparError
from .channel import Run
from .core import CoreChannel
from .cuda import (
    OutputPool,
    empty,
    enter_device,
    is_capturing,
    leave_device,
    on_device,
    refuse_open_group,
    stream_of,
    torch_shares_nccl,
)
from .dtypes import sums_of

_WATCH_INTERVAL = 0.1  # seconds
_GRACE = 10  # intervals: by then a call has left NCCL, unless only an abort ends its wait for a full queue


class Device:
    """This rank's device, and torch's communicator on it, if its backend has one that spar can use."""

    def __init__(self, device: torch.device, backend: Any = None) -> None:
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.place = torch.device("cuda", self.index)
        self._backend = backend
        self._has_property = hasattr(type(backend), "comm_ptr")  # torch 2.15

    def connect(self, group: GroupState, op: str, deadline: float) -> None:
        """Make a collective, in the first of which torch makes its communicator. Collective."""
        if self._backend is not None:
            collectives.first_collective(group, self.place, op, deadline)

    def native(self) -> int:
        """Return torch's current ncclComm_t of the thread's current device, or 0."""
        if self._backend is None:
            return 0
        try:
            pointer: int = self._backend.comm_ptr if self._has_property else self._backend._comm_ptr()
        except RuntimeError:  # aborted or destroyed
            return 0
        return pointer

    def abort(self) -> None:
        """End what hangs in torch's communicator."""
        if self._backend is not None:
            with on_device(self.place):  # NCCL makes a context on the thread's current device
                self._backend.abort()


def _nccl_backend(group: dist.ProcessGroup) -> Any:
    """The group's NCCL backend, if it exposes a communicator that spar can use (torch 2.8); else None."""
    if not torch_shares_nccl():
        return None
    try:
        backend: Any = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    while hasattr(backend, "wrapped_pg"):  # TORCH_DISTRIBUTED_DEBUG
        backend = backend.wrapped_pg
    exposes = any(hasattr(type(backend), name) for name in ("comm_ptr", "_comm_ptr"))
    return backend if exposes and hasattr(backend, "abort") else None


def has_communicator(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether torch has a communicator on the thread's current device already; makes none."""
    return Device(device, _nccl_backend(group)).native() != 0


class NcclChannel(CoreChannel):
    """A call is over when it is in the current stream; what fails later, the next call raises."""

    name = "nccl"
    sides = _C.SIDE_PULL
    core: _C.Comm
    enqueues = True

    def __init__(
        self, group: GroupState, device: torch.device, op: str, deadline: float, connects: bool = True
    ) -> None:
        """connects: whether torch makes its communicator, if it has none. If that fails, the group breaks."""
        assert group.peer_info is not None
        self.device = Device(device, _nccl_backend(group.process_group))
        if connects:
            group.progress = SHARED  # torch's first collective on the device
            self.device.connect(group, op, deadline)
            group.progress = LOCAL
        place = group.peer_info, group.rank, group.local_ranks, group.name
        native = self.device.native()
        super().__init__(group, _C.comm("nccl", *place, self.device.index, native))
        self.has_native = native != 0
        self._grace = _GRACE

    def watch(self) -> None:
        """Abort torch's communicator when a call does not end, as the core finds; it aborts its own."""
        if self.has_native:
            _watch(self)

    def is_to_be_aborted(self) -> bool:
        """Whether torch's communicator is to be aborted now: the core found that it must end.

        Not while a call is inside NCCL, which would use freed memory, until a grace period has passed. Called
        at each interval.
        """
        if self.core.broken is None:
            return False
        inside = self.core.inside
        self._grace -= inside
        return not inside or self._grace <= 0

    def abort_native(self) -> None:
        with contextlib.suppress(RuntimeError):  # torch was quicker
            self.device.abort()

    @property
    def pooled(self) -> OutputPool | None:
        """The pool of outputs that peers can write to."""
        return cast(OutputPool | None, self.core.pool)

    @pooled.setter
    def pooled(self, pool: OutputPool | None) -> None:
        self.core.pool = pool

    @functools.cached_property
    def exchange(self) -> Run:
        """The core's function for calls, which is all that runs, after the first access has bound it."""
        self.bind()
        return self._compare_and_enqueue if self.group.synchronous else self.core.enqueue

    def bind(self) -> None:
        """Give the core what its calls use of torch."""
        native = self._native if self.name == NcclChannel.name else None  # push uses no NCCL
        index, place = self.device.index, (enter_device, leave_device, stream_of, empty)
        self.core.bind_torch(index, *place, sums_of, self._refuse, native)

    def _native(self, op: str) -> int:
        """Return torch's communicator, or 0; raise where NCCL would defer what it is given."""
        refuse_open_group(op, self.device.place)
        return self.device.native()

    def _refuse(self, op: str, index: int) -> NoReturn:
        group = self.group
        raise SparError(
            f"{op} on rank {group.rank}: the tensor is on cuda:{index}; "
            f"group {group.name!r} was set up on cuda:{self.device.index}",
            **group.where(op),
        )

    def _compare_and_enqueue(
        self,
        core: _C.Exchange,
        inputs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
        forward: int,
        alike: bool,
        number: int,
        deadline: float,
    ) -> list[Any] | None:
        """Compare the call with those of the other ranks before it is issued; return when it is over.

        Nothing is compared inside a capture, whose calls have no end.
        """
        call = core, inputs, outs, forward, alike, number, deadline
        if (index := inputs[0].get_device()) != self.device.index:
            self._refuse(core.op, index)
        with on_device(self.device.place):
            if is_capturing(self.device.place):
                return self.core.enqueue(*call)
            planned = core.plan(inputs, self.sides, alike)
            if planned is None:
                return None
            compare(self.group, core, planned[0], forward, number, deadline)
            outputs = self.core.enqueue(*call)
            self.core.wait(deadline)
        return outputs

    def report(self, op: str, why: str, memory: bool, deadline: float) -> None:
        if self.group.synchronous:
            with on_device(self.device.place):
                announce_failure(self.group, op, why, memory, deadline)
        else:
            super().report(op, why, memory, deadline)

    def close(self) -> None:
        _watched.discard(self)
        super().close()


# ---- what breaks behind the calls' back ----

_watched: weakref.WeakSet[NcclChannel] = weakref.WeakSet()
_lock = threading.Lock()


def _watch(channel: NcclChannel) -> None:
    with _lock:
        if not _watched:
            threading.Thread(target=_keep_watch, name="spar watch", daemon=True).start()
        _watched.add(channel)


def _keep_watch() -> None:
    while _poll():
        time.sleep(_WATCH_INTERVAL)


def _poll() -> bool:
    """Abort what hangs; return whether there is more to watch.

    Each abort has a thread: it waits for kernels, which may be behind those of another communicator that is
    to be aborted, and for the end of all graphs that have captured calls.
    """
    with _lock:
        for channel in list(_watched):
            if channel.is_to_be_aborted():
                _watched.discard(channel)
                threading.Thread(target=channel.abort_native, name="spar abort", daemon=True).start()
        return bool(_watched)
