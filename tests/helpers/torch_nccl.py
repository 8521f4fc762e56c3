# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the part of torch's NCCL backends that spar uses, over the stand-in libnccl.

`ProcessGroupNCCL` is "nccl" in torch 2.8 to 2.14, and "nccl-legacy" since. `ProcessGroupNCCL2` is "nccl"
since torch 2.15, and in 2.14 with TORCH_DIST_USE_NCCL2=1. As in torch:

| | ProcessGroupNCCL | ProcessGroupNCCL2 |
|---|---|---|
| creates its communicator | in its first collective | in its constructor |
| `_comm_ptr()` | of the thread's current device, 0 if that has none | whatever the current device |
| `comm_ptr`, the same | not before torch 2.15, and not here | a property |
| after an abort | raises | 0 |
| its watchdog polls the communicator's error | while it has collectives under way | always |

The watchdog ends the process on such an error, and if a collective of the backend's own takes longer than its
timeout, unless TORCH_NCCL_ASYNC_ERROR_HANDLING is 0. An abort joins the watchdog before it aborts the
communicator.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

from spar._control import collectives, connecting
from spar._control.state import GroupState
from spar._transports import cuda, nccl

INTERVAL_S = 0.1  # of a watchdog's polls; in torch 0.1 of the legacy class, 1 of the other
FAILURES = "STANDIN_NCCL_FAIL"
SUCCESS, IN_PROGRESS = 0, 7  # ncclResult_t


class Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class _Thread(threading.local):
    index = 0  # the thread's current device


_thread = _Thread()


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make a device the thread's current one, as torch.cuda.device does."""
    before = _thread.index
    _thread.index = before if device.index is None else device.index
    yield
    _thread.index = before


def enter_device(index: int) -> int:
    """Make a device the thread's current one; return the one before."""
    before, _thread.index = _thread.index, index
    return before


def _place_of_caller(device: torch.device) -> Callable[[], None]:
    """Stand in for the function of torch, which needs CUDA."""
    index = _thread.index
    return lambda: setattr(_thread, "index", index)


class Work:
    """A collective: over when the stream has run it."""

    def __init__(self, timeout: float) -> None:
        self.deadline = time.monotonic() + timeout
        self._over = False
        self.host_function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._end)

    def _end(self, unused: int) -> None:
        self._over = True

    def is_completed(self) -> bool:
        return self._over

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """As in torch: only the current stream waits."""
        return True


