# SPDX-License-Identifier: Apache-2.0
"""What torch.distributed knows of a ProcessGroup: name, time limit, devices, whether it was destroyed."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Container

import torch
import torch.distributed as dist

from .. import _C
from ..errors import TransportError

_DEFAULT_TIMEOUT = 1800.0


def group_name(group: dist.ProcessGroup) -> str:
    """The group's name; groups that torch did not register have none."""
    try:
        return group.group_name or "unnamed"
    except RuntimeError:
        return "unnamed"


def registry(group: dist.ProcessGroup) -> Container[dist.ProcessGroup | None] | None:
    """Return torch.distributed's groups, which a group leaves when it is destroyed; None if it never joins.

    A group without a description was not made by torch.distributed, but by stateless functions, say.
    """
    groups = dist.distributed_c10d._world.pg_map
    return groups if group in groups or group.group_desc else None


def group_timeout(group: dist.ProcessGroup) -> float:
    """The ProcessGroup's own limit in seconds, at most a year; 1800 where it cannot be read."""
    with contextlib.suppress(AttributeError, RuntimeError):
        try:
            timeout: datetime.timedelta = group._get_backend(wire_device(group)).options._timeout
        except OverflowError:  # longer than any timedelta
            return _C.LONGEST_S
        return min(timeout.total_seconds(), _C.LONGEST_S)
    return _DEFAULT_TIMEOUT


def wire_device(group: dist.ProcessGroup, wanted: torch.device | None = None) -> torch.device:
    """A device whose tensors the group can move: the wanted one, else the CPU, else the group's own."""
    for device in (wanted, torch.device("cpu")):
        if device is not None:
            with contextlib.suppress(RuntimeError):
                group._get_backend(device)
                return device
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            group._get_backend(device)
            return torch.device(device.type, torch.accelerator.current_device_index())
    raise TransportError(f"process group {group_name(group)!r} has no backend")


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The name of the backend that moves a device's tensors; None: there is none."""
    with contextlib.suppress(RuntimeError):
        return str(group._get_backend(device).name())
    return None
