# SPDX-License-Identifier: Apache-2.0
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
    found_by_spar, mapped = cuda.find_libraries(), _mapped_files()
    rows = []
    for library in ("libcuda", "libnccl", "libnvrtc"):
        opened = next((path for path in mapped if Path(path).name.startswith(f"{library}.so")), None)
        version = nccl_version() if library == "libnccl" and opened else None
        path = opened or found_by_spar.get(library)
        rows.append({"name": library, "path": path, "opened": opened is not None, "version": version})
    return rows


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
    without_shm = (("shm", "the ranks are on several hosts"),)
    return [
        {"device": "cpu", "hosts": "one host"} | _choice("cpu"),
        {"device": "cpu", "hosts": "several hosts"} | _choice("cpu", without_shm),
        {"device": "cuda", "hosts": "any hosts"} | _choice("cuda"),
    ]


def _choice(device: str, refused: tuple[tuple[str, str], ...] = ()) -> Facts:
    try:
        name, reason, rejected = _C.choose(_C.peer_info(), device, refused)
    except (ValueError, SparError) as error:  # a setting refuses every transport, or is wrong
        return {"transport": None, "reason": str(error).removeprefix("rank 0: "), "rejected": {}}
    others = {other: why.removeprefix("rank 0: ") for other, why in rejected}
    return {"transport": name, "reason": reason, "rejected": others}
