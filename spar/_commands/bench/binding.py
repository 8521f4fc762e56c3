# SPDX-License-Identifier: Apache-2.0
"""Bind each rank of a host to a core of its own, as mpirun does by default.

Each turn begins with a collective of gloo. After it the scheduler may leave two ranks on one core, and a turn
of short calls ends before it balances the cores: there a call takes four times as long.
"""

from __future__ import annotations

import os
from pathlib import Path

from ... import _C
from ..facts import allowed_cores


def bind(local_rank: int, local_ranks: int) -> bool:
    """Bind this thread, and those that it starts, to one core.

    Returns:
        False, if this process may use fewer cores than the host has ranks: they share cores, or something
        bound them before. Then nothing changes.
    """
    cores = _hardware_first(allowed_cores())
    if not hasattr(os, "sched_setaffinity") or local_ranks > min(len(cores), _C.limits()[0]):
        return False
    os.sched_setaffinity(0, {cores[local_rank]})
    return True


def _hardware_first(cores: list[int]) -> list[int]:
    """Return one logical core of each physical core, and then the others."""
    seen: dict[str, int] = {}
    places = []
    for core in cores:
        siblings = _siblings(core)
        places.append((seen.get(siblings, 0), core))
        seen[siblings] = seen.get(siblings, 0) + 1
    return [core for _, core in sorted(places)]


def _siblings(core: int) -> str:
    """Return the logical cores that share a physical one with this core."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(core)
