"""The GPUs of this host, the libraries that spar opens for them, and which transport serves what."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import torch

from .. import _C
from .._transports import cuda
from ..errors import SparError
from .machine import Facts

# library: what its file is called
_FILES = {"libcuda": "libcuda.so", "libnccl": "libnccl.so", "libnvrtc": "libnvrtc.so"}
_HOSTS = "the ranks are on several hosts"


def gpus() -> Facts:
    """Return the GPUs that torch finds; why, if there are none; and which of them access each other."""
    if torch.version.cuda is None and torch.version.hip is None:
        return {"none": f"torch {torch.__version__} is built without CUDA", "devices": [], "peer_access": []}
    if not torch.cuda.is_available():
        return {"none": "torch finds no usable CUDA driver or device", "devices": [], "peer_access": []}
    count = torch.cuda.device_count()
    return {
        "none": None,
        "devices": [_gpu(index) for index in range(count)],
        "peer_access": [
            [one == other or torch.cuda.can_device_access_peer(one, other) for other in range(count)]
            for one in range(count)
        ],
    }


def _gpu(index: int) -> Facts:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
    }


def libraries() -> list[Facts]:
    """Return where each library is that spar opens for CUDA tensors, once `transports` has opened them."""
    places, maps = cuda.find_libraries(), _mapped_files()
    found = []
    for library, file in _FILES.items():
        opened = next((path for path in maps if Path(path).name.startswith(file)), None)
        version = nccl_version() if library == "libnccl" and opened else None
        path = opened or places.get(library)
        found.append({"name": library, "path": path, "opened": opened is not None, "version": version})
    return found


def _mapped_files() -> list[str]:
    try:
        text = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted(set(re.findall(r" (/.*)$", text, re.MULTILINE)))


def nccl_version() -> str | None:
    """Return the version of the libnccl.so.2 that this process has opened."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        number = ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(number)):
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def transports() -> list[Facts]:
    """Return the transport that a group would use for tensors of each device type, and why no other.

    It is spar's own rule, with what this process alone can offer: no group is made, and no thread is started.
    """
    cuda.find_libraries()
    own = _C.peer_info()
    cases: list[tuple[str, str, tuple[tuple[str, str], ...]]] = [
        ("cpu", "one host", ()),
        ("cpu", "several hosts", (("shm", _HOSTS),)),
        ("cuda", "any hosts", ()),
    ]
    return [{"device": device, "hosts": hosts} | _choice(own, device, no) for device, hosts, no in cases]


def _choice(own: bytes, device: str, refused: tuple[tuple[str, str], ...]) -> Facts:
    try:
        name, reason, rejected = _C.choose(own, device, refused)
    except (ValueError, SparError) as error:  # by a setting
        return {"transport": None, "reason": str(error).removeprefix("rank 0: "), "rejected": {}}
    others = {other: why.removeprefix("rank 0: ") for other, why in rejected}
    return {"transport": name, "reason": reason, "rejected": others}
