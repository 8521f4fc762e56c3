# SPDX-License-Identifier: Apache-2.0
"""Blocks for kernels that take a window: long strips of queries instead of tiles with masks."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._exchange.layouts import Piece
from .blocks import Block
from .spans import Spans
from .tiles import held_runs, joined_runs

# With more strips than one for so many queries, tiles are fewer blocks.
_SHORTEST = 64


class Strip(NamedTuple):
    """Queries `begin` to before `begin + size`, of which query i attends to the keys i - left to i + right.

    Of these, to those from `first` to before `end`.
    """

    begin: int
    size: int
    first: int
    end: int
    left: int
    right: int


def strips_of(spans: Spans) -> tuple[Strip, ...] | None:
    """Return spans as strips, which are remembered; None if they are not a few of them."""
    return spans.remember("strips", lambda: _strips(spans))


def _strips(spans: Spans) -> tuple[Strip, ...] | None:
    batch, heads, queries, numbers = spans.ends.shape
    if (batch, heads, numbers) != (1, 1, 2) or queries == 0:
        return None
    first, end = spans.on_cpu[0, 0].to(torch.int64).unbind(-1)
    places = torch.arange(queries, device="cpu")
    left, right, dead = places - first, end - 1 - places, first >= end
    # In a strip `left` grows by 1 while the first key stays, and then stays; `right` stays, and then falls.
    grows, reached = left.diff() == 1, left.diff() == 0
    stays, falls = right.diff() == 0, right.diff() == -1
    apart = ~(grows | reached) | ~(stays | falls) | (dead[1:] != dead[:-1])
    apart[1:] |= (grows[1:] & reached[:-1]) | (stays[1:] & falls[:-1])
    begins = [0, *(apart.nonzero()[:, 0] + 1).tolist()]
    if len(begins) > max(8, queries // _SHORTEST):
        return None
    ends = [*begins[1:], queries]
    rows = torch.tensor([begins, [last - 1 for last in ends]], device="cpu")
    table = [first[rows[0]], end[rows[1]], left[rows[1]], right[rows[0]]]
    strips = [
        Strip(begin, last - begin, *numbers)
        for begin, last, *numbers in zip(begins, ends, *(column.tolist() for column in table), strict=True)
    ]
    return tuple([strip for strip in strips if strip.first < strip.end])


def strip_blocks(spans: Spans, queries: Sequence[Piece], keys: Sequence[Piece]) -> tuple[Block, ...]:
    """Return the blocks of runs that lie one behind the other in the local tensors, which are remembered."""
    key, strips = ("strip blocks", tuple(queries), tuple(keys)), strips_of(spans) or ()
    return spans.remember(key, lambda: _blocks(strips, queries, keys))


def _blocks(strips: Sequence[Strip], queries: Sequence[Piece], keys: Sequence[Piece]) -> tuple[Block, ...]:
    blocks, held = [], held_runs(keys)
    ends = [strip.begin + strip.size for strip in strips]
    for query, start, count in joined_runs(queries):
        for number in range(bisect.bisect_right(ends, start), len(strips)):
            strip = strips[number]
            begin, end = max(start, strip.begin), min(start + count, ends[number])
            if begin >= end:
                break
            first, last = max(strip.first, begin - strip.left), min(strip.end, end + strip.right)
            for _, key, run in held.parts(first, last - first):
                if block := _block(strip, (begin, end), (run.start, run.start + run.size)):
                    place = query + block.query_start - start, key + block.key_start - run.start
                    blocks.append(block._replace(query=place[0], key=place[1]))
    return tuple(blocks)


def _block(strip: Strip, queries: tuple[int, int], keys: tuple[int, int]) -> Block | None:
    """Return the block of a strip's queries and keys in these ranges, whose queries all have a key."""
    (begin, end), left, right = queries, strip.left, strip.right
    first, last = max(keys[0], strip.first, begin - left), min(keys[1], strip.end, end + right)
    begin, end = max(begin, first - right), min(end, last + left)
    if begin >= end or first >= last:
        return None
    place = 0, end - begin, 0, last - first
    if end - 1 - left <= first and begin + right >= last - 1:
        return Block(*place, False, begin, first)
    if (begin, end, right) == (first, last, 0) and left >= end - begin - 1:
        return Block(*place, True, begin, first)
    # As flash_attn aligns a window: at the last query and the last key.
    behind = last - end
    return Block(*place, False, begin, first, window=(left + behind, right - behind))