class ProcessGroupNCCL:
    """torch's older class, with communicators by device; here of one device."""

    is_lazy = True
    always_polls = False

    def __init__(self, group: dist.ProcessGroup, index: int, timeout: float) -> None:
        """Collective. index: of the device; timeout: in seconds, of each collective without its own."""
        self._group, self.index, self._timeout = group, index, timeout
        self._library = ctypes.CDLL("libnccl.so.2")
        self._comm = ctypes.c_void_p()
        self._ended = False
        self._works: list[Work] = []
        self._buffers = ctypes.create_string_buffer(1), ctypes.create_string_buffer(group.size())
        self._stop = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="stand-in watchdog", daemon=True)
        if not self.is_lazy:
            self._create()
        self._watchdog.start()

    def _create(self) -> None:
        own = Id()
        self._library.ncclGetUniqueId(ctypes.byref(own))
        ids: list[Any] = [bytes(own)]
        dist.broadcast_object_list(ids, group_src=0, group=self._group)
        failures = os.environ.pop(FAILURES, None)  # these are for a communicator of spar's own
        init = self._library.ncclCommInitRank
        init.argtypes = (ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int)
        init(ctypes.byref(self._comm), self._group.size(), Id.from_buffer_copy(ids[0]), self._group.rank())
        if failures is not None:
            os.environ[FAILURES] = failures
        self._await_ready()

    def _error(self) -> int:
        error = ctypes.c_uint()
        self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(error))
        return error.value

    def _await_ready(self) -> None:
        """Wait for the end of a call that returned ncclInProgress."""
        while self._error() == IN_PROGRESS:
            time.sleep(0.001)

    def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions) -> Work:
        """Exchange a byte in the legacy stream, whatever the tensors."""
        if not self._comm:
            self._create()
        own = options.timeout.total_seconds()
        work = Work(own if own >= 0 else self._timeout)
        self._works.append(work)
        sent, received = self._buffers
        count, dtype = ctypes.c_size_t(1), ctypes.c_uint(1)
        self._library.ncclAllGather(sent, received, count, dtype, self._comm, ctypes.c_void_p())
        self._await_ready()
        ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(ctypes.c_void_p(), work.host_function, None)
        return work

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            running = [work for work in list(self._works) if not work.is_completed()]
            why = ""
            if any(time.monotonic() > work.deadline for work in running):
                why = "a collective ran into its timeout"
            polls = running or self.always_polls
            if polls and self._comm and self._error() not in (SUCCESS, IN_PROGRESS):
                why = "the communicator has an error"
            if why and os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0":
                print(f"stand-in: torch's watchdog ends the process: {why}", file=sys.stderr)
                os.abort()

    def _comm_ptr(self) -> int:
        if _thread.index != self.index:
            return 0
        if self._ended:
            raise dist.DistBackendError("NCCL communicator was aborted")
        return self._comm.value or 0

    def abort(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._stop.set()
        self._watchdog.join()
        if self._comm:
            self._library.ncclCommAbort(self._comm)

    def has_ended(self) -> bool:
        return self._ended


class ProcessGroupNCCL2(ProcessGroupNCCL):
    """The newer class, with one communicator."""

    is_lazy = False
    always_polls = True

    @property
    def comm_ptr(self) -> int:
        return 0 if self._ended else self._comm.value or 0

    def _comm_ptr(self) -> int:
        return self.comm_ptr


def nccl_class() -> type[ProcessGroupNCCL]:
    """The class that torch makes of "nccl": TORCH_DIST_USE_NCCL2 selects it."""
    return ProcessGroupNCCL2 if os.environ.get("TORCH_DIST_USE_NCCL2") == "1" else ProcessGroupNCCL


_backends: dict[dist.ProcessGroup, ProcessGroupNCCL] = {}


def _first_collective(group: GroupState, device: torch.device, op: str, deadline: float) -> None:
    """Issue and await a collective as spar's does, whose tensors are on a device."""
    start: Any = _backends[group.process_group].allreduce
    buffers: Any = (SimpleNamespace(device=device),)
    with on_device(device):
        collective = collectives._issue(group, op, deadline, buffers, AllreduceOptions(), start, buffers)
        collectives._wait(group, op, collective, deadline)


@contextlib.contextmanager
def torch_nccl(
    group: dist.ProcessGroup, index: int = 0, timeout: float = 600.0
) -> Iterator[ProcessGroupNCCL]:
    """Let the group have torch's NCCL backend, on device `index`. Several groups may, one inside another."""
    backend = nccl_class()(group, index, timeout)
    find = dist.ProcessGroup._get_backend

    def _get_backend(self: dist.ProcessGroup, device: torch.device) -> Any:
        return _backends[self] if device.type == "cuda" and self in _backends else find(self, device)

    _backends[group] = backend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "_get_backend", _get_backend)
        patch.setattr(nccl, "torch_shares_nccl", lambda: True)
        patch.setattr(collectives, "first_collective", _first_collective)
        patch.setattr(connecting, "_place_of_caller", _place_of_caller)
        for module in (cuda, nccl):
            patch.setattr(module, "on_device", on_device)
        for name in ("enter_device", "leave_device"):
            patch.setattr(nccl, name, enter_device)
        patch.setenv(FAILURES, "CommInitRank:1")  # no other is made
        try:
            yield backend
        finally:
            backend.abort()
            del _backends[group]
            connecting._connected.pop(group, None)  # the next test's backend is another
            collectives._unfinished[:] = [c for c in collectives._unfinished if c.process_group is not group]
