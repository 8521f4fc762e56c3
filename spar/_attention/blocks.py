# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a rank's queries and of a shard's keys attend to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .._exchange.gather_plan import placed
from .._exchange.layouts import Piece
from .parts import Parts
from .spans import Spans


class Block(NamedTuple):
    """Queries and keys that attend to each other.

    Attributes:
        query, queries: the first query in the local tensor [B, H, S, D], and their number.
        key, keys: likewise of the keys in the shard [B, K, T, D].
        causal: whether both are the same run, and a query attends to the keys up to its own place.
            Otherwise every query attends to every key.
        query_start, key_start: where the first query and key are in the sequence.
        partial: whether the spans say which of these keys a query attends to.
        sample: the one to which the block is limited; -1: all samples have it.
        window: (left, right), if query i attends to the keys i - left to i + right alone, counted from the
            last query and the last key; each has one. -1: all on that side.
        spans: which of these keys each of these queries attends to, counted from the block's first ones.
        parts: those that attend to themselves alone, each by the window; None: the block is one.
    """

    query: int
    queries: int
    key: int
    keys: int
    causal: bool
    query_start: int
    key_start: int
    partial: bool = False
    sample: int = -1
    window: tuple[int, int] | None = None
    spans: Spans | None = None
    parts: Parts | None = None


# Finds the blocks of runs of queries and of keys, which lie one behind the other in the local tensors.
BlocksMaker = Callable[[Sequence[Piece], Sequence[Piece]], Sequence[Block]]


def no_blocks(queries: Sequence[Piece], keys: Sequence[Piece]) -> tuple[Block, ...]:
    """Compute nothing, as `spar plan` does."""
    return ()


def blocks_of(
    queries: Sequence[Piece], keys: Sequence[Piece], causal: bool, documents: bool, joined: bool
) -> list[Block]:
    """Return the blocks that the mask does not empty.

    Args:
        queries, keys: the runs that lie one behind the other in the local tensors; one list if the keys are a
            shard's own, whose runs are in the order of the sequence.
        causal: whether a query attends to no key behind it. Runs are then equal, or do not overlap.
        documents: whether a query attends to the keys of its own packed document only.
        joined: whether blocks may span runs that are apart in the sequence: there is no mask to slice.
    """
    if keys is queries and causal and joined and not documents:
        # What is before in the shard is before in the sequence.
        size = sum([run.size for run in queries])
        return [Block(0, size, 0, size, True, 0, 0)] if size > 0 else []
    if keys is queries and causal and joined:
        # Likewise in a document.
        own: dict[int, tuple[int, int]] = {}
        for at, run in placed(queries):
            first, size = own.get(run.sequence, (at, 0))
            own[run.sequence] = first, size + run.size
        return [Block(first, size, first, size, True, 0, 0) for first, size in own.values()]
    held: dict[int, list[tuple[int, Piece]]] = {}
    for key, run in placed(keys):
        held.setdefault(run.sequence if documents else 0, []).append((key, run))
    blocks: list[Block] = []
    # Of one document: blocks of others have other keys, and the time must not grow with their square.
    part: list[Block] = []
    number = 0
    for query, run in placed(queries):
        if documents and run.sequence != number:
            blocks += _merged(part, 0) if joined else part
            part, number = [], run.sequence
        row: list[Block] = []
        for key, key_run in held.get(number, ()):
            row += _pair(run, key_run, query, key, causal)
        part += _merged(row, 2) if joined else row
    return blocks + (_merged(part, 0) if joined else part)


def blocks_before(runs: Sequence[Piece]) -> list[Block]:
    """Return the causal blocks of a shard with the keys of other ranks, in a tensor of all keys.

    The shard's runs are in the order of the sequence: keys between two of them are before all runs behind.
    """
    blocks, end, size = [], 0, sum([run.size for run in runs])
    for query, run in placed(runs):
        if run.start > end:
            blocks.append(Block(query, size - query, end, run.start - end, False, run.start, end))
        end = run.start + run.size
    return blocks


def _pair(run: Piece, key_run: Piece, query: int, key: int, causal: bool) -> list[Block]:
    """Return the blocks of one run of queries and one of keys, which begin at `query` and `key`."""
    if not causal or key_run.start + key_run.size <= run.start:
        return [Block(query, run.size, key, key_run.size, False, run.start, key_run.start)]
    if key_run.start >= run.start + run.size:
        return []
    # They overlap: keys before the run, and the run itself.
    before = run.start - key_run.start
    equal = min(run.size, key_run.size - before)
    blocks = [Block(query, equal, key + before, equal, True, run.start, run.start)]
    if before > 0:
        blocks.append(Block(query, run.size, key, before, False, run.start, key_run.start))
    if equal < run.size:
        # Queries behind the last key.
        behind = run.start + equal
        blocks.append(Block(query + equal, run.size - equal, key + before, equal, False, behind, run.start))
    return blocks


def _merged(blocks: list[Block], side: int) -> list[Block]:
    """Join full blocks that adjoin in the keys (side 2) or queries (side 0) and are equal in the other."""
    other = 2 - side
    merged: list[Block] = []
    for block in blocks:
        for i, last in enumerate(merged):
            if last.causal or block.causal or last[other : other + 2] != block[other : other + 2]:
                continue
            if last[:4][side] + last[:4][side + 1] == block[:4][side]:
                if side == 0:
                    merged[i] = last._replace(queries=last.queries + block.queries)
                else:
                    merged[i] = last._replace(keys=last.keys + block.keys)
                break
        else:
            merged.append(block)
    return merged
