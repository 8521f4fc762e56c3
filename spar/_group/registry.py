"""The communicators of this process, by group and by handle.

State hangs on the ProcessGroup object, weakly; names are reused after destroy and init.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import torch.distributed as dist

from .._tracing import constant
from ..errors import SparError
from .communicator import Communicator
from .member import Place

_create = threading.RLock()  # a signal's handler may close a group, or use another
_by_group: dict[int, Communicator] = {}  # by the group's id, until the group is gone
_by_handle: dict[int, Communicator] = {}
_finalizers: dict[int, weakref.finalize[..., Any]] = {}  # by handle: forgets the group


def _renew_lock() -> None:
    """Replace the lock in a forked child: a thread of the parent may hold it."""
    global _create
    _create = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def communicator(group: dist.ProcessGroup) -> Communicator:
    """Return the group's communicator; create it at its first use."""
    found = _by_group.get(id(group))
    if found is None:
        group = _real(group)
        with _create:
            found = _by_group.get(id(group))
            if found is None:
                found = Communicator(group)
                handle = found.place.handle
                _finalizers[handle] = weakref.finalize(group, _forget, id(group), handle)
                _finalizers[handle].atexit = False
                _by_handle[handle] = found
                _by_group[id(group)] = found
    return found


def _real(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Unwrap the group, which torch.compile wraps."""
    return getattr(group, "real_obj", group)


def _forget(group: int, handle: int) -> None:
    """Forget a group that was destroyed or closed; its id may be reused, its handle is not."""
    for known, key in ((_by_group, group), (_by_handle, handle), (_finalizers, handle)):
        known.pop(key, None)


def by_handle(handle: int) -> Communicator:
    """Return the communicator of a handle; raise if its group is gone."""
    found = _by_handle.get(handle)
    if found is None:
        raise SparError(
            "the process group of this call was destroyed, or closed; "
            "make each call, and its backward, before"
        )
    return found


def calls_on(handle: int) -> int:
    """Return how many calls this rank has made on a handle's group, those in flight included."""
    found = _by_handle.get(handle)
    return 0 if found is None else found.count()


def lends(handle: int) -> bool:
    """Whether the group's outputs may be in shared memory (SPAR_OUTPUT)."""
    found = _by_handle.get(handle)
    return found is not None and not found.own_output


def known(group: object) -> Communicator | None:
    """Return the communicator of a ProcessGroup that spar has used; None for another object."""
    return _by_group.get(id(group))


def known_by(place: Place) -> Communicator | None:
    """Return the communicator of a place; None if its group is gone."""
    return _by_handle.get(place.handle)


@constant
def place_of(group: dist.ProcessGroup) -> Place:
    found = _by_group.get(id(group))
    return (communicator(group) if found is None else found).place


def close(group: dist.ProcessGroup) -> None:
    """End spar's use of a group on this rank; the group's next use makes a new communicator."""
    real = _real(group)
    with _create:
        found = _by_group.get(id(real))
        if found is not None:
            _finalizers[found.place.handle]()
    if found is not None:
        found.close()
