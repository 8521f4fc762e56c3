"""The groups of this process: their transports, and what they hold."""

from __future__ import annotations

import torch

from . import _C
from ._runtime import registry
from ._runtime.member import Transport
from ._runtime.registry import communicator
from ._runtime.transports.core import CALLS
from .topology.resolve import Group, process_group

__all__ = ["Group", "close", "empty_cache", "init", "memory_stats", "process_group", "transport"]


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
    registry.close(process_group(group))


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
