# SPDX-License-Identifier: Apache-2.0
"""The blocks of a rank's queries and of any keys that spans leave, found in tiles of queries.

For the queries of a tile, the least and the greatest of their first keys and ends say which keys all of them
attend to, and which some do. It takes as long as the spans are, whatever the number of pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._exchange.gather_plan import Holders, placed
from .._exchange.layouts import Piece
from .blocks import Block
from .spans import Spans

# Queries whose keys are found together: fewer are more calls of kernels, more compute more masked scores.
TILE = 256
# A full part shorter than so many tiles is not worth a block of its own.
_SHORT = 4
_FAR = 2**31 - 1
FULL, CAUSAL, PARTIAL = range(3)


class Range(NamedTuple):
    """Keys from `first` to before `end` to which a tile's queries attend, in one of the ways above."""

    first: int
    end: int
    kind: int


def blocks_by(
    spans: Spans, queries: Sequence[Piece], keys: Sequence[Piece], most_keys: int = _FAR
) -> tuple[Block, ...]:
    """Return the blocks of runs that lie one behind the other in the local tensors, which are remembered.

    most_keys: of one block that is not causal.
    """
    key = "blocks", tuple(queries), tuple(keys), most_keys, TILE
    return spans.remember(key, lambda: _blocks(spans, queries, keys, most_keys))


def _blocks(
    spans: Spans, queries: Sequence[Piece], keys: Sequence[Piece], most_keys: int
) -> tuple[Block, ...]:
    held = held_runs(keys)
    blocks = []
    for query, begin, size in _tiles(queries):
        for sample, ranges in _ranges(spans, begin, size):
            for first, end, kind in ranges:
                for _, key, (start, count, _) in held.parts(first, end - first):
                    causal = kind == CAUSAL and count == end - first
                    for at in range(0, count, count if causal else most_keys):
                        part = count if causal else min(most_keys, count - at)
                        place = query, size, key + at, part, causal, begin, start + at
                        blocks.append(Block(*place, kind != FULL and not causal, sample))
    return tuple(_taller(blocks))


def needed_keys(spans: Spans, runs: Sequence[Piece]) -> list[tuple[int, int]]:
    """Return the intervals of keys, (first, end), that some query of the runs attends to, in order."""
    return union(
        {
            (first, end)
            for _, begin, size in _tiles(runs)
            for _, found in _ranges(spans, begin, size)
            for first, end, _ in found
        }
    )


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return intervals, (first, end), in order, those that touch joined."""
    joined: list[tuple[int, int]] = []
    for first, end in sorted(intervals):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((first, end))
    return joined


def tile_of_keys(spans: Spans, runs: Sequence[Piece]) -> Iterator[tuple[int, int, int, int, int]]:
    """Return each tile: its first query in the local tensor and in the sequence, its size, its keys' ends.

    The keys are one interval, of all samples: 0 to 0 if there are none.
    """
    for query, begin, size in _tiles(runs):
        found = [r for _, ranges in _ranges(spans, begin, size) for r in ranges]
        first, end = min([r.first for r in found], default=0), max([r.end for r in found], default=0)
        yield query, begin, size, first, end


def _tiles(runs: Sequence[Piece]) -> Iterator[tuple[int, int, int]]:
    """Cut runs at multiples of TILE of the sequence: (place in the local tensor, in the sequence, size)."""
    for at, (start, size, _) in placed(runs):
        done = 0
        while done < size:
            part = min(TILE - (start + done) % TILE, size - done)
            yield at + done, start + done, part
            done += part


def joined_runs(keys: Sequence[Piece]) -> list[tuple[int, int, int]]:
    """Join runs that adjoin in the sequence: (place in the local tensor, in the sequence, size)."""
    held: list[tuple[int, int, int]] = []
    for at, (start, size, _) in placed(keys):
        if held and held[-1][1] + held[-1][2] == start:
            place, first, count = held[-1]
            held[-1] = place, first, count + size
        else:
            held.append((at, start, size))
    return held


def held_runs(keys: Sequence[Piece]) -> Holders:
    """Return what finds the parts of an interval among keys that lie one behind the other."""
    return Holders([[Piece(start, size, 0) for _, start, size in joined_runs(keys)]])


Samples = list[tuple[int, list[Range]]]


def _ranges(spans: Spans, begin: int, size: int) -> Samples:
    """Return the ranges of a tile by sample, (-1, ranges) if all samples have the same."""
    if size < TILE:
        return spans.remember(("tile", begin, size), lambda: _classified(spans, begin, size, 1)[0])
    whole = spans.remember(("tiles", TILE), lambda: _classified(spans, 0, TILE, spans.ends.size(2) // TILE))
    return whole[begin // TILE]


def _classified(spans: Spans, begin: int, size: int, count: int) -> list[Samples]:
    """Classify `count` tiles of `size` queries, of which the first begins at `begin`."""
    ends = spans.on_cpu.narrow(2, begin, size * count).unflatten(3, (-1, 2)).unflatten(2, (count, size))
    first, end = ends.unbind(-1)  # [B, H, tiles, size, n]
    places = torch.arange(begin + 1, begin + size * count + 1, dtype=end.dtype, device="cpu")
    columns = *bounds(first, end, (1, 3)), (end == places.view(count, size, 1)).all(3).all(1)
    tiles = []
    for tile, samples in enumerate(
        zip(*[column.transpose(0, 1).tolist() for column in columns], strict=True)
    ):
        start = begin + tile * size
        by_sample = [
            _apart([r for column in zip(*sample, strict=True) for r in _of_column(start, size, *column)])
            for sample in zip(*samples, strict=True)
        ]
        same = by_sample[:1]  # none of an empty batch
        all_alike = all(ranges == same[0] for ranges in by_sample)
        tiles.append([(-1, ranges) for ranges in same] if all_alike else list(enumerate(by_sample)))
    return tiles


def bounds(first: Tensor, end: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the first key and the end of those that some query has, and of those that all have, over dims.

    first, end: of one interval of each query. A range of which the end is not behind the first key is empty.
    """
    dead = first >= end
    # A query without keys leaves none to which all attend.
    ahead, behind = first.masked_fill(dead, _FAR), end.masked_fill(dead, 0)
    return ahead.amin(dims), behind.amax(dims), ahead.amax(dims), behind.amin(dims)


