# SPDX-License-Identifier: Apache-2.0
"""Transports and memory of this process's groups: set-up, inspection, release."""

from __future__ import annotations

import torch

from . import _C
from ._control.state import Transport
from ._group import registry
from ._group.debug import described
from ._group.registry import group_of
from .topology.resolve import Group, process_group

__all__ = ["Group", "close", "debug", "empty_cache", "init", "memory_stats", "process_group", "transport"]


def transport(group: Group = None, device: torch.device | str | None = None) -> Transport:
    """Report the transport in use for a group, and why. Never communicates.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, (mesh, dim), a group's name, or None for
            the current topology's sequence group (WORLD without one).
        device: the tensors' device type; "cpu" by default.

    Returns:
        A `Transport`, whose name is None before the group's first exchange.
    """
    kind = torch.device(device).type if device is not None else "cpu"
    return group_of(process_group(group, "transport")).transport(kind)


def debug(group: Group = None) -> str:
    """Describe what this rank knows of a group, as text for a person. Never communicates.

    Any thread may call it, and a signal handler, while a call hangs. It shows:

    - the number of calls, and whether one is under way or broke the group;
    - each transport, and where ranks share memory how far each one is, and its process's last call;
    - the newest exchange, with the blocks of its plan.

    Args:
        group: as in `transport`.
    """
    return described(group_of(process_group(group, "debug")))


def init(group: Group = None, device: torch.device | str | None = None) -> Transport:
    """Set up a group's transport with the other ranks. Collective.

    Without it the group's first exchange does so. Takes the arguments of `transport` and returns its result.
    """
    state = group_of(process_group(group, "init"))
    kind = torch.device(device if device is not None else "cpu")
    if state.world > 1:
        state.check("init")
        state.channel("init", kind)
    return state.transport(kind.type)


def close(group: Group = None) -> None:
    """End spar's use of a group on this rank. Neither waits nor is collective; outputs stay valid.

    A call in progress on this rank, on another thread or interrupted by a signal handler, raises
    GroupBrokenError. So do later calls of peers that have not closed it. Once all ranks have closed the
    group, it can be used again.
    """
    registry.close(process_group(group, "close"))


def empty_cache() -> None:
    """Release the shared memory that no output uses to the operating system."""
    _C.arena_trim()


def memory_stats() -> dict[str, int]:
    """Return this process's counters by name.

    `arena.*_bytes` count shared memory; `staging.*_bytes` GPU memory that one call took at most, and that all
    calls took; `slots_bytes` GPU memory that groups over push have for outputs, and `slots.used_bytes` what
    outputs take of it; `plans.*` the plan cache. By transport, of all exchanges that did not fail: `calls.*`
    count them, `sent.*_bytes` what went to other ranks, and `time.*_us` the microseconds in them, waits
    included.
    """
    arena = ("cap", "reserved", "allocated", "peak", "quarantined", "returned")
    stats = {f"arena.{name}_bytes": n for name, n in zip(arena, _C.arena_stats(), strict=True)}
    device = ("staging.peak", "staging.total", "slots", "slots.used")
    stats |= {f"{name}_bytes": n for name, n in zip(device, _C.device_stats(), strict=True)}
    stats |= {
        f"plans.{name}": n for name, n in zip(("cached", "hits", "misses"), _C.plan_stats(), strict=True)
    }
    for name, calls, sent, ns in _C.traffic():
        stats |= {f"calls.{name}": calls, f"sent.{name}_bytes": sent, f"time.{name}_us": ns // 1000}
    return stats
