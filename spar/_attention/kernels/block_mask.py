# SPDX-License-Identifier: Apache-2.0
"""Convert Spans to a flex_attention BlockMask, which lists partial and full blocks of keys.

It is found from the least and the greatest ends of each block's queries, never from pairs. torch's
`BlockMask.from_kv_blocks` makes tables as wide as there are blocks of keys; these are as wide as the longest
row needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..spans import Spans
from ..tiles import bounds

# torch's own default, of queries and of keys.
SIZE = 128


class Table(NamedTuple):
    """How many blocks each row has, int32 `[B or 1, H or 1, rows]`, and which, `[.., rows, most]`."""

    counts: Tensor
    indices: Tensor


class Tables(NamedTuple):
    """The partial and the full blocks of keys of each block of queries, and the other way round."""

    keys: Table
    full_keys: Table
    queries: Table
    full_queries: Table


def block_mask_of(spans: Spans, device: torch.device) -> Any:
    """Return the BlockMask on a device, which the spans remember."""
    return spans.remember(("block mask", str(device)), lambda: _block_mask(spans, device))


def _block_mask(spans: Spans, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    tables = tables_of(spans)
    pairs = (
        ("kv", tables.keys),
        ("full_kv", tables.full_keys),
        ("q", tables.queries),
        ("full_q", tables.full_queries),
    )
    moved: dict[str, Any] = {}
    for name, table in pairs:
        moved[f"{name}_num_blocks"] = table.counts.to(device)
        moved[f"{name}_indices"] = table.indices.to(device)
    lengths = spans.shape[2], spans.keys
    return BlockMask(seq_lengths=lengths, **moved, BLOCK_SIZE=(SIZE, SIZE), mask_mod=_mask_mod(spans, device))


def intervals_of(spans: Spans) -> int:
    """Return the number of intervals in the mask function: a power of 2, as each number is compiled anew."""
    return 1 << (spans.ends.size(3) // 2 - 1).bit_length()


def _mask_mod(spans: Spans, device: torch.device) -> Callable[..., Any]:
    """Return a function of (batch, head, query, key): whether an interval of the query has the key."""
    ends = spans.on_cpu.unflatten(3, (-1, 2))
    none = ends.new_zeros(*ends.shape[:3], intervals_of(spans) - ends.size(3), 2)
    first, end = torch.cat([ends, none], 3).permute(4, 3, 0, 1, 2).contiguous().to(device)
    intervals = tuple(zip(first.unbind(0), end.unbind(0), strict=True))
    # Not more: torch 2.6 compiles no other int that a function has.
    wide = int(ends.size(0) > 1), int(ends.size(1) > 1)

    def allowed(b: Any, h: Any, query: Any, key: Any) -> Any:
        b, h = b * wide[0], h * wide[1]
        first, end = intervals[0]
        found = (key >= first[b, h, query]) & (key < end[b, h, query])
        for first, end in intervals[1:]:
            found = found | ((key >= first[b, h, query]) & (key < end[b, h, query]))
        return found

    return allowed


def tables_of(spans: Spans) -> Tables:
    """Return which blocks of SIZE queries and SIZE keys have pairs, in time and memory of their number."""
    ends = spans.on_cpu.unflatten(3, (-1, 2))
    batch, heads, queries, _, _ = ends.shape
    rows, columns = -(-queries // SIZE), -(-spans.keys // SIZE)
    # Queries behind the last have no keys: a last block of fewer queries is not full, as torch has it.
    padded = torch.nn.functional.pad(ends, (0, 0, 0, 0, 0, rows * SIZE - queries))
    first, end = padded.unflatten(2, (rows, SIZE)).unbind(-1)
    low, high, full, full_end = (x.flatten(0, 2).to(torch.int64) for x in bounds(first, end, (3,)))
    touched = torch.stack([low // SIZE, -(-high // SIZE)], -1)
    touched = touched.masked_fill((low >= high)[..., None], 0).to(torch.int32)
    # Ranges of several intervals may overlap. A block of fewer keys than SIZE is not full.
    row, column = _listed(Spans(touched[None, None].flatten(3), columns).ends[0, 0])
    full, full_end = -(-full // SIZE), full_end // SIZE
    is_full = ((column[:, None] >= full[row]) & (column[:, None] < full_end[row])).any(1)
    shape = batch, heads, rows
    by_keys = _tables(row, column, is_full, shape)
    # Of the same sample and head, the other way round.
    of_keys = row // rows * columns + column
    order = of_keys.argsort(stable=True)
    by_queries = _tables(of_keys[order], row[order] % rows, is_full[order], (batch, heads, columns))
    return Tables(*by_keys, *by_queries)


def _listed(ranges: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and the column of each block in ranges `[rows, 2n]`, which are apart and in order."""
    first, end = ranges.to(torch.int64).flatten().unflatten(0, (-1, 2)).unbind(-1)
    sizes = end - first
    number = torch.arange(sizes.numel(), device="cpu").repeat_interleave(sizes)
    within = torch.arange(number.numel(), device="cpu") - (sizes.cumsum(0) - sizes)[number]
    return number // (ranges.size(1) // 2), first[number] + within


def _tables(row: Tensor, column: Tensor, is_full: Tensor, shape: tuple[int, int, int]) -> tuple[Table, Table]:
    """Return the tables of the partial and of the full blocks, which are in the order of their rows."""
    total = shape[0] * shape[1] * shape[2]
    parts = [(row[chosen], column[chosen]) for chosen in (~is_full, is_full)]
    counts = [rows.bincount(minlength=total) for rows, _ in parts]
    # One width: torch 2.6 reads both by the strides of the first. Not 1, a size with graphs of its own.
    width = max(2, *(int(count.max()) for count in counts))
    made = []
    for count, (rows, columns) in zip(counts, parts, strict=True):
        indices = torch.zeros(total, width, dtype=torch.int32, device="cpu")
        within = torch.arange(rows.numel(), device="cpu") - (count.cumsum(0) - count)[rows]
        indices[rows, within] = columns.to(torch.int32)
        made.append(Table(count.to(torch.int32).view(shape), indices.view(*shape, width)))
    return made[0], made[1]
