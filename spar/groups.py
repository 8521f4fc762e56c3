"""The communicators of this process: what a group argument means, and whose communicator it is.

State hangs on the ProcessGroup object, weakly; names are reused after destroy and init.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import _C, topology
from .communicator import CALLS, Communicator, Place
from .errors import SparError
from .rendezvous import Transport

Group = dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str] | str | None

_F = TypeVar("_F", bound=Callable[..., Any])
_distributed = dist.is_available()
_create = threading.RLock()  # a signal's handler may close a group, or use another
_by_group: dict[int, Communicator] = {}  # by the group's id, until the group is gone
_by_handle: dict[int, Communicator] = {}


def _renew_lock() -> None:
    """Replace the lock in a forked child: a thread of the parent may have held it."""
    global _create
    _create = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def communicator(group: dist.ProcessGroup) -> Communicator:
    """The group's communicator, made at its first use."""
    found = _by_group.get(id(group))
    if found is None:
        group = _real(group)
        with _create:
            found = _by_group.get(id(group))
            if found is None:
                found = Communicator(group)
                _by_group[id(group)] = found
                _by_handle[found.place.handle] = found
                found.when_gone = weakref.finalize(group, _forget, id(group), found.place.handle)
                found.when_gone.atexit = False
    return found


def _real(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Under torch.compile a group is a wrapper around it."""
    return getattr(group, "real_obj", group)


def _forget(group: int, handle: int) -> None:
    """The group is gone, or spar's part in it: its id may be another one's soon, its handle is used up."""
    del _by_group[group], _by_handle[handle]


def by_handle(handle: int) -> Communicator:
    """The communicator of a handle; an error where its group is gone."""
    found = _by_handle.get(handle)
    if found is None:
        raise SparError("the process group of this call was destroyed, or closed")
    return found


def calls_on(handle: int) -> int:
    """How many calls of a handle's group this rank has made."""
    found = _by_handle.get(handle)
    return 0 if found is None else found.calls


def lends(handle: int) -> bool:
    """Whether tensors that this group gives out may lie in shared memory (SPAR_OUTPUT)."""
    found = _by_handle.get(handle)
    return found is not None and not found.own_output


def constant(function: _F) -> _F:
    """What torch.compiler.assume_constant_result does, without its import of torch._dynamo (1.4 s).

    Under torch.compile the function is evaluated while tracing; its result is a constant of the compiled
    code, which dynamo guards by the identity of the group. A look-up that it traced would not be guarded.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def place_of(group: dist.ProcessGroup) -> Place:
    found = _by_group.get(id(group))
    return (communicator(group) if found is None else found).place


def process_group(group: Group) -> dist.ProcessGroup:
    """What a group argument means: a ProcessGroup, a 1-D DeviceMesh, (mesh, dim), a name or None.

    None is the current topology's sequence group; WORLD where there is none.

    Raises:
        ValueError: torch.distributed is not initialised, the mesh has more dims, the name is not known, or
            this rank is not in the group.
        TypeError: something else was given.
    """
    if group is not None and isinstance(group, dist.ProcessGroup):  # of None it takes long
        return group
    if group is None:
        sequence = topology.sequence_group() if topology.in_use else None
        if sequence is not None:
            return sequence
        world = dist.group.WORLD if _distributed else None
        if world is None:
            raise ValueError(
                "process_group is None and torch.distributed is not initialized; "
                "call torch.distributed.init_process_group first, or pass a group"
            )
        return world
    if isinstance(group, str):
        return _named(group)
    if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
        mesh, dim = group
        return mesh.get_group(dim)
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"process_group is not a group of this rank: global rank {dist.get_rank()} is not among its ranks"
        )
    if not isinstance(group, tuple) and hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(
                f"process_group is a DeviceMesh of {group.ndim} dims {group.mesh_dim_names}; "
                "expected one dim, or (mesh, dim)"
            )
        return group.get_group()
    kind = type(group).__name__
    raise TypeError(
        f"process_group is {group!r:.80} ({'an' if kind[0] in 'aeiou' else 'a'} {kind}); "
        "expected a ProcessGroup, a DeviceMesh, (mesh, dim), a group's name or None"
        + ("; did you forget the group argument?" if isinstance(group, int) else "")
    )


def _named(name: str) -> dist.ProcessGroup:
    from torch._C._distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(cast(Any, name))
    except (LookupError, RuntimeError) as error:
        raise ValueError(f"process_group names {name!r}, which is no group of this rank") from error


def transport(group: Group = None, device: torch.device | str | None = None) -> Transport:
    """Which transport moves a group's bytes, and why. Never communicates.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, (mesh, dim), a group's name, or None for
            the current topology's sequence group (WORLD without one).
        device: the tensors' device type; "cpu" by default.

    Returns:
        name (None before the group's first exchange), reason, device, world_size and rejected.
    """
    kind = torch.device(device).type if device is not None else "cpu"
    return communicator(process_group(group)).transport(kind)


def init(group: Group = None, device: torch.device | str | None = None) -> Transport:
    """Meets the other ranks of a group and sets its transport up. Collective.

    Otherwise the group's first exchange does so. Args as of `transport`, whose result it returns.
    """
    comm = communicator(process_group(group))
    kind = torch.device(device if device is not None else "cpu")
    if comm.world > 1:
        with comm.turn("init", kind.type):
            comm.set_up("init", kind, comm.deadline())
    return comm.transport(kind.type)


def close(group: Group = None) -> None:
    """End spar's use of a group on this rank. Neither waits nor is collective; outputs stay valid.

    A call under way on this rank, on another thread or around a signal's handler, raises GroupBrokenError.
    So do the calls of ranks that go on. When all have closed it, the group can be used anew.
    """
    real = _real(process_group(group))
    with _create:
        found = _by_group.get(id(real))
        if found is not None and found.when_gone is not None:
            found.when_gone()
    if found is not None:
        found.close()


def empty_cache() -> None:
    """Gives the shared memory that no output uses back to the system."""
    _C.arena_trim()


def memory_stats() -> dict[str, int]:
    """Counters of this process, by name.

    arena.*_bytes are of shared memory; staging.*_bytes and tables.allocated_bytes of GPUs; calls.* are
    counted by transport; plans.* is about the cache of plans.
    """
    arena = ("cap", "reserved", "allocated", "peak", "quarantined", "returned")
    stats = {f"arena.{name}_bytes": n for name, n in zip(arena, _C.arena_stats(), strict=True)}
    device = ("staging.cap", "staging.allocated", "tables.allocated")
    stats |= {f"{name}_bytes": n for name, n in zip(device, _C.device_stats(), strict=True)}
    stats |= {
        f"plans.{name}": n for name, n in zip(("cached", "hits", "misses"), _C.plan_stats(), strict=True)
    }
    return stats | {f"calls.{name}": CALLS.get(name, 0) for name in ("shm", "p2p", "nccl", "torch")}
