# SPDX-License-Identifier: Apache-2.0
"""What spar needs of torch's CUDA: device, stream, captures, NCCL groups, and where CUDA's libraries lie."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from .. import _C
from ..errors import SparError

# without CUDA torch has none of them, or a dummy
_cuda = torch.cuda._is_compiled()
stream_of: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if _cuda else lambda index: 0
# Make a device the thread's current one, and return the one before; restore that. `on_device` takes longer.
enter_device: Callable[[int], int] = torch._C._cuda_exchangeDevice if _cuda else operator.index
leave_device: Callable[[int], int] = torch._C._cuda_maybeExchangeDevice if _cuda else operator.index
_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing if _cuda else lambda: False


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the thread's current one."""
    return torch.cuda.device(device) if _cuda and device.type == "cuda" else contextlib.nullcontext()


Empty: TypeAlias = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


def _empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# Allocates a tensor of a shape, strides and dtype on the thread's current device, in the order of the current
# stream; inside a capture, in the graph's own memory. torch's compiled code uses the same: it takes half the
# time of torch.empty.
empty: Empty = _empty_strided
if _cuda:
    empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", empty)


class OutputPool(NamedTuple):
    """A pool of torch's allocator whose segments the core allocates (csrc/devices/cuda/outputs.h).

    What `torch.cuda.use_mem_pool` does, bound once: as a context manager it takes longer than the allocation.
    One thread at a time may be between `begin` and `release`: torch raises in others.

    Attributes:
        begin: let this thread's allocations on the device come from the pool.
        end: let them come from elsewhere again.
        release: balance `begin`, which counts a user of the pool.
        memory: torch's pool, which lives as long.
    """

    begin: Callable[[], object]
    end: Callable[[], object]
    release: Callable[[], object]
    memory: Any


def pooled_empty(device: torch.device) -> OutputPool | None:
    """Return a new pool, in which `empty` allocates outputs on the device.

    None: this torch has no pools, or none that can be restricted to a thread; or its pools raise when they
    allocate, as in torch 2.8 and 2.9 with expandable segments.
    """
    begin = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None)  # torch 2.8
    if not _cuda or begin is None:
        return None
    try:
        with on_device(device):
            memory = torch.cuda.MemPool(_segments().allocator())
            place = device.index, memory.id
            end = functools.partial(torch._C._cuda_endAllocateToPool, *place)
            release = functools.partial(torch._C._cuda_releasePool, *place)
            pool = OutputPool(functools.partial(begin, *place), end, release, memory)
            pool.begin()
            try:
                empty((1,), (1,), torch.uint8)
            finally:
                pool.end()
                pool.release()
    except Exception:  # whatever torch lacks here: this rank must not fail alone, and images serve
        return None
    return pool


@functools.cache  # for good: pools use it when their last tensors are freed
def _segments() -> Any:
    return torch.cuda.memory.CUDAPluggableAllocator(_C.__file__, "spar_outputs_allocate", "spar_outputs_free")


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream's work goes into a CUDA graph."""
    if device.type != "cuda":
        return False
    with on_device(device):
        return _capturing()


def to_host(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Copy a tensor to the host; return also the event after which it is there, or None if it is."""
    if x.device.type != "cuda":
        return x.cpu(), None
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    host.copy_(x, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record(_streams.current_stream(x.device))
    return host, ready


class Beside:
    """A side stream in which an exchange runs behind what the caller's stream has; a no-op for the CPU."""

    def __init__(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self._device, self._event = device, None
        if device.type == "cuda":
            self._stream = _side_stream(device)
            self._stream.wait_stream(_streams.current_stream(device))
            for tensor in tensors:  # also if the caller drops them before
                tensor.record_stream(self._stream)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make the side stream the thread's current one, and note its end."""
        if self._device.type != "cuda":
            yield
            return
        with _streams.stream(self._stream):
            yield
            event = _streams.Event()
            event.record(self._stream)
            self._event = event

    def lend(self, outputs: Sequence[torch.Tensor]) -> None:
        """Let the current stream use tensors that were allocated in the side stream."""
        if self._device.type == "cuda":
            current = _streams.current_stream(self._device)
            for output in outputs:
                output.record_stream(current)

    def join(self) -> None:
        """Let the current stream wait for the exchange."""
        if self._event is not None:
            _streams.current_stream(self._device).wait_event(self._event)

    def is_over(self) -> bool:
        """Whether the exchange has ended; in a capture, whose work has no end, whether there is none."""
        return self._event is None or (not is_capturing(self._device) and bool(self._event.query()))


_streams: Any = torch.cuda


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """Return the stream of high priority, so that no persistent kernel of another one keeps exchanges out."""
    stream = _streams.Stream(device, priority=-1)
    _C.set_side_stream(device.index, stream.cuda_stream)
    return stream


def refuse_capture(op: str, device: torch.device, why: str) -> None:
    """An error, before anything is captured, where a CUDA graph is being captured."""
    if is_capturing(device):
        raise SparError(f"{op} cannot be captured into a CUDA graph: {why}")


def refuse_open_group(op: str, device: torch.device) -> None:
    """Raise inside torch's `_coalescing_manager`: its NCCL group would silently defer spar's transfers."""
    if dist.distributed_c10d._world.pg_coalesce_state and device.type == "cuda":
        raise SparError(
            f"{op} was called inside torch's _coalescing_manager, which defers NCCL's transfers; "
            "call it before or after"
        )


# library: its names to the loader, and the packages that have it in their folder lib
_LIBRARIES = {
    "libnccl": (("libnccl.so.2",), ("nvidia.nccl",)),
    "libnvrtc": (("libnvrtc.so.13", "libnvrtc.so.12"), ("nvidia.cu13", "nvidia.cuda_nvrtc")),
}


@functools.cache
def find_libraries() -> dict[str, str | None]:
    """Tell the core where libraries lie that torch's import has not brought in; return these places."""
    paths: dict[str, str | None] = {}
    if not _cuda:  # a torch without CUDA has no tensors for them
        return paths
    for library, (names, packages) in _LIBRARIES.items():
        if not any(map(_is_mapped, names)):
            paths[library] = _in_packages(names, packages) or _by_pathfinder(library)
            _C.set_library_path(library, paths[library])
    return paths


def _mapped(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None


def _is_mapped(name: str) -> bool:
    return _mapped(name) is not None


@functools.cache
def torch_shares_nccl(library: str = str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so")) -> bool:
    """Whether torch calls the libnccl.so.2 that spar opens.

    A torch with NCCL linked in has one of its own, whose communicators another library cannot use.
    """
    addresses = []
    for handle in (_mapped(library), _mapped("libnccl.so.2")):
        function = getattr(handle, "ncclGetVersion", None)  # the library's own, or that of one that it links
        addresses.append(ctypes.cast(function, ctypes.c_void_p).value if function else None)
    return addresses[0] is not None and addresses[0] == addresses[1]


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
    # The search would take long, and find nothing.
    if torch.version.cuda is None:
        return None
    with contextlib.suppress(Exception):
        pathfinder: Any = importlib.import_module("cuda.pathfinder")
        path: str = pathfinder.load_nvidia_dynamic_lib(library.removeprefix("lib")).abs_path
        return path
    return None
