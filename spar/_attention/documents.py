# SPDX-License-Identifier: Apache-2.0
"""The keys of other ranks that documents leave a rank's queries, where documents lie on some ranks only.

All ranks know where each document lies, so that no sizes are exchanged. A rank needs keys of the documents
that it shares with others, and under causality none behind its last query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .._checks import digest
from .._exchange.gather_plan import GatherPlan as Plan, plan_pieces
from .._exchange.layouts import WHOLE, Layout, Piece, pair, shards
from .blocks import Block, blocks_of
from .halo import Sent, shifts_of
from .ring import Round

# Of a rank: a run that it holds, and where it begins among its tokens.
_Held = tuple[int, int, Piece]


class Gathered(NamedTuple):
    """What a rank gathers, and its blocks.

    Attributes:
        plan: how the keys come.
        held: which keys they are, one behind the other.
        round: the blocks of its queries and its own keys, and those of its queries and these keys.
        note: of the layout, which ranks compare: what they exchange does not show it.
    """

    plan: Plan
    held: tuple[Piece, ...]
    round: Round
    note: str


def _by_document(of_ranks: Sequence[Sequence[Piece]]) -> list[list[_Held]]:
    """Return the runs of each document that lies on several ranks, in order: (rank, place, run)."""
    documents: dict[int, list[_Held]] = {}
    for rank, runs in enumerate(of_ranks):
        at = 0
        for run in runs:
            if run.size > 0:
                documents.setdefault(run.sequence, []).append((rank, at, run))
            at += run.size
    found = [sorted(runs, key=lambda held: held[2].start) for runs in documents.values()]
    return [runs for runs in found if len({rank for rank, _, _ in runs}) > 1]


def _sent(of_ranks: Sequence[Sequence[Piece]], causal: bool) -> Sent:
    """Return the runs that ranks send to others: by owner and receiver, (place, run) in order."""
    sent: Sent = {}
    for runs in sorted(_by_document(of_ranks), key=lambda runs: runs[0][2].start):
        ends = {rank: run.start + run.size for rank, _, run in runs}
        for receiver, end in ends.items():
            for owner, at, run in runs:
                if owner != receiver and (run.start < end or not causal):
                    sent.setdefault((owner, receiver), []).append((at, run))
    return sent


def gathered_of(
    numbers: Layout, world: int, rank: int, causal: bool, plain: bool, whole_documents: bool
) -> Gathered:
    """Return what a rank gathers.

    plain: whether there is no mask. whole_documents: whether a rank's own keys are gathered, too, so that
        the keys of each document are one behind the other; then there is one step with all blocks.
    """
    of_ranks = shards(numbers, world)
    sent = _sent(of_ranks, causal)
    wanted: list[list[Piece]] = [[] for _ in range(world)]
    for (_, receiver), runs in sent.items():
        wanted[receiver] += [run for _, run in runs]
    if whole_documents:
        wanted[rank] += [run for run in of_ranks[rank] if run.size > 0]
    for pieces in wanted:
        pieces.sort()
    plan = plan_pieces(of_ranks, [[(run.start, run.size) for run in pieces] for pieces in wanted], rank)
    own = of_ranks[rank]
    keys = [wanted[rank]] if whole_documents else [own, wanted[rank]]
    steps = [tuple(blocks_of(own, step, causal, True, plain)) for step in keys]
    note = f"hash of the runs {digest(numbers):x}"
    return Gathered(plan, tuple(wanted[rank]), Round(tuple(steps)), note)


def documents_round(numbers: Layout, world: int, rank: int, causal: bool, plain: bool) -> Round:
    """Return a ring in which the keys of shared documents go round; steps without any are left out.

    plain: whether there is no mask.
    """
    of_ranks = shards(numbers, world)
    held, shifts = shifts_of(_sent(of_ranks, causal), world, rank)
    keys: list[Sequence[Piece]] = [of_ranks[rank], *held]
    steps: list[tuple[Block, ...]] = [
        tuple(blocks_of(of_ranks[rank], step, causal, True, plain)) for step in keys
    ]
    return Round(tuple(steps), shifts, pair(numbers, WHOLE))
