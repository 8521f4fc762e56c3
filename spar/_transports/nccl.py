"""The nccl transport: CUDA tensors on any number of hosts, in the current stream.

A call only gives work to the current stream. The output and the call's staging memory are allocated on that
stream, and the transport's own streams are joined to it before the call returns. So all three may be freed or
used as after any operation, and none needs `record_stream`. Small calls stage in memory that the group keeps.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from .._group import pg_wait
from .._group.agreement import announce_failure
from .._group.member import LOCAL, OVER, SHARED, Member
from ..errors import SparError
from .channel import Operation
from .core import CoreChannel
from .cuda import empty, is_capturing, is_current, on_device, refuse_open_group, stream_of, torch_shares_nccl
from .dtypes import ITEM_TYPES, call_text
from .planned import PlannedExchange, finish, sums_of

_WATCH_INTERVAL = 0.1  # seconds
_GRACE = 10  # intervals: by then a call has left NCCL, unless only an abort ends its wait for a full queue


class Device:
    """This rank's device in a group, and torch's communicator on it, if it has one."""

    def __init__(self, member: Member, device: torch.device, op: str, deadline: float) -> None:
        """Collective: torch makes its communicator in a group's first collective, so there is one here."""
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.place = torch.device("cuda", self.index)
        self._backend = _nccl_backend(member.group)
        if self._backend is not None:
            pg_wait.first_collective(member, self.place, op, deadline)

    def native(self) -> int:
        """Return torch's current ncclComm_t of the thread's current device, or 0."""
        if self._backend is None:
            return 0
        try:
            pointer: int = self._backend._comm_ptr()
        except RuntimeError:  # aborted or destroyed
            return 0
        return pointer

    def abort(self) -> None:
        """End what hangs in torch's communicator."""
        if self._backend is not None:
            self._backend.abort()


def _nccl_backend(group: dist.ProcessGroup) -> Any:
    """The group's ProcessGroupNCCL, if it exposes a communicator that spar can use (torch 2.8); else None."""
    if not torch_shares_nccl():
        return None
    try:
        backend: Any = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    while hasattr(backend, "wrapped_pg"):  # TORCH_DISTRIBUTED_DEBUG
        backend = backend.wrapped_pg
    return backend if hasattr(backend, "_comm_ptr") and hasattr(backend, "abort") else None


class NcclChannel(CoreChannel):
    """A call is over when it is in the current stream; what fails later, the next call raises."""

    enqueues = True

    def __init__(self, member: Member, device: torch.device, op: str, deadline: float) -> None:
        assert member.facts is not None
        member.progress = SHARED  # torch's first collective on the device
        self.device = Device(member, device, op, deadline)
        member.progress = LOCAL
        place = member.facts, member.rank, member.local_ranks, member.name
        native = self.device.native()
        super().__init__(_C.comm("nccl", *place, self.device.index, native))
        self.has_native = native != 0
        self.inside = False  # of a call
        self._grace = _GRACE

    def watch(self, member: Member) -> None:
        """Abort torch's communicator when a call does not end, as the core finds; it aborts its own."""
        if self.has_native:
            _watch(self)

    def abort_native(self) -> bool:
        """Abort torch's communicator, unless a call is inside NCCL, where it would use freed memory.

        After a grace period abort in any case. Called at each interval; return whether it aborted.
        """
        self._grace -= self.inside
        if self.inside and self._grace > 0:
            return False
        with contextlib.suppress(RuntimeError):  # torch was quicker
            self.device.abort()
        return True

    def exchange(
        self,
        member: Member,
        operation: Operation,
        inputs: Sequence[torch.Tensor],
        deadline: float,
        outs: list[torch.Tensor] | None = None,
        forward: int = 0,
    ) -> list[torch.Tensor]:
        index = inputs[0].get_device()
        if index != self.device.index:
            raise SparError(
                f"{operation.op} on rank {member.rank}: the tensor is on cuda:{index}; "
                f"group {member.name!r} was set up on cuda:{self.device.index}",
                **member.where(operation.op),
            )
        try:
            if is_current(index):
                return self._enqueue(member, operation, inputs, deadline, outs, forward)
            with on_device(self.device.place):
                return self._enqueue(member, operation, inputs, deadline, outs, forward)
        except SparError as error:
            raise error if error.op is not None else self.explain(member, operation.op, error) from None

    def _enqueue(
        self,
        member: Member,
        operation: Operation,
        inputs: Sequence[torch.Tensor],
        deadline: float,
        outs: list[torch.Tensor] | None,
        forward: int,
    ) -> list[torch.Tensor]:
        """Return when the exchange is in the current stream."""
        op, args, factor, divide, gradient, sums, note = operation
        device, core, dtype = self.device, self.core, inputs[0].dtype
        size, kind, _, _, _ = ITEM_TYPES[dtype]
        targets = None if sums else outs
        check = member.synchronous and not is_capturing(device.place)
        if check:
            call = PlannedExchange.of(member, operation, inputs, "cuda", deadline, outs, forward)
            call.compare(member)
            targets = call.outputs
        refuse_open_group(op, device.place)
        text = call_text(dtype, "cuda", factor, divide, gradient, note)
        self.inside = True  # before torch's communicator is asked for: it is not aborted meanwhile
        try:
            stream, native = stream_of(device.index), device.native()
            member.progress = OVER  # the core reports whatever fails in it
            outputs = core.enqueue(
                op,
                size,
                inputs,
                args,
                kind,
                divide,
                factor,
                text,
                forward,
                deadline,
                stream,
                native,
                dtype,
                empty,
                targets,
            )
        except BaseException:
            if member.progress == OVER and not core.begun:  # the peers know nothing of the call
                member.progress = LOCAL
            raise
        finally:
            self.inside = False
        if kind == 0:
            finish(outputs, kind, divide, factor)
        if check:
            core.wait(deadline)
        return sums_of(outputs, outs) if sums else outputs

    def report(self, member: Member, op: str, why: str, memory: bool, deadline: float) -> None:
        if member.synchronous:
            with on_device(self.device.place):
                announce_failure(member, op, why, memory, deadline)
        else:
            super().report(member, op, why, memory, deadline)

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
    while True:
        time.sleep(_WATCH_INTERVAL)
        with _lock:
            for channel in list(_watched):
                if channel.core.broken is not None and channel.abort_native():
                    _watched.discard(channel)
            if not _watched:
                return
