# SPDX-License-Identifier: Apache-2.0
"""Which keys of other ranks each rank needs, and how they travel: gathered at once, or shifted round a ring.

What is needed follows from lengths, from documents or from spans. All ranks know these, and where each token
lies, so that each rank derives what every rank needs: no sizes are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .._exchange.gather_plan import GatherPlan, Holders, Interval, placed
from .._exchange.layouts import RUNS, Args, Layout, Piece, by_sizes, pair, rotated, shards
from . import tiles
from .spans import Spans

# A run, and where it begins among its owner's tokens.
Placed = tuple[int, Piece]
# Returns the runs of keys that go from an owner to a receiver, in order: of (owner, receiver).
Needed = Callable[[int, int], Sequence[Placed]]


class Gathered(NamedTuple):
    """What a rank gathers.

    Attributes:
        plan: how the keys come.
        held: which keys they are, one behind the other.
    """

    plan: GatherPlan
    held: tuple[Piece, ...]


class Shift(NamedTuple):
    """How a step of a ring gets its keys [B, K, T, D] from their owner.

    Attributes:
        parts: this rank's keys that go to the rank that attends to them in this step: (first, number), in
            order.
        shard: the layouts of the keys before and after the exchange.
        gradient: likewise those of their gradient, which goes back.
    """

    parts: tuple[tuple[int, int], ...]
    shard: Args
    gradient: Args


class Shifts(NamedTuple):
    """What a rank receives in a ring. A step in which no rank needs keys is left out.

    Attributes:
        held: the keys of each step, of which the first are this rank's own.
        shifts: how those of each step but the first come.
    """

    held: tuple[Sequence[Piece], ...]
    shifts: tuple[Shift, ...]


# ---- what is needed ----


def by_lengths(
    of_queries: Sequence[Sequence[Piece]], of_keys: Sequence[Sequence[Piece]], causal: bool
) -> Needed:
    """Need all keys; under causality the runs of each shard that are not behind all queries of a rank.

    At least one key, if there are any: torch.compile drops an exchange from which a rank receives no element,
    and its peers would wait for it. Runs are in the order of the sequence, equal or apart.
    """
    held, of_receivers = [placed(runs) for runs in of_keys], [placed(runs) for runs in of_queries]

    def needed(owner: int, receiver: int) -> Sequence[Placed]:
        keys, queries = held[owner], of_receivers[receiver]
        if not causal or not keys:
            return keys
        end = queries[-1][1].start + queries[-1][1].size if queries else 0
        return [key for key in keys if key[1].start < end] or [(0, Piece(keys[0][1].start, 1, 0))]

    return needed


def by_documents(
    of_queries: Sequence[Sequence[Piece]], of_keys: Sequence[Sequence[Piece]], causal: bool
) -> Needed:
    """Need the keys of shared documents, under causality none behind a rank's last query in each."""
    keys: dict[int, list[tuple[int, int, Piece]]] = {}
    for rank, runs in enumerate(of_keys):
        for at, run in placed(runs):
            keys.setdefault(run.sequence, []).append((rank, at, run))
    ends: dict[int, dict[int, int]] = {}
    for rank, runs in enumerate(of_queries):
        for _, run in placed(runs):
            ends.setdefault(run.sequence, {})[rank] = run.start + run.size
    sent: dict[tuple[int, int], list[Placed]] = {}
    for document, receivers in sorted(ends.items()):
        for receiver, end in receivers.items():
            for owner, at, run in keys.get(document, ()):
                if owner != receiver and (run.start < end or not causal):
                    sent.setdefault((owner, receiver), []).append((at, run))
    return lambda owner, receiver: sent.get((owner, receiver), ())


def by_spans(spans: Spans, queries: Sequence[Sequence[Piece]], keys: Sequence[Sequence[Piece]]) -> Needed:
    """Need the keys to which spans let some query of a rank attend."""
    holders, of_runs = Holders(keys), {id(runs): runs for runs in queries}
    # Once for ranks that have one list of queries.
    needed = {key: tiles.needed_keys(spans, runs) for key, runs in of_runs.items()}
    sent: dict[tuple[int, int], list[Placed]] = {}
    for receiver, runs in enumerate(queries):
        for first, end in needed[id(runs)]:
            for owner, at, part in holders.parts(first, end - first):
                if owner != receiver:
                    sent.setdefault((owner, receiver), []).append((at, part))
    return lambda owner, receiver: sent.get((owner, receiver), ())


