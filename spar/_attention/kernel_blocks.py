# SPDX-License-Identifier: Apache-2.0
"""Blocks for kernels that read windows, spans or parts: of many queries, instead of tiles with masks.

A window is that of a strip of queries. Parts are blocks that are apart from each other, such as documents.
Spans are read of all queries of a rank, and of all keys that it has: keys that lie one behind the other in
the sequence stay so in a shard, whatever is left out between them, so that an interval of the sequence is one
of the shard, too.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._exchange.layouts import Piece
from .blocks import Block, BlocksMaker
from .parts import Parts
from .spans import Spans
from .tiles import held_runs, joined_runs

# With more strips than one for so many queries, tiles are fewer blocks; or one call has too many parts.
_SHORTEST = 64
_SHORTEST_PART = 8


# ---- windows ----


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
    return _of_length(spans, _SHORTEST)


def _of_length(spans: Spans, shortest: int) -> tuple[Strip, ...] | None:
    """Return spans as strips; None if these are shorter than so many queries on average."""
    strips = spans.remember("strips", lambda: _strips(spans))
    few = strips is not None and len(strips) <= max(8, spans.ends.size(2) // shortest)
    return strips if few else None


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
    # Where it grows again, it does so from the query before on, which may be a document's first.
    apart[:-1] |= grows[1:] & reached[:-1]
    apart[1:] |= stays[1:] & falls[:-1]
    begins = [0, *(apart.nonzero()[:, 0] + 1).tolist()]
    if len(begins) > max(8, queries // _SHORTEST_PART):
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
    key, strips = ("strip blocks", tuple(queries), tuple(keys)), _of_length(spans, _SHORTEST_PART) or ()
    return spans.remember(key, lambda: _of_strips(strips, queries, keys))


def _of_strips(strips: Sequence[Strip], queries: Sequence[Piece], keys: Sequence[Piece]) -> tuple[Block, ...]:
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


# ---- parts ----


def window_parts(spans: Spans) -> BlocksMaker | None:
    """Return what finds the blocks of strips, joined as parts; None if spans are not strips."""
    return None if _of_length(spans, _SHORTEST_PART) is None else functools.partial(_part_blocks, spans)


def _part_blocks(spans: Spans, queries: Sequence[Piece], keys: Sequence[Piece]) -> tuple[Block, ...]:
    key = "parts", tuple(queries), tuple(keys)
    return spans.remember(key, lambda: in_parts(strip_blocks(spans, queries, keys)))


def in_parts(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Join blocks without masks that are apart, and have one window, into blocks of many parts."""
    found: list[_Joined] = []
    for block in sorted(_with_keys_before(blocks), key=lambda block: (block.query, block.key)):
        if not any(joined.add(block) for joined in found):
            found.append(_Joined(block))
    return tuple([joined.block() for joined in found])


def _with_keys_before(blocks: Sequence[Block]) -> list[Block]:
    """Join a causal block with a full one of its queries, whose keys are just before its own."""
    full = {
        (block.query, block.queries, block.key + block.keys): block
        for block in blocks
        if not block.causal and block.window is None
    }
    found = []
    for block in blocks:
        before = full.pop((block.query, block.queries, block.key), None) if block.causal else None
        if before is not None:
            keys = before.keys + block.keys
            block = before._replace(keys=keys, window=(-1, 0))
        if block.causal or block.window is not None:
            found.append(block)
    return [*found, *full.values()]


class _Joined:
    """Blocks that are one behind the other in queries and in keys, as parts of one."""

    def __init__(self, block: Block) -> None:
        self.blocks = [block]
        self.left, self.right = _sides(block)

    def add(self, block: Block) -> bool:
        """Add a block if it is behind the others, and their window can be its own."""
        last, sides = self.blocks[-1], _sides(block)
        if last.query + last.queries > block.query or last.key + last.keys > block.key:
            return False
        left, right = self.left.joined(sides[0]), self.right.joined(sides[1])
        if left is None or right is None:
            return False
        self.left, self.right = left, right
        self.blocks.append(block)
        return True

    def block(self) -> Block:
        first, last = self.blocks[0], self.blocks[-1]
        if first is last:
            return first
        query, key, sizes = first.query, first.key, []
        for block in self.blocks:
            gaps = (block.query - query, 0), (0, block.key - key)
            sizes += [*(gap for gap in gaps if any(gap)), (block.queries, block.keys)]
            query, key = block.query + block.queries, block.key + block.keys
        window = tuple(-1 if side.exact is None else side.exact for side in (self.left, self.right))
        place = first.query, query - first.query, first.key, key - first.key
        return Block(*place, False, 0, 0, window=(window[0], window[1]), parts=Parts(sizes))


