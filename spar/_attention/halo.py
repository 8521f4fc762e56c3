# SPDX-License-Identifier: Apache-2.0
"""The keys of other ranks that spans leave a rank's queries: which they are, and how they come.

All ranks know the spans, so that each derives what every rank needs: no sizes are exchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._exchange.arguments import Arguments, apply_together
from .._exchange.layouts import WHOLE, Args, Layout, Piece, by_sizes, packed, pair, pieces, rotated
from ..sequence_layout import SequenceLayout, numbers_of
from . import tiles
from .blocks import Block
from .ring import Round, Shift, selected
from .spans import Spans
from .tiles import needed_keys

# Finds the blocks of runs of queries and of keys.
BlocksMaker = Callable[[Sequence[Piece], Sequence[Piece]], tuple[Block, ...]]


class Halo(NamedTuple):
    """What this rank sends and receives of the keys, along dim 2, so that it holds all that it needs.

    Attributes:
        sent: the parts of this rank's shard that others need, (first, number), by receiver.
        args: the layouts before and after the exchange of these parts.
        order: the parts of this rank's shard and of what it received behind it, in the order of the sequence.
        held: which keys these parts are, one behind the other.
    """

    sent: tuple[tuple[int, int], ...]
    args: Args
    order: tuple[tuple[int, int], ...]
    held: tuple[Piece, ...]

    def gathered(self, call: Arguments, note: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange the halo of k and v [B, K, T, D]; return the keys that this rank needs.

        note: what ranks compare besides the layouts.
        """
        inputs = [call.beside(selected(x, self.sent), name) for x, name in ((k, "k"), (v, "v"))]
        inputs[0].note = note
        received = apply_together(inputs, (self.args, self.args))
        # A rank that receives nothing keeps the empty tensor in its graph: its peers wait for it in backward.
        whole = [torch.cat([own, others], 2) for own, others in zip((k, v), received, strict=True)]
        first, second = (x if self.is_in_order else selected(x, self.order) for x in whole)
        return first, second

    @property
    def is_in_order(self) -> bool:
        return all(a[0] + a[1] == b[0] for a, b in itertools.pairwise(self.order))


def halo_of(spans: Spans, queries: SequenceLayout, keys: SequenceLayout, world: int, rank: int) -> Halo:
    """Return the halo of a rank; its own keys stay, whether its queries attend to them or not."""
    of_queries, of_keys = numbers_of(queries, 0), numbers_of(keys, 0)
    key = "halo", of_queries, of_keys, world, rank, tiles.TILE
    made: Halo = spans.remember(key, lambda: _halo(spans, of_queries, of_keys, world, rank))
    return made


def _halo(spans: Spans, queries: Layout, keys: Layout, world: int, rank: int) -> Halo:
    shards = [pieces(keys, world, peer) for peer in range(world)]
    needs = [needed_keys(spans, pieces(queries, world, peer)) for peer in range(world)]
    # Of each receiver and each owner, in this order.
    parts = [
        [within(needs[to], shards[of]) if to != of else [] for of in range(world)] for to in range(world)
    ]
    sizes = [[sum([piece.size for _, piece in part]) for part in row] for row in parts]
    sent = [(at, piece.size) for row in parts for at, piece in row[rank]]
    # The parts of one owner are a sequence, sharded by receiver.
    before = by_sizes(2, [sum([row[of] for row in sizes]) for of in range(world)])
    after = packed(2, world, [size for row in sizes for size in row])
    runs = [*shards[rank], *[piece for part in parts[rank] for _, piece in part]]
    ends = itertools.accumulate([run.size for run in runs], initial=0)
    placed = sorted([(run.start, at, run) for at, run in zip(ends, runs, strict=False) if run.size > 0])
    order = tuple([(at, run.size) for _, at, run in placed])
    return Halo(tuple(sent), pair(before, after), order, tuple([run for _, _, run in placed]))


def within(intervals: Sequence[tuple[int, int]], held: Sequence[Piece]) -> list[tuple[int, Piece]]:
    """Return the parts of intervals that runs hold: (where in the local tensor, the part)."""
    found, at = [], 0
    for start, size, sequence in held:
        for first, end in intervals:
            low, high = max(first, start), min(end, start + size)
            if low < high:
                found.append((at + low - start, Piece(low, high - low, sequence)))
        at += size
    return found


def round_by(spans: Spans, layout: Layout, world: int, rank: int, blocks: BlocksMaker) -> Round:
    """Return a ring in which only the keys that spans leave go round.

    Steps in which no rank needs keys are left out.
    """
    held, shifts = spans.remember(
        ("shifts", layout, world, rank, tiles.TILE), lambda: _shifts(spans, layout, world, rank)
    )
    runs = pieces(layout, world, rank)
    return Round(tuple([blocks(runs, keys) for keys in held]), shifts, pair(layout, WHOLE))


def _shifts(
    spans: Spans, layout: Layout, world: int, rank: int
) -> tuple[list[Sequence[Piece]], tuple[Shift, ...]]:
    """Return the runs of keys that a rank has in each step, and how they come."""
    shards = [pieces(layout, world, peer) for peer in range(world)]
    needs = [needed_keys(spans, shards[peer]) for peer in range(world)]
    held: list[Sequence[Piece]] = [shards[rank]]
    shifts = []
    for step in range(1, world):
        sent = [within(needs[(peer + step) % world], shards[peer]) for peer in range(world)]
        sizes = [sum([piece.size for _, piece in part]) for part in sent]
        if not any(sizes):
            continue
        received = [sizes[(peer - step) % world] for peer in range(world)]
        shard = pair(by_sizes(2, sizes), rotated(2, sizes, step))
        gradient = pair(by_sizes(2, received), rotated(2, received, world - step))
        own = tuple([(at, piece.size) for at, piece in sent[rank]])
        shifts.append(Shift(own, shard, gradient))
        held.append([piece for _, piece in sent[(rank - step) % world]])
    return held, tuple(shifts)
