# SPDX-License-Identifier: Apache-2.0
"""Gather listed pieces of a sharded dim: what each rank wants, which may overlap, in one exchange.

All ranks know what every rank holds and wants, so that no sizes are exchanged. What a rank has itself stays.
The gradient of a piece is added at its owner.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .layouts import Args, Layout, Piece, by_receiver, pieces, shards, total_of

# (start, size) along a dim, of the whole or of a shard.
Interval = tuple[int, int]
# Instead of an interval's start: it has zeros.
ZEROS = -1
# Instead of how much longer a run is: it goes on at its document's other end.
AROUND = -1


class GatherPlan(NamedTuple):
    """What one rank sends and receives, so that it has the pieces that it wants.

    Attributes:
        sent: the parts of its shard that others want, by receiver.
        sizes: how much each receiver wants of each owner's shard, receiver by receiver.
        order: the parts of its shard, and of what it receives behind it, that make up the result; those that
            begin at ZEROS are zeros. A received item is in one of them at most.
    """

    sent: tuple[Interval, ...]
    sizes: tuple[int, ...]
    order: tuple[Interval, ...]

    def args(self, dim: int, world: int) -> Args:
        """Return the layouts of the exchange: of what each rank sends, sharded by receiver."""
        return by_receiver(dim, world, self.sizes)


def placed(runs: Iterable[Piece]) -> list[tuple[int, Piece]]:
    """Return runs that lie one behind the other, but for empty ones, each with its place."""
    found, at = [], 0
    for run in runs:
        if run.size > 0:
            found.append((at, run))
        at += run.size
    return found


class Holders:
    """The runs that all ranks hold, in the order of the sequence."""

    def __init__(self, of_ranks: Sequence[Sequence[Piece]]) -> None:
        self._runs = sorted(
            [(run, owner, at) for owner, runs in enumerate(of_ranks) for at, run in placed(runs)]
        )
        self._ends = [run.start + run.size for run, _, _ in self._runs]

    def parts(self, start: int, size: int) -> list[tuple[int, int, Piece]]:
        """Return the parts of an interval, in order: the owner, the place in its shard, and the part."""
        parts = []
        for number in range(bisect.bisect_right(self._ends, start), len(self._runs)):
            run, owner, at = self._runs[number]
            if run.start >= start + size:
                break
            low, high = max(start, run.start), min(start + size, self._ends[number])
            parts.append((owner, at + low - run.start, Piece(low, high - low, run.sequence)))
        return parts


def plan_pieces(
    of_ranks: Sequence[Sequence[Piece]], wanted: Sequence[Sequence[Interval]], rank: int
) -> GatherPlan:
    """Return a rank's plan.

    of_ranks: the runs that each rank holds. wanted: what each rank wants.
    """
    world, sent, holders = len(of_ranks), [], Holders(of_ranks)
    sizes = [0] * (world * world)
    # Of this rank's pieces: (owner, place in its shard or in what it sends to this rank, size).
    found: list[tuple[int, int, int]] = []
    for receiver, listed in enumerate(wanted):
        for start, size in listed:
            if start == ZEROS:
                if receiver == rank and size > 0:
                    found.append((ZEROS, 0, size))
                continue
            for owner, place, part in holders.parts(start, size):
                cell = receiver * world + owner
                if receiver == rank:
                    found.append((owner, place if owner == rank else sizes[cell], part.size))
                if owner != receiver:
                    sizes[cell] += part.size
                    if owner == rank:
                        sent.append((place, part.size))
    own = sum([run.size for run in of_ranks[rank]])
    starts = list(itertools.accumulate(sizes[rank * world : (rank + 1) * world], initial=own))
    order = [
        (at if owner in (rank, ZEROS) else starts[owner] + at, size) if owner != ZEROS else (ZEROS, size)
        for owner, at, size in found
    ]
    return GatherPlan(tuple(sent), tuple(sizes), tuple(order))


# ---- what a halo and a shift want ----


def plan_runs(layout: Layout, documents: bool, world: int, rank: int, offset: int, more: int) -> GatherPlan:
    """Return the plan of each run, moved by an offset and longer by `more`; zeros beyond its document's ends.

    more: or AROUND.
    documents: whether the sequences of a packed layout are apart; else the whole is one.
    """
    held = shards(layout, world)
    ends = _ends(held) if documents else {0: (0, total_of(layout))}
    wanted: list[list[Interval]] = []
    for runs in held:
        listed: list[Interval] = []
        for run in runs:
            if run.size > 0:
                low, high = ends[run.sequence if documents else 0]
                start = run.start + offset
                if more == AROUND:
                    listed += around(start, run.size, low, high)
                else:
                    listed += within(start, run.size + more, low, high)
        wanted.append(listed)
    return plan_pieces(held, wanted, rank)


remembered_plan = functools.lru_cache(256)(plan_runs)


def runs_in_halo(runs: Sequence[Piece], before: int, after: int) -> list[Interval]:
    """Return where the runs are among runs with their halos."""
    found, at = [], 0
    for run in runs:
        if run.size > 0:
            found.append((at + before, run.size))
            at += before + run.size + after
    return found


def _ends(held: Sequence[Sequence[Piece]]) -> dict[int, tuple[int, int]]:
    """Return where each packed sequence begins and ends, of which some rank may hold nothing."""
    found: dict[int, tuple[int, int]] = {}
    for start, size, sequence in itertools.chain(*held):
        low, high = found.get(sequence, (start, start + size))
        found[sequence] = min(low, start), max(high, start + size)
    return found


class Fragment(NamedTuple):
    """A run of one document's tokens on one rank.

    Attributes:
        document: a number that its document has alone.
        start: its place in the sequence.
        begin, size: its place among its rank's tokens, and its tokens.
    """

    document: int
    start: int
    begin: int
    size: int


def fragments(layout: Layout, lengths: Sequence[int], world: int, rank: int) -> list[Fragment]:
    """Return the fragments of a rank's runs; lengths: of the documents, one behind the other."""
    found: list[Fragment] = []
    ends = list(itertools.accumulate(lengths))
    for at, run in placed(pieces(layout, world, rank)):
        end = run.start + run.size
        for i in range(bisect.bisect_right(ends, run.start), len(ends)):
            low = ends[i] - lengths[i]
            if low >= end:
                break
            first, last = max(low, run.start), min(ends[i], end)
            if first < last:
                found.append(Fragment(i, first, at + first - run.start, last - first))
    return found


def in_documents(layout: Layout, lengths: Sequence[int], world: int) -> tuple[int, ...]:
    """Return the numbers of a layout of RUNS: where tokens lie, and which documents they are of."""
    held = [fragments(layout, lengths, world, rank) for rank in range(world)]
    runs = sorted([(x.start, rank, x.size) for rank, listed in enumerate(held) for x in listed])
    sizes = [sum([x.size for x in listed]) for listed in held]
    return (len(lengths), *lengths, *itertools.chain(*[run[1:] for run in runs]), *sizes)


def around(start: int, size: int, low: int, high: int) -> list[Interval]:
    """Return an interval of at most high - low whose ends are joined."""
    first = low + (start - low) % (high - low)
    ahead = min(size, high - first)
    return [(first, ahead), (low, size - ahead)]


def within(start: int, size: int, low: int, high: int) -> list[Interval]:
    """Return an interval inside of [low, high), with zeros where it is beyond."""
    first, end = min(max(start, low), high), max(min(start + size, high), low)
    if first >= end:
        return [(ZEROS, size)]
    return [(ZEROS, first - start), (first, end - first), (ZEROS, start + size - end)]
