# SPDX-License-Identifier: Apache-2.0
"""What this process finds on the host: versions, cores, memory and spar's settings."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from .._group.log import unknown_settings
from .._version import __version__

Facts = dict[str, Any]  # the values are such that json.dumps accepts them


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
    dev_shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").exists() else None
    return {
        "total": _kilobytes("MemTotal"),
        "available": _kilobytes("MemAvailable"),
        "usable": usable,
        "dev_shm": dev_shm and {"total": dev_shm.total, "free": dev_shm.free},
    }


def settings() -> Facts:
    """Return each setting's value in effect, whether it is set, and the variables that are no setting."""
    read: Any = _C.env
    variables: Facts = {}
    for field, variable, *_ in _C.env_rows():
        value, wrong = None, None
        try:
            value = read(field)
        except ValueError as error:
            wrong = str(error)
        variables[variable] = {"set": bool(os.environ.get(variable)), "value": value, "error": wrong}
    return {"variables": variables, "unknown": unknown_settings()}


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