class _Side(NamedTuple):
    """How many keys on a side queries attend to: exactly so many, or any number that is at least `least`."""

    exact: int | None
    least: int

    def joined(self, other: _Side) -> _Side | None:
        exact, least = other.exact if self.exact is None else self.exact, max(self.least, other.least)
        differ = exact is not None and (other.exact not in (None, exact) or exact < least)
        return None if differ else _Side(exact, least)


def _sides(block: Block) -> tuple[_Side, _Side]:
    """Return the window of a block, counted from its last query and key; exact where it cuts keys off."""
    everything = block.keys - 1, block.queries - 1
    window = block.window or (everything[0], 0 if block.causal else everything[1])
    left, right = (
        _Side(None, most) if side < 0 or side >= most else _Side(side, 0)
        for side, most in zip(window, everything, strict=True)
    )
    return left, right


# ---- spans ----


def long_blocks(spans: Spans, queries: Sequence[Piece], keys: Sequence[Piece]) -> tuple[Block, ...]:
    """Return the blocks of runs that lie one behind the other in the local tensors, which are remembered.

    There is one, unless the keys' runs are not in the order of the sequence.
    """
    key = "long", tuple(queries), tuple(keys)
    return spans.remember(key, lambda: _long(spans, queries, keys))


def _long(spans: Spans, queries: Sequence[Piece], keys: Sequence[Piece]) -> tuple[Block, ...]:
    places = [torch.arange(start, start + size, device="cpu") for start, size, _ in queries]
    ends = spans.on_cpu.index_select(2, torch.cat(places)) if places else spans.on_cpu[:, :, :0]
    return tuple([block for runs in _ascending(joined_runs(keys)) if (block := _whole(ends, runs))])


def _ascending(runs: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Cut runs, (place in the local tensor, in the sequence, size), where one is before the last one."""
    parts: list[list[tuple[int, int, int]]] = []
    for run in runs:
        if parts and parts[-1][-1][1] < run[1]:
            parts[-1].append(run)
        else:
            parts.append([run])
    return parts


def _whole(ends: Tensor, runs: Sequence[tuple[int, int, int]]) -> Block | None:
    """Return the block of queries, from the first to the last that has keys in these runs."""
    first, end = _in_runs(ends, runs).unflatten(3, (-1, 2)).unbind(-1)
    alive = first < end
    rows = alive.any(3).any(1).any(0).nonzero()[:, 0]
    if rows.numel() == 0:
        return None
    begin, last = int(rows[0]), int(rows[-1]) + 1
    low, high = int(first[alive].min()), int(end[alive].max())
    # Ends of empty intervals may lie anywhere.
    table = (torch.stack([first, end], -1).narrow(2, begin, last - begin) - low).clamp_(0, high - low)
    spans = Spans(table.flatten(3), high - low)
    at = runs[0][0]
    return Block(begin, last - begin, at + low, high - low, False, 0, 0, spans=spans)


def _in_runs(ends: Tensor, runs: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return how many of the runs' keys lie before each end in the sequence: its place in their tensor."""
    _, starts, sizes = (
        torch.tensor(column, dtype=ends.dtype, device="cpu") for column in zip(*runs, strict=True)
    )
    run = (torch.searchsorted(starts, ends, right=True) - 1).clamp(min=0)
    before = sizes.cumsum(0, dtype=ends.dtype) - sizes
    within = (ends - starts[run]).clamp(min=0)
    return before[run] + torch.minimum(within, sizes[run])
