# SPDX-License-Identifier: Apache-2.0
"""How the ring and the ulysses groups of a parallel state share a sequence."""

from __future__ import annotations

import torch.distributed as dist

from .groups_by_name import ParallelState


def ring_and_ulysses(state: ParallelState) -> tuple[str, int, dist.ProcessGroup]:
    """Return the kind of the layout, the number of ulysses ranks, and the group that shares the sequence.

    The kind is "hybrid", or "even" or "zigzag" of one group where the other is not enabled. The number is
    negative if the ulysses ranks are neighbours in the group, as in csrc/ops/layout.h.
    """
    ring, ulysses, cp = (state.get_group(name) for name in ("ring", "ulysses", "cp"))
    if not state.is_ring_enable():
        alone = ring if ulysses is None else ulysses
        if alone is None:  # not None as a group: that is another one, maybe of several ranks
            raise ValueError(
                "SequenceLayout.hybrid: the parallel state has no ring or ulysses group; create it with "
                "init_parallel_state(ring_attention_size=..., ulysses_parallel_size=...)"
            )
        return "even", 1, alone
    if not state.is_ulysses_enable():
        assert ring is not None
        return "zigzag", 1, ring
    neighbours = state.get_cp_neighbours()
    if cp is None or neighbours is None:
        raise ValueError(
            "SequenceLayout.hybrid: the parallel state has no cp group of ring x ulysses in which the "
            "ring or the ulysses ranks are neighbours; create it with init_parallel_state("
            "ring_attention_size=..., ulysses_parallel_size=...), or take over a mesh whose ranks ascend"
        )
    inner = state.get_group_size("ulysses")
    return "hybrid", -inner if neighbours == "ulysses" else inner, cp
