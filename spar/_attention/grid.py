# SPDX-License-Identifier: Apache-2.0
"""Ranks as rows and columns, and how tokens get from the ranks that own them to those that attend to them.

A row puts the queries of its ranks together. Each rank knows what every rank holds and needs: no sizes are
exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .._exchange.gather_plan import Interval, placed
from .._exchange.layouts import EVEN, SIZES, Layout, Piece, shards
from ..ops.heads import heads_of_ranks
from . import tiles
from .spans import Spans
from .travel import Needed, by_documents, by_lengths, by_spans, intervals, joined_parts


class Grid(NamedTuple):
    """Ranks in rows and columns.

    Attributes:
        rows, columns: how many.
        spread: whether a row has ranks from all over the group, so that rows of an even layout have equal
            work under causality. Otherwise a row's ranks are neighbours.
    """

    rows: int
    columns: int
    spread: bool

    def place(self, rank: int) -> tuple[int, int]:
        """Return a rank's row and column."""
        if not self.spread:
            return divmod(rank, self.columns)
        # Every second time from the last row to the first one; columns are shifted from row to row.
        block, at = divmod(rank, self.rows)
        row = self.rows - 1 - at if block % 2 else at
        return row, (block + row * max(self.columns // self.rows, 1)) % self.columns


def grid_of(shape: tuple[int, int], queries: Layout, is_causal_alone: bool) -> Grid:
    """Return the grid of (rows, columns) for a layout of the queries.

    is_causal_alone: whether causality is all that says which keys a query attends to.
    """
    # Rows of a zigzag layout have equal work in any case, and those of neighbours need the fewest keys.
    return Grid(*shape, is_causal_alone and queries[1] in (EVEN, SIZES))


def fewest_bytes_2d(heads: int, key_heads: int, world: int) -> tuple[int, int]:
    """Return the (rows, columns) by which queries and outputs of a row, and keys of a column, are fewest."""
    shapes = [(world // columns, columns) for columns in range(1, world + 1) if world % columns == 0]
    # Of equal ones the squarest, whose ranks hold least.
    return min(shapes, key=lambda shape: ((shape[1] - 1) * heads + (shape[0] - 1) * key_heads, max(shape)))


def fewest_bytes_by_heads(heads: int, key_heads: int, world: int) -> tuple[int, int]:
    """Return the (rows, columns) that move the fewest heads, of those whose ranks have equally many."""

    def moved(shape: tuple[int, int]) -> float:
        columns = shape[1]
        keys = sum(heads_of_ranks(heads, key_heads, columns).keys)
        return ((columns - 1) * heads + (world - 1) * keys) / columns

    counts = [columns for columns in range(1, world + 1) if world % columns == heads % columns == 0]
    return min([(world // columns, columns) for columns in counts], key=moved)


# ---- tokens ----


class Shares(NamedTuple):
    """Which tokens of a sharded sequence a rank sends to others, and which it then has.

    Attributes:
        peers: with which ranks it may exchange any, itself among them.
        sent: the parts of its shard that each of them gets.
        sizes: how many tokens each receiver gets of each owner, receiver by receiver.
        order: the parts of what it received, owner by owner, in the order of the sequence.
        back: the inverse: the parts of these in the order of the owners.
        held: which tokens they are.
    """

    peers: tuple[int, ...]
    sent: tuple[tuple[Interval, ...], ...]
    sizes: tuple[int, ...]
    order: tuple[Interval, ...]
    back: tuple[Interval, ...]
    held: tuple[Piece, ...]


def _shares(world: int, rank: int, peers: Sequence[Sequence[int]], needed: Needed) -> Shares:
    """Return what a rank exchanges if each owner sends what is needed to each of its peers."""
    sizes = [0] * (world * world)
    for receiver in range(world):
        for owner in peers[receiver]:
            sizes[receiver * world + owner] = sum([run.size for _, run in needed(owner, receiver)])
    received = placed([run for owner in peers[rank] for _, run in needed(owner, rank)])
    items = sorted(received, key=lambda item: item[1])
    order = intervals(items)
    places = placed([Piece(at, size, 0) for at, size in order])
    back = sorted([(run.start, at, run.size) for at, run in places])
    return Shares(
        tuple(peers[rank]),
        tuple([joined_parts(intervals(needed(rank, peer))) for peer in peers[rank]]),
        tuple(sizes),
        joined_parts(order),
        joined_parts([(at, size) for _, at, size in back]),
        tuple([run for _, run in items]),
    )


class Tokens(NamedTuple):
    """The queries that a rank gets from the ranks of its row, and the keys that these queries need."""

    queries: Shares
    keys: Shares


def tokens_of(
    layouts: tuple[Layout, Layout],
    grid: Grid,
    world: int,
    rank: int,
    causal: bool,
    listed: bool,
    by_column: bool,
    spans: Spans | None = None,
) -> Tokens:
    """Return a rank's queries and keys.

    Args:
        layouts: of the queries and of the keys.
        causal: whether keys behind all queries are not needed.
        listed: whether documents lie on some ranks only.
        by_column: whether keys of other columns are not needed.
        spans: which keys are needed; None: `causal` and documents say it.
    """
    places = [grid.place(peer) for peer in range(world)]
    queries, keys = (shards(layout, world) for layout in layouts)
    rows: list[list[Piece]] = [[] for _ in range(grid.rows)]
    for (row, _), runs in zip(places, queries, strict=True):
        rows[row] += runs
    rows = [sorted(runs) for runs in rows]
    of_receivers = [rows[row] for row, _ in places]
    if spans is not None:
        needed = by_spans(spans, of_receivers, keys)
    elif listed:
        needed = by_documents(of_receivers, keys, causal)
    else:
        needed = by_lengths(of_receivers, keys, causal)
    of_queries, of_keys = ([placed(runs) for runs in held] for held in (queries, keys))

    def all_queries(owner: int, receiver: int) -> Sequence[tuple[int, Piece]]:
        return of_queries[owner]

    def keys_and_own(owner: int, receiver: int) -> Sequence[tuple[int, Piece]]:
        return of_keys[owner] if owner == receiver else needed(owner, receiver)

    def with_same(index: int) -> list[list[int]]:
        return [[peer for peer in range(world) if places[peer][index] == place[index]] for place in places]

    of_ranks = with_same(1) if by_column else [list(range(world))] * world
    return Tokens(
        _shares(world, rank, with_same(0), all_queries), _shares(world, rank, of_ranks, keys_and_own)
    )


def tokens_by_spans(
    spans: Spans, layouts: tuple[Layout, Layout], grid: Grid, world: int, rank: int, by_column: bool
) -> Tokens:
    """Return a rank's queries and keys, which the spans remember."""
    place = grid, world, rank
    key = "grid", *layouts, *place, by_column, tiles.TILE
    return spans.remember(key, lambda: tokens_of(layouts, *place, False, False, by_column, spans))
