# SPDX-License-Identifier: Apache-2.0
"""Bind each rank of a host to a core of its own, as mpirun does by default.

Each turn begins with a collective of gloo. After it the scheduler may leave two ranks on one core, and a turn
of short calls ends before it balances the cores: there a call takes four times as long.
"""

from __future__ import annotations

import os
from collections import Counter

from ... import _C
from ..facts import allowed_cores, text_of


def bind(local_rank: int, local_ranks: int) -> bool:
    """Bind this thread, and those that it starts, to one core: first one of each physical core.

    Returns:
        False, if this process may use fewer cores than the host has ranks: they share cores, or something
        bound them before. Then nothing changes.
    """
    cores, seen = allowed_cores(), Counter[str]()
    if not hasattr(os, "sched_setaffinity") or local_ranks > min(len(cores), _C.limits()[0]):
        return False

    def place(core: int) -> int:
        siblings = _siblings(core)
        seen[siblings] += 1
        return seen[siblings]

    os.sched_setaffinity(0, {sorted(cores, key=place)[local_rank]})
    return True


def _siblings(core: int) -> str:
    """Return the logical cores that share a physical one with this core."""
    return text_of(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") or str(core)
