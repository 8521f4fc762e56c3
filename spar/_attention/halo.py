# SPDX-License-Identifier: Apache-2.0
"""The keys of other ranks that spans leave a rank's queries: which they are, and how they come.

All ranks know the spans, so that each derives what every rank needs: no sizes are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .._exchange.gather_plan import GatherPlan as Plan, plan_pieces
from .._exchange.layouts import WHOLE, Layout, Piece, by_sizes, pair, pieces, rotated, shards
from . import tiles
from .blocks import Block
from .ring import Round, Shift
from .spans import Spans
from .tiles import needed_keys, union

# By owner and receiver: the runs that go from one to the other, in order, with their places among the owner's
# tokens.
Sent = dict[tuple[int, int], list[tuple[int, Piece]]]
# Finds the blocks of runs of queries and of keys.
BlocksMaker = Callable[[Sequence[Piece], Sequence[Piece]], tuple[Block, ...]]


class Halo(NamedTuple):
    """What a rank gathers so that it holds all keys that it needs.

    Attributes:
        plan: how they come.
        held: which keys they are, one behind the other.
    """

    plan: Plan
    held: tuple[Piece, ...]


def halo_of(spans: Spans, queries: Layout, keys: Layout, world: int, rank: int) -> Halo:
    """Return the halo of a rank; its own keys stay, whether its queries attend to them or not."""
    key = "halo", queries, keys, world, rank, tiles.TILE
    made: Halo = spans.remember(key, lambda: _halo(spans, queries, keys, world, rank))
    return made


def _halo(spans: Spans, queries: Layout, keys: Layout, world: int, rank: int) -> Halo:
    held_by = shards(keys, world)
    wanted = []
    for peer in range(world):
        own = [(run.start, run.start + run.size) for run in held_by[peer] if run.size > 0]
        joined = union([*own, *needed_keys(spans, pieces(queries, world, peer))])
        wanted.append([(first, end - first) for first, end in joined])
    held = tuple([Piece(first, size, 0) for first, size in wanted[rank]])
    return Halo(plan_pieces(held_by, wanted, rank), held)


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
    of_ranks = shards(layout, world)
    needs = [needed_keys(spans, runs) for runs in of_ranks]
    sent = {
        (owner, receiver): within(needs[receiver], of_ranks[owner])
        for owner in range(world)
        for receiver in range(world)
        if owner != receiver
    }
    held, shifts = shifts_of(sent, world, rank)
    return [of_ranks[rank], *held], shifts


def shifts_of(sent: Sent, world: int, rank: int) -> tuple[list[Sequence[Piece]], tuple[Shift, ...]]:
    """Return the runs of keys that a rank receives in each step, and how; steps without any are left out."""
    held: list[Sequence[Piece]] = []
    shifts = []
    for step in range(1, world):
        parts = [sent.get((peer, (peer + step) % world), []) for peer in range(world)]
        sizes = [sum([piece.size for _, piece in part]) for part in parts]
        if not any(sizes):
            continue
        received = [sizes[(peer - step) % world] for peer in range(world)]
        shard = pair(by_sizes(2, sizes), rotated(2, sizes, step))
        gradient = pair(by_sizes(2, received), rotated(2, received, world - step))
        own = tuple([(at, piece.size) for at, piece in parts[rank]])
        shifts.append(Shift(own, shard, gradient))
        held.append([piece for _, piece in parts[(rank - step) % world]])
    return held, tuple(shifts)
