# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the part of torch's ProcessGroupNCCL that spar uses, over the stand-in libnccl.

As in torch: `_comm_ptr` is keyed by the thread's current device, is 0 if that has no communicator, and raises
after an abort or a destroy. A thread's current device is 0 until it sets another.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spar._transports import cuda, nccl


class Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class ProcessGroupNCCL:
    def __init__(self, group: dist.ProcessGroup, index: int) -> None:
        """Collective: creates the communicator of device `index`."""
        self._library = ctypes.CDLL("libnccl.so.2")
        self._ended = False
        self._comm = ctypes.c_void_p()
        self._thread = threading.local()
        own = Id()
        self._library.ncclGetUniqueId(ctypes.byref(own))
        ids: list[Any] = [bytes(own)]
        dist.broadcast_object_list(ids, group_src=0, group=group)
        self._library.ncclCommInitRank.argtypes = (ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int)
        self._library.ncclCommInitRank(
            ctypes.byref(self._comm), group.size(), Id.from_buffer_copy(ids[0]), group.rank()
        )
        self.index = index

    def _current(self) -> int:
        return getattr(self._thread, "index", 0)

    @contextlib.contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        before = self._current()
        self._thread.index = before if device.index is None else device.index
        yield
        self._thread.index = before

    def _comm_ptr(self) -> int:
        if self._current() != self.index:
            return 0
        if self._ended:
            raise dist.DistBackendError("NCCL communicator was aborted")
        return self._comm.value or 0

    def abort(self) -> None:
        if not self._ended:
            self._ended = True
            self._library.ncclCommAbort(self._comm)

    def has_ended(self) -> bool:
        return self._ended


@contextlib.contextmanager
def torch_nccl(group: dist.ProcessGroup, index: int = 0) -> Iterator[ProcessGroupNCCL]:
    """Let the group have torch's communicator, on device `index`."""
    backend = ProcessGroupNCCL(group, index)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "_nccl_backend", lambda group: backend)
        patch.setattr(nccl.collectives, "first_collective", lambda *args: None)
        for module in (cuda, nccl):
            patch.setattr(module, "on_device", backend.on_device)
        patch.setenv("STANDIN_NCCL_FAIL", "CommInitRank:1")  # no other is made
        yield backend
    backend.abort()
