# SPDX-License-Identifier: Apache-2.0
"""The groups of this process, by ProcessGroup and by handle.

State hangs on the ProcessGroup object, weakly; names are reused after destroy and init.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import torch.distributed as dist

from .._control.state import Place
from .._tracing import constant
from ..errors import SparError
from ..topology.absent import AbsentGroup
from .group import Group

_creation = threading.RLock()  # a signal's handler may close a group, or use another
by_process_group: dict[int, Group] = {}  # by the ProcessGroup's id, until that is gone
_by_handle: dict[int, Group] = {}
_finalizers: dict[int, weakref.finalize[..., Any]] = {}  # by handle


def _renew_lock() -> None:
    """Replace the lock in a forked child: a thread of the parent may hold it."""
    global _creation
    _creation = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def group_of(process_group: dist.ProcessGroup) -> Group:
    """Return spar's state of a process group; create it at its first use."""
    group = by_process_group.get(id(process_group))
    if group is None:
        process_group = _unwrapped(process_group)
        with _creation:
            group = by_process_group.get(id(process_group))
            if group is None:
                group = Group(process_group)
                key = id(process_group), group.handle
                _finalizers[group.handle] = weakref.finalize(process_group, _forget, *key)
                _finalizers[group.handle].atexit = False
                _by_handle[group.handle] = group
                by_process_group[id(process_group)] = group
    return group


def _unwrapped(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the real group of the object that torch.compile passes."""
    return getattr(group, "real_obj", group)


def _forget(key: int, handle: int) -> None:
    """Close and forget a group that was destroyed or closed; its id may be reused, its handle is not."""
    by_process_group.pop(key, None)
    _finalizers.pop(handle, None)
    if (group := _by_handle.pop(handle, None)) is not None:
        group.close()  # recorded exchanges may hold it for longer


def group_at(handle: int) -> Group:
    """Return the group of a handle; raise if it is gone."""
    group = _by_handle.get(handle)
    if group is None:
        raise SparError(
            "the process group of this call was destroyed, or closed; "
            "make each call, and its backward, before"
        )
    return group


@constant
def place_of(process_group: dist.ProcessGroup) -> Place:
    """Return this rank's place in a group; a constant for torch.compile."""
    group = by_process_group.get(id(process_group))
    if group is None and isinstance(process_group, AbsentGroup):
        return Place(0, process_group.size(), process_group.rank())
    return (group_of(process_group) if group is None else group).place


def close(process_group: dist.ProcessGroup) -> None:
    """End spar's use of a group on this rank; its next use makes a new state."""
    real = _unwrapped(process_group)
    with _creation:
        group = by_process_group.get(id(real))
        if group is not None:
            _finalizers[group.handle]()
