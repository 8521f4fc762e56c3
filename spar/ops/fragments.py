# SPDX-License-Identifier: Apache-2.0
"""Fragments: the runs of one document on one rank, and which of them follows which."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch.compiler import is_dynamo_compiling

from .._exchange.gather_plan import Fragment, placed
from .._exchange.layouts import Layout, Piece, shards
from ..sequence_layout import SequenceLayout, numbers_of


class Succession(NamedTuple):
    """Which states the fragments of a rank need.

    Attributes:
        sizes: for each rank, how many of its fragments another one continues: their states are gathered.
        before: for each fragment of this rank, the numbers among all gathered ones of those before it in its
            document, in the order of the sequence.
        continued: for each fragment of this rank, whether it is gathered.
    """

    sizes: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]
    continued: tuple[bool, ...]


def fragments_of(layout: SequenceLayout, world: int, rank: int) -> tuple[list[Fragment], Succession]:
    """Return a rank's fragments, in the order of its tokens, and their succession."""
    find = _found if is_dynamo_compiling() else _remembered
    return find(numbers_of(layout, 0), layout.is_packed, world, rank)


def _found(numbers: Layout, packed: bool, world: int, rank: int) -> tuple[list[Fragment], Succession]:
    fragments = [_of_rank(runs, packed) for runs in shards(numbers, world)]
    return fragments[rank], succession(fragments, rank)


# The layers of a model ask for the same fragments.
_remembered = functools.lru_cache(maxsize=16)(_found)


def _of_rank(held: Sequence[Piece], packed: bool) -> list[Fragment]:
    """Return the fragments of the runs that a rank holds; neighbours are joined."""
    found: list[Fragment] = []
    for begin, (start, size, sequence) in placed(held):
        document, last = sequence if packed else 0, found[-1] if found else None
        if last is not None and last.document == document and last.start + last.size == start:
            found[-1] = last._replace(size=last.size + size)
        else:
            found.append(Fragment(document, start, begin, size))
    return found


def succession(
    fragments: Sequence[Sequence[Fragment]], rank: int, parents: Sequence[int] | None = None
) -> Succession:
    """Return the succession of a rank's fragments among those of all ranks.

    parents: of a prefix tree, whose documents are its segments: the number of each one's parent, or -1.
        Before a segment are all fragments on its path.
    """
    documents: dict[int, list[tuple[int, int, int]]] = {}
    for owner, of_rank in enumerate(fragments):
        for index, fragment in enumerate(of_rank):
            runs = documents.setdefault(fragment.document, [])
            at = len(runs)
            while at and fragment.start < runs[at - 1][0]:  # Dynamo sorts no symbolic ints.
                at -= 1
            runs.insert(at, (fragment.start, owner, index))
    inner = set(parents or ())
    last = {runs[-1][1:] for document, runs in documents.items() if document not in inner}
    gathered = [
        (owner, index)
        for owner, of_rank in enumerate(fragments)
        for index in range(len(of_rank))
        if (owner, index) not in last
    ]
    number = {place: i for i, place in enumerate(gathered)}
    before: dict[int, tuple[int, ...]] = {}
    paths: dict[int, tuple[int, ...]] = {-1: ()}  # of segments, with their own fragments
    # A parent is numbered before its children.
    for document in documents if parents is None else range(len(parents)):
        runs = documents[document]
        path = () if parents is None else paths[parents[document]]
        for i, (_, owner, index) in enumerate(runs):
            if owner == rank:
                before[index] = path + tuple([number[place[1:]] for place in runs[:i]])
        if document in inner:
            paths[document] = path + tuple([number[place[1:]] for place in runs])
    own = range(len(fragments[rank]))
    return Succession(
        tuple([sum([owner == peer for owner, _ in gathered]) for peer in range(len(fragments))]),
        tuple([before[index] for index in own]),
        tuple([(rank, index) in number for index in own]),
    )
