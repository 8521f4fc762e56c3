# SPDX-License-Identifier: Apache-2.0
"""What this process finds: versions, cores, memory, GPUs, the libraries for them, settings and transports."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from .._group.log import unknown_settings
from .._transports import cuda
from .._version import __version__
from ..errors import SparError

Facts = dict[str, Any]  # the values are such that json.dumps accepts them


def collect() -> Facts:
    chosen = transports()  # opens the libraries
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else None
    cores, memory = _C.limits()
    dev_shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").exists() else None
    return {
        "versions": {
            "spar": __version__,
            "path": str(Path(__file__).parent.parent),
            "extension": _C.version,
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "torch_nccl": ".".join(map(str, nccl)) if nccl else None,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "processor": {
            "model": _first_value("/proc/cpuinfo", "model name"),
            "cores": os.cpu_count(),
            "affinity": allowed_cores(),
            "usable_cores": cores,
            "torch_threads": torch.get_num_threads(),
        },
        "memory": {
            "total": _kilobytes("MemTotal"),
            "available": _kilobytes("MemAvailable"),
            "usable": memory,
            "dev_shm": dev_shm and {"total": dev_shm.total, "free": dev_shm.free},
        },
        "gpus": _gpus(),
        "libraries": _libraries(),
        "settings": {"variables": _settings(), "unknown": unknown_settings()},
        "transports": chosen,
        "hosts": _hosts(chosen[0]["transport"] == "shm"),
    }


def allowed_cores() -> list[int]:
    """Return the cores on which this process may run; only Linux restricts them."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def text_of(file: str) -> str:
    """Return a file's text; "" if there is none, as only Linux has /proc and /sys."""
    try:
        return Path(file).read_text()
    except OSError:
        return ""


def _first_value(file: str, name: str) -> str | None:
    """Return the value of the first line "name: value" of a file."""
    lines = text_of(file).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _kilobytes(name: str) -> int | None:
    value = _first_value("/proc/meminfo", name)
    return int(value.split()[0]) * 1024 if value else None


def _gpus() -> Facts:
    """Return the GPUs that torch finds; why, if there are none; and which of them access each other."""
    none = None
    if torch.version.cuda is None and torch.version.hip is None:
        none = f"torch {torch.__version__} is built without CUDA"
    elif not torch.cuda.is_available():
        none = "torch finds no usable CUDA driver or device"
    indices = range(0 if none else torch.cuda.device_count())
    gpus = [torch.cuda.get_device_properties(index) for index in indices]
    return {
        "none": none,
        "devices": [
            {"name": gpu.name, "memory": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"}
            for gpu in gpus
        ],
        "peer_access": [
            [one == other or torch.cuda.can_device_access_peer(one, other) for other in indices]
            for one in indices
        ],
    }


def _libraries() -> list[Facts]:
    """Return where each library is that spar opens for CUDA tensors, once `transports` has opened them."""
    found_by_spar, mapped = cuda.find_libraries(), re.findall(r" (/.*)$", text_of("/proc/self/maps"), re.M)
    rows = []
    for library in ("libcuda", "libnccl", "libnvrtc"):
        opened = min((path for path in mapped if Path(path).name.startswith(f"{library}.so")), default=None)
        version = _nccl_version(opened) if library == "libnccl" and opened else None
        path = opened or found_by_spar.get(library)
        rows.append({"name": library, "path": path, "opened": opened is not None, "version": version})
    return rows


def _nccl_version(path: str) -> str | None:
    number = ctypes.c_int()
    try:
        ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # a file that was replaced since, or another library's
        return None
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def _settings() -> Facts:
    """Return each setting's value in effect, and whether it is set."""
    read: Any = _C.env
    variables: Facts = {}
    for field, variable, *_ in _C.env_rows():
        value, wrong = None, None
        try:
            value = read(field)
        except ValueError as error:
            wrong = str(error)
        variables[variable] = {"set": bool(os.environ.get(variable)), "value": value, "error": wrong}
    return variables


def transports() -> list[Facts]:
    """Return the transport that a group would use for tensors of each device type, and why no other.

    It is spar's own rule, with what this process alone can offer: no group is made, and no thread is started.
    """
    cuda.find_libraries()
    without_shm = ("shm", "the ranks are on several hosts")
    return [
        {"device": "cpu", "hosts": "one host"} | _choice("cpu"),
        {"device": "cpu", "hosts": "several hosts"} | _choice("cpu", without_shm),
        {"device": "cuda", "hosts": "any hosts"} | _choice("cuda"),
    ]


def _hosts(shares: bool) -> Facts:
    """Return what a group of the launched ranks would move, and the address for ranks of other hosts.

    shares: whether ranks of one host share memory.
    """
    address, why = None, None
    try:
        address = _C.own_address()
    except SparError as error:
        why = str(error)
    world, local = (os.environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    ranks = (int(world), int(local)) if world.isdigit() and local.isdigit() else None
    parts = None
    if ranks is not None and 1 <= ranks[1] <= ranks[0] != 1:
        near = (ranks[1] - 1) / (ranks[0] - 1)
        parts = {"ranks": ranks[0], "on_host": ranks[1], "shared_memory": near * shares, "network": 1 - near}
    return {"address": address, "error": why, "group": parts}


def _choice(device: str, *refused: tuple[str, str]) -> Facts:
    try:
        name, reason, rejected = _C.choose(_C.peer_info(), device, refused)
    except (ValueError, SparError) as error:  # a setting refuses every transport, or is wrong
        return {"transport": None, "reason": str(error).removeprefix("rank 0: "), "rejected": {}}
    reasons = {transport: why.removeprefix("rank 0: ") for transport, why in rejected}
    return {"transport": name, "reason": reason, "rejected": reasons}
