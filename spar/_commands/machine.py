"""What this process finds on the host: versions, cores, memory and spar's settings."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from .._group.log import unknown_settings
from .._version import __version__

Facts = dict[str, Any]  # what json.dumps accepts


def versions() -> Facts:
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else None
    return {
        "spar": __version__,
        "path": str(Path(__file__).parent.parent),
        "extension": _C.version,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "torch_nccl": ".".join(map(str, nccl)) if nccl else None,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def allowed_cores() -> list[int]:
    """Return the cores on which this process may run; only Linux restricts them."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def processor() -> Facts:
    usable, _ = _C.limits()
    return {
        "model": _first_value("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "affinity": allowed_cores(),
        "usable_cores": usable,
        "torch_threads": torch.get_num_threads(),
    }


def memory() -> Facts:
    _, usable = _C.limits()
    return {
        "total": _kilobytes("MemTotal"),
        "available": _kilobytes("MemAvailable"),
        "usable": usable,
        "dev_shm": _file_system("/dev/shm"),
    }


def settings() -> Facts:
    """Return each setting's value in effect, whether it is set, and the variables that are no setting."""
    found = {}
    for field, variable, *_ in _C.env_rows():
        value = _setting(field)
        wrong = isinstance(value, ValueError)
        found[variable] = {
            "set": bool(os.environ.get(variable)),
            "value": None if wrong else value,
            "error": str(value) if wrong else None,
        }
    return {"variables": found, "unknown": unknown_settings()}


def _setting(field: str) -> Any:
    """Return a setting's value, or the error that it is."""
    read: Any = _C.env
    try:
        return read(field)
    except ValueError as error:
        return error


def _file_system(folder: str) -> Facts | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return {"total": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}


def _first_value(file: str, name: str) -> str | None:
    """Return the value of the first line "name: value" of a file."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _kilobytes(name: str) -> int | None:
    value = _first_value("/proc/meminfo", name)
    return int(value.split()[0]) * 1024 if value else None
