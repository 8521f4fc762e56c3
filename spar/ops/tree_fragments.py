# SPDX-License-Identifier: Apache-2.0
"""Fragments of a prefix tree: what recurrences and convolutions of a rank's tokens have before them."""

from __future__ import annotations

import bisect

from .._exchange.gather_plan import ZEROS, Fragment, GatherPlan, Interval, fragments, plan_pieces
from .._exchange.layouts import shards
from ..sequence_layout import numbers_of
from .fragments import Succession, succession
from .tree_row import TreeRow


def fragments_of_tree(tree: TreeRow, world: int, rank: int) -> tuple[list[Fragment], Succession]:
    """Return the runs of one segment that a rank holds, in the order of its tokens, and their succession.

    A fragment's document is its segment. Before it are all fragments on its path.
    """
    return tree.remember(("fragments", rank), lambda: _fragments(tree, world, rank))


def _fragments(tree: TreeRow, world: int, rank: int) -> tuple[list[Fragment], Succession]:
    of_ranks = _of_ranks(tree, world)
    return of_ranks[rank], succession(of_ranks, rank, [segment.parent for segment in tree.segments])


def _of_ranks(tree: TreeRow, world: int) -> list[list[Fragment]]:
    numbers, sizes = numbers_of(tree.layout, 0), [segment.size for segment in tree.segments]
    return [fragments(numbers, sizes, world, rank) for rank in range(world)]


def plan_ancestors(tree: TreeRow, before: int, world: int, rank: int) -> GatherPlan:
    """Return what gathers each of a rank's fragments behind `before` of its ancestors; zeros before roots."""
    return tree.remember(("ancestors", before, rank), lambda: _plan(tree, before, world, rank))


def _plan(tree: TreeRow, before: int, world: int, rank: int) -> GatherPlan:
    wanted = [
        [interval for x in found for interval in (*_ancestors(tree, x.start, before), (x.start, x.size))]
        for found in _of_ranks(tree, world)
    ]
    return plan_pieces(shards(numbers_of(tree.layout, 0), world), wanted, rank)


def _ancestors(tree: TreeRow, place: int, count: int) -> list[Interval]:
    """Return the runs of the nearest ancestors of a place, the farthest first; zeros stand before a root."""
    found: list[Interval] = []
    number = bisect.bisect_right(tree.segments, place, key=lambda segment: segment.first) - 1
    end = place
    while count and number >= 0:
        segment = tree.segments[number]
        size = min(count, end - segment.first)
        if size:
            found.append((end - size, size))
        count -= size
        number = segment.parent
        end = sum(tree.segments[number][:2]) if number >= 0 else 0
    return [*([(ZEROS, count)] if count else []), *reversed(found)]