# ---- gathered at once ----


def gathered_by_documents(numbers: Layout, world: int, rank: int, causal: bool, with_own: bool) -> Gathered:
    """Gather the keys of documents that a rank shares with others.

    with_own: whether its own keys are among them, so that those of each document are one behind the other.
    """
    of_ranks = shards(numbers, world)
    return _gathered(of_ranks, rank, by_documents(of_ranks, of_ranks, causal), with_own)


def gathered_by_spans(spans: Spans, queries: Layout, keys: Layout, world: int, rank: int) -> Gathered:
    """Gather the keys that spans leave a rank's queries, and its own, whether these attend to them or not."""

    def make() -> Gathered:
        held = shards(keys, world)
        return _gathered(held, rank, by_spans(spans, shards(queries, world), held), True)

    return spans.remember(("gathered", queries, keys, world, rank, tiles.TILE), make)


def _gathered(of_ranks: Sequence[Sequence[Piece]], rank: int, needed: Needed, with_own: bool) -> Gathered:
    ranks = range(len(of_ranks))
    sent = [part for peer in ranks if peer != rank for part in intervals(needed(rank, peer))]
    sizes = [
        0 if owner == receiver else sum([run.size for _, run in needed(owner, receiver)])
        for receiver in ranks
        for owner in ranks
    ]
    # What is received lies behind the shard, owner by owner.
    received = [run for owner in ranks if owner != rank for _, run in needed(owner, rank)]
    first = 0 if with_own else len(placed(of_ranks[rank]))
    items = sorted(placed([*of_ranks[rank], *received])[first:], key=lambda item: item[1])
    plan = GatherPlan(tuple(sent), tuple(sizes), tuple(intervals(items)))
    return Gathered(plan, tuple([run for _, run in items]))


# ---- round a ring ----


def shifts_by_runs(numbers: Layout, world: int, rank: int, causal: bool, packed: bool) -> Shifts:
    """Shift the keys of shared documents where these lie on some ranks only, else those of each shard.

    packed: whether there are documents; where these lie on all ranks, all keys of a shard travel.
    """
    of_ranks = shards(numbers, world)
    if numbers[1] == RUNS:
        return _shifts(of_ranks, rank, by_documents(of_ranks, of_ranks, causal))
    return _shifts(of_ranks, rank, by_lengths(of_ranks, of_ranks, causal and not packed))


def shifts_by_spans(spans: Spans, layout: Layout, world: int, rank: int) -> Shifts:
    """Shift the keys that spans leave the queries of each rank."""

    def make() -> Shifts:
        of_ranks = shards(layout, world)
        return _shifts(of_ranks, rank, by_spans(spans, of_ranks, of_ranks))

    return spans.remember(("shifts", layout, world, rank, tiles.TILE), make)


def _shifts(of_ranks: Sequence[Sequence[Piece]], rank: int, needed: Needed) -> Shifts:
    world = len(of_ranks)
    held, shifts = [of_ranks[rank]], []
    for step in range(1, world):
        sent = [needed(owner, (owner + step) % world) for owner in range(world)]
        sizes = [sum([run.size for _, run in runs]) for runs in sent]
        if not any(sizes):
            continue
        received = [sizes[(receiver - step) % world] for receiver in range(world)]
        shard = pair(by_sizes(2, sizes), rotated(2, sizes, step))
        gradient = pair(by_sizes(2, received), rotated(2, received, world - step))
        shifts.append(Shift(joined_parts(intervals(sent[rank])), shard, gradient))
        held.append([run for _, run in sent[(rank - step) % world]])
    return Shifts(tuple(held), tuple(shifts))


def intervals(runs: Sequence[Placed]) -> list[Interval]:
    """Return where runs lie among their owner's tokens."""
    return [(at, run.size) for at, run in runs]


def joined_parts(parts: Sequence[Interval]) -> tuple[Interval, ...]:
    """Join parts that adjoin."""
    joined: list[Interval] = []
    for at, size in parts:
        if joined and sum(joined[-1]) == at:
            joined[-1] = joined[-1][0], joined[-1][1] + size
        else:
            joined.append((at, size))
    return tuple(joined)
