# SPDX-License-Identifier: Apache-2.0
"""Fragments: the runs of one document on one rank, and which of them follows which."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch.compiler import is_dynamo_compiling

from .._exchange.layouts import Layout, Piece, shards
from ..sequence_layout import SequenceLayout, numbers_of

Lengths = tuple[tuple[int, ...], ...]


class Fragment(NamedTuple):
    """A run of one document's tokens on one rank.

    Attributes:
        row: the sample that it is in; None: it is one of all samples.
        document: a number that its document has alone.
        start: its place in the sequence.
        begin, size: its place among its rank's tokens, and its tokens.
    """

    row: int | None
    document: int
    start: int
    begin: int
    size: int


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


def fragments_of(
    layout: SequenceLayout, world: int, rank: int, documents: Lengths | None = None
) -> tuple[list[Fragment], Succession]:
    """Return a rank's fragments, sample by sample in the order of its tokens, and their succession.

    documents: the lengths of the documents in each sample, or one entry for all samples. None: there are
        none, or the layout has them.
    """
    find = _found if is_dynamo_compiling() else _remembered
    return find(numbers_of(layout, 0), layout.is_packed, world, rank, documents)


def _found(
    numbers: Layout, packed: bool, world: int, rank: int, documents: Lengths | None
) -> tuple[list[Fragment], Succession]:
    fragments = [_of_rank(runs, packed, documents) for runs in shards(numbers, world)]
    return fragments[rank], _succession(fragments, rank)


# The layers of a model ask for the same fragments.
_remembered = functools.lru_cache(maxsize=16)(_found)


def _of_rank(held: Sequence[Piece], packed: bool, documents: Lengths | None) -> list[Fragment]:
    """Return the fragments of the runs that a rank holds; neighbours are joined."""
    runs = [run for run in held if run.size > 0]
    if documents is None:
        return _joined(None, [(run.sequence if packed else 0, run) for run in runs])
    found: list[Fragment] = []
    first = 0
    for row, lengths in enumerate(documents):
        ends = [*itertools.accumulate(lengths)]
        numbered = [(first + document, part) for run in runs for document, part in _cut(run, ends)]
        found += _joined(row if len(documents) > 1 else None, numbered)
        first += len(lengths)
    return found


def _cut(run: Piece, ends: Sequence[int]) -> Iterator[tuple[int, Piece]]:
    """Cut a run where documents end."""
    at, last = run.start, run.start + run.size
    for document, end in enumerate(ends):
        if at < min(end, last):
            yield document, Piece(at, min(end, last) - at, 0)
            at = min(end, last)


def _joined(row: int | None, runs: Sequence[tuple[int, Piece]]) -> list[Fragment]:
    found: list[Fragment] = []
    at = 0
    for document, (start, size, _) in runs:
        last = found[-1] if found else None
        if last is not None and last.document == document and last.start + last.size == start:
            found[-1] = last._replace(size=last.size + size)
        else:
            found.append(Fragment(row, document, start, at, size))
        at += size
    return found


def _succession(fragments: Sequence[Sequence[Fragment]], rank: int) -> Succession:
    """Return the succession of a rank's fragments among those of all ranks."""
    documents: dict[int, list[tuple[int, int, int]]] = {}
    for owner, of_rank in enumerate(fragments):
        for index, fragment in enumerate(of_rank):
            runs = documents.setdefault(fragment.document, [])
            at = len(runs)
            while at and fragment.start < runs[at - 1][0]:  # Dynamo sorts no symbolic ints.
                at -= 1
            runs.insert(at, (fragment.start, owner, index))
    last = {runs[-1][1:] for runs in documents.values()}
    gathered = [
        (owner, index)
        for owner, of_rank in enumerate(fragments)
        for index in range(len(of_rank))
        if (owner, index) not in last
    ]
    number = {place: i for i, place in enumerate(gathered)}
    before: dict[int, tuple[int, ...]] = {}
    for runs in documents.values():
        for i, (_, owner, index) in enumerate(runs):
            if owner == rank:
                before[index] = tuple([number[place[1:]] for place in runs[:i]])
    own = range(len(fragments[rank]))
    return Succession(
        tuple([sum([owner == peer for owner, _ in gathered]) for peer in range(len(fragments))]),
        tuple([before[index] for index in own]),
        tuple([(rank, index) in number for index in own]),
    )
