# SPDX-License-Identifier: Apache-2.0
"""The steps of a ring, where lengths alone say which blocks there are."""

from __future__ import annotations

from .._exchange.layouts import RUNS, WHOLE, Layout, by_sizes, pair, rotated, shards
from .blocks import blocks_of, keys_before, own_block
from .documents import documents_round
from .ring import Round, Shift


def round_of(numbers: Layout, world: int, rank: int, causal: bool, packed: bool, plain: bool) -> Round:
    """Return the blocks of each step, and how the shard of each but the first comes from its owner.

    numbers: the layout of the sequence. plain: whether there is no mask.
    """
    if numbers[1] == RUNS:
        return documents_round(numbers, world, rank, causal, plain)
    held = shards(numbers, world)
    steps = [
        tuple(blocks_of(held[rank], held[(rank - step) % world], causal, packed, plain))
        for step in range(world)
    ]
    if causal and plain and not packed:
        steps[0] = tuple(own_block(held[rank]))
    shifts = []
    for step in range(1, world):
        sent = [
            keys_before(held[peer], held[(peer + step) % world] if causal and not packed else None)
            for peer in range(world)
        ]
        received = [sent[(peer - step) % world] for peer in range(world)]
        shard = pair(by_sizes(2, sent), rotated(2, sent, step))
        gradient = pair(by_sizes(2, received), rotated(2, received, world - step))
        shifts.append(Shift(((0, sent[rank]),), shard, gradient))
    return Round(tuple(steps), tuple(shifts), pair(numbers, WHOLE))
