# SPDX-License-Identifier: Apache-2.0
"""Blocks for kernels that read spans: all queries of a rank and all keys that it holds, not tiles with masks.

Keys that lie one behind the other in the sequence stay so in a shard, whatever is left out between them: an
interval of the sequence is one of the shard, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._exchange.layouts import Piece
from .blocks import Block
from .spans import Spans
from .tiles import joined_runs


def long_blocks(spans: Spans, queries: Sequence[Piece], keys: Sequence[Piece]) -> tuple[Block, ...]:
    """Return the blocks of runs that lie one behind the other in the local tensors, which are remembered.

    There is one, unless the keys' runs are not in the order of the sequence.
    """
    key = "long", tuple(queries), tuple(keys)
    return spans.remember(key, lambda: _blocks(spans, queries, keys))


def _blocks(spans: Spans, queries: Sequence[Piece], keys: Sequence[Piece]) -> tuple[Block, ...]:
    places = [torch.arange(start, start + size, device="cpu") for start, size, _ in queries]
    ends = spans.on_cpu.index_select(2, torch.cat(places)) if places else spans.on_cpu[:, :, :0]
    return tuple([block for runs in _ascending(joined_runs(keys)) if (block := _block(ends, runs))])


def _ascending(runs: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Cut runs, (place in the local tensor, in the sequence, size), where one is before the last one."""
    parts: list[list[tuple[int, int, int]]] = []
    for run in runs:
        if parts and parts[-1][-1][1] < run[1]:
            parts[-1].append(run)
        else:
            parts.append([run])
    return parts


def _block(ends: Tensor, runs: Sequence[tuple[int, int, int]]) -> Block | None:
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
