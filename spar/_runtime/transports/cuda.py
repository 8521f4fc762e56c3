"""What spar needs of torch's CUDA: the current stream, graph captures, and where CUDA's libraries lie."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ... import _C
from ...errors import SparError

# without CUDA torch has none of them, or a dummy
_cuda = torch.cuda._is_compiled()
stream_of: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if _cuda else lambda index: 0
_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing if _cuda else lambda: False


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream's work goes into a CUDA graph."""
    return device.type == "cuda" and _capturing()


def refuse_capture(op: str, device: torch.device, why: str) -> None:
    """An error, before anything is captured, where a CUDA graph is being captured."""
    if is_capturing(device):
        raise SparError(f"{op} cannot be captured into a CUDA graph: {why}")


# library: its names to the loader, and the packages that have it in their folder lib
_LIBRARIES = {
    "libnccl": (("libnccl.so.2",), ("nvidia.nccl",)),
    "libnvrtc": (("libnvrtc.so.13", "libnvrtc.so.12"), ("nvidia.cu13", "nvidia.cuda_nvrtc")),
}


@functools.cache
def find_libraries() -> None:
    """Tells the core where libraries lie that torch's import has not brought in."""
    if not _cuda:  # a torch without CUDA has no tensors for them
        return
    for library, (names, packages) in _LIBRARIES.items():
        if not any(map(_is_mapped, names)):
            _C.set_library_path(library, _in_packages(names, packages) or _by_pathfinder(library))


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