def _of_column(
    begin: int, size: int, first: int, end: int, full: int, full_end: int, diagonal: bool
) -> list[Range]:
    """Return the ranges of one interval of each query of a tile.

    Args:
        begin, size: of the tile.
        first, end: the keys to which some query attends.
        full, full_end: those to which all do.
        diagonal: whether the interval of each query ends in its own place.
    """
    if first >= end:
        return []
    if (first, end) == (full, full_end):
        return [Range(first, end, FULL)]
    if diagonal and full <= begin:
        if first < full and begin - full < _SHORT * size:
            # One block with a mask, not three.
            return [Range(first, end, PARTIAL)]
        parts = [Range(first, full, PARTIAL), Range(full, begin, FULL), Range(begin, end, CAUSAL)]
    elif full_end - full < _SHORT * size:
        return [Range(first, end, PARTIAL)]
    else:
        parts = [Range(first, full, PARTIAL), Range(full, full_end, FULL), Range(full_end, end, PARTIAL)]
    return [part for part in parts if part.first < part.end]


def _apart(ranges: list[Range]) -> list[Range]:
    """Join ranges that overlap, of several intervals of a query: a block's mask has all intervals."""
    found: list[Range] = []
    for r in sorted(ranges):
        if found and r.first < found[-1].end:
            found[-1] = Range(found[-1].first, max(found[-1].end, r.end), PARTIAL)
        else:
            found.append(r)
    return found


def _taller(blocks: list[Block]) -> list[Block]:
    """Join full blocks of adjoining queries with the same keys."""
    found: list[Block] = []
    last: dict[tuple[int, int, int, int], int] = {}
    for block in blocks:
        if block.causal or block.partial:
            found.append(block)
            continue
        place = block.key, block.keys, block.sample
        index = last.pop((block.query, *place), None)
        if index is not None and found[index].query_start + found[index].queries == block.query_start:
            found[index] = found[index]._replace(queries=found[index].queries + block.queries)
        else:
            index = len(found)
            found.append(block)
        end = block.query + block.queries, *place
        last[end] = index
    return found
