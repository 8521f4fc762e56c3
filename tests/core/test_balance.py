# SPDX-License-Identifier: Apache-2.0
"""Which ranks hold which documents: bounds of tokens, of work and of what is cut. No rank is started."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from spar import _C
from spar._exchange.layouts import RUNS, shards

WORLDS = (1, 2, 3, 4, 8, 16)


class Balanced:
    """The runs of documents, read from the numbers of a layout.

    owners: the rank of each token, document by document.
    """

    def __init__(self, lengths: Sequence[int], world: int, tolerance: float = 0.05) -> None:
        self.lengths, self.world = lengths, world
        self.numbers = _C.balance(tuple(lengths), world, tolerance)
        self.owners: list[list[int]] = [[-1] * length for length in lengths]
        begins = [0, *itertools.accumulate(lengths)]
        for rank, runs in enumerate(shards((0, RUNS, *self.numbers), world)):
            for start, size, document in runs:
                for place in range(start - begins[document], start - begins[document] + size):
                    assert self.owners[document][place] == -1
                    self.owners[document][place] = rank
        assert all(rank >= 0 for owners in self.owners for rank in owners)

    @property
    def parts(self) -> int:
        return sum(len(set(owners)) for owners in self.owners)

    def worst(self) -> tuple[float, float]:
        """Return the greatest tokens, and pairs of a query and a key under causality, in means."""
        tokens, pairs = [0] * self.world, [0] * self.world
        for owners in self.owners:
            for place, rank in enumerate(owners):
                tokens[rank] += 1
                pairs[rank] += place + 1
        return max(tokens) * self.world / sum(tokens), max(pairs) * self.world / sum(pairs)

    def cut(self) -> int:
        """Return the tokens of documents that lie on several ranks."""
        return sum(len(owners) for owners in self.owners if len(set(owners)) > 1)

    def moved(self) -> int:
        """Return the keys that ranks need of others at most, those of documents of which they hold a part."""
        return sum(len(owners) * (len(set(owners)) - 1) for owners in self.owners if owners)


def log_normal(draw: random.Random, total: int) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(int(draw.lognormvariate(6.5, 1.2)) + 1)
    return lengths


def test_any_lengths_are_assigned_once() -> None:
    draw = random.Random(0)
    for _ in range(300):
        world = draw.randint(1, 9)
        most = draw.choice([1, 3, 40])
        lengths = [draw.randint(0, most) for _ in range(draw.randint(0, 20))]
        found = Balanced(lengths, world, draw.choice([0.0, 0.05, 1.0]))
        assert found.numbers[: 1 + len(lengths)] == (len(lengths), *lengths)
        if world == 1:
            assert found.parts == sum(length > 0 for length in lengths)


def test_each_rank_has_a_token_where_there_are_enough() -> None:
    draw = random.Random(1)
    for _ in range(300):
        world = draw.randint(2, 6)
        lengths = [draw.randint(0, 60) for _ in range(draw.randint(1, 12))]
        if sum(lengths) >= 4 * world:
            found = Balanced(lengths, world)
            assert min(found.numbers[-world:]) > 0, (lengths, world, found.numbers)


@pytest.mark.parametrize(
    ("world", "most_cut", "most_moved"), [(2, 0.1, 0.1), (8, 0.14, 0.05), (16, 0.27, 0.1)]
)
def test_log_normal_lengths_are_balanced_and_rarely_cut(
    world: int, most_cut: float, most_moved: float
) -> None:
    """Beside a packed layout, whose ranks need all keys of the others."""
    draw = random.Random(2)
    cut = moved = total = 0
    for _ in range(5):
        lengths = log_normal(draw, 262_144)
        found = Balanced(lengths, world)
        assert max(found.worst()) < 1.051, found.worst()
        cut, moved, total = cut + found.cut(), moved + found.moved(), total + sum(lengths)
    assert cut < most_cut * total
    assert moved < most_moved * total * (world - 1)


def test_uniform_lengths_stay_whole() -> None:
    draw = random.Random(3)
    for world in (2, 4, 8, 16):
        lengths = [draw.randint(10, 2000) for _ in range(260)]
        found = Balanced(lengths, world)
        assert max(found.worst()) < 1.051 and found.cut() < 0.03 * sum(lengths)


def test_one_document_is_cut_among_all_ranks_from_both_ends() -> None:
    for world in WORLDS:
        found = Balanced([1000 * world], world)
        assert set(found.owners[0]) == set(range(world))
        assert found.owners[0] == found.owners[0][::-1]
        assert max(found.worst()) < 1.01


def test_equal_documents_for_each_rank_stay_whole() -> None:
    for world in WORLDS:
        found = Balanced([50] * 3 * world, world, 0.0)
        assert found.cut() == 0 and found.worst() == (1.0, 1.0)
