"""CUDA tensors: what the nccl transport needs of torch: streams, its communicator, and where libraries lie.

A call only gives work to the current stream. The output is allocated on that stream, and the transport's own
streams are joined to it before the call returns: so input and output may be freed or used as after any
operation, and neither needs `record_stream`; the staging memory is the transport's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import _C, fallback, wire
from .agreement import OVER
from .errors import SparError
from .fallback import SCALE_TYPES, apply_scale

if TYPE_CHECKING:
    from .communicator import Communicator

# library: its names to the loader, and the packages that have it in their folder lib
_LIBRARIES = {
    "libnccl": (("libnccl.so.2",), ("nvidia.nccl",)),
    "libnvrtc": (("libnvrtc.so.13", "libnvrtc.so.12"), ("nvidia.cu13", "nvidia.cuda_nvrtc")),
}
_LOOK = 0.1  # seconds


@functools.cache
def find_libraries() -> None:
    """Tells the core where libraries lie that torch's import has not brought in."""
    if not _cuda:  # a torch without CUDA has no tensors for them
        return
    for library, (names, packages) in _LIBRARIES.items():
        if not any(map(_is_mapped, names)):
            _C.library_found(library, _in_packages(names, packages) or _by_pathfinder(library))


def _is_mapped(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def _in_packages(names: tuple[str, ...], packages: tuple[str, ...]) -> str | None:
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, OSError):  # no such package, or no descriptor is left to read one
            continue
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for name in names:
                if (path := Path(folder, "lib", name)).exists():
                    return str(path)
    return None


def _by_pathfinder(library: str) -> str | None:
    """cuda-pathfinder knows more places (conda, CUDA_HOME, ...). torch's newer CUDA builds bring it in."""
    if torch.version.cuda is None:  # it would look in vain, at length
        return None
    with contextlib.suppress(Exception):
        pathfinder: Any = importlib.import_module("cuda.pathfinder")
        path: str = pathfinder.load_nvidia_dynamic_lib(library.removeprefix("lib")).abs_path
        return path
    return None


class Device:
    """This rank's device in a group, and torch's communicator on it, if it has one."""

    def __init__(self, comm: Communicator, device: torch.device, op: str, deadline: float) -> None:
        """Collective: torch makes its communicator in a group's first collective, so there is one here."""
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self._backend = _nccl_backend(comm.group)
        if self._backend is not None:
            wire.meet(comm, torch.device("cuda", self.index), op, deadline)

    def native(self) -> int:
        """torch's ncclComm_t as it is now: aborted or destroyed, it is another one, or 0."""
        if self._backend is None:
            return 0
        pointer: int = self._backend._comm_ptr()
        return pointer

    def abort(self) -> None:
        """Ends what hangs in torch's communicator."""
        if self._backend is not None:
            self._backend.abort()


def _nccl_backend(group: dist.ProcessGroup) -> Any:
    """The group's ProcessGroupNCCL, where it tells its communicator (torch 2.8); else None."""
    try:
        backend: Any = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    while hasattr(backend, "wrapped_pg"):  # TORCH_DISTRIBUTED_DEBUG
        backend = backend.wrapped_pg
    return backend if hasattr(backend, "_comm_ptr") and hasattr(backend, "abort") else None


# without CUDA torch has none of them, or a dummy
_cuda = torch.cuda._is_compiled()
_stream_of: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if _cuda else lambda index: 0
_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing if _cuda else lambda: False


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream's work goes into a CUDA graph."""
    return device.type == "cuda" and _capturing()


def refuse_capture(op: str, device: torch.device, why: str) -> None:
    """An error, before anything is captured, where a CUDA graph is being captured."""
    if is_capturing(device):
        raise SparError(f"{op} cannot be captured into a CUDA graph: {why}")


def check_place(comm: Communicator, device: Device, input_: torch.Tensor, op: str) -> None:
    """The group's memory and communicator are on one device."""
    if input_.get_device() != device.index:
        raise SparError(
            f"{op} on rank {comm.rank}: the tensor is on cuda:{input_.get_device()}; "
            f"group {comm.name!r} was set up on cuda:{device.index}",
            **comm.where(op),
        )


def exchange(comm: Communicator, core: _C.Comm, device: Device, call: fallback.Call) -> None:
    """One exchange of CUDA tensors: returns when it is in the current stream."""
    check = comm.synchronous and not is_capturing(call.input.device)
    if check:
        fallback.compare(comm, call)
    kind = SCALE_TYPES.get(call.input.dtype, 0)
    addresses = call.input.data_ptr(), call.output.data_ptr(), _stream_of(device.index), device.native()
    comm.progress = OVER  # C reports whatever fails in it
    core.run(call.plan, *addresses, kind, call.divide, call.factor, call.text, call.deadline)
    if kind == 0:
        apply_scale(call.output, call.factor, call.divide)
    if check:
        core.wait(call.deadline)


# ---- what breaks behind the calls' back ----

_watched: weakref.WeakSet[Communicator] = weakref.WeakSet()
_lock = threading.Lock()


def watch(comm: Communicator, device: Device) -> None:
    """Aborts torch's communicator when a call does not end, as the core finds; it aborts its own."""
    if device.native() == 0:
        return
    with _lock:
        if not _watched:
            threading.Thread(target=_keep_watch, name="spar watch", daemon=True).start()
        _watched.add(comm)


def _keep_watch() -> None:
    while True:
        time.sleep(_LOOK)
        with _lock:
            for comm in list(_watched):
                done = True
                with contextlib.suppress(RuntimeError):  # torch was quicker
                    done = comm.abort_if_broken()
                if done:
                    _watched.discard(comm)
            if not _watched:
                return
