# SPDX-License-Identifier: Apache-2.0
"""Layouts: which part of a tensor each rank holds, as ints. csrc/ops/layout.h reads the same numbers.

The rules stand here again for symbolic ints. They are arithmetic without branches on sizes, so that symbolic
sizes stay symbolic under torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..sizes import share
from .observers import is_fake

Args = tuple[int, ...]
Layout = tuple[int, ...]  # WHOLE, or (dim, kind, numbers...)

WHOLE: Layout = (-1,)  # every rank holds the whole tensor
EVEN, SIZES, ZIGZAG, PACKED, ROTATED, RUNS = range(6)
LISTED = PACKED, RUNS  # kinds of any number of pieces on a rank, too many to trace


def even(dim: int, total: int) -> Layout:
    """Shards of a dim by the size rule."""
    return dim, EVEN, total


def by_sizes(dim: int, sizes: Iterable[int]) -> Layout:
    """Shards of a dim with the given size for each rank."""
    return dim, SIZES, *sizes


def zigzag(dim: int, total: int, inner: int = 1) -> Layout:
    """Chunks r and 2R-1-r of 2R chunks by the size rule, for R = world / inner ring ranks.

    Each ring rank's shard is sharded once more over `inner` (Ulysses) ranks by the size rule. The rank is
    inner rank * R + ring rank. If `inner` is negative, -inner ranks are neighbours: the rank is
    ring rank * -inner + inner rank.
    """
    return dim, ZIGZAG, inner, total


def packed(dim: int, sequences: int, numbers: Iterable[int], inner: int = 1) -> Layout:
    """A shard of each of several concatenated sequences; `inner` is as for `zigzag`.

    numbers: the length of each sequence, sharded by the size rule; or each ring rank's size of each.
    """
    return dim, PACKED, inner, sequences, *numbers


def rotated(dim: int, sizes: Iterable[int], shift: int) -> Layout:
    """Chunks of the given sizes, of which rank r holds chunk r - shift, counted round."""
    return dim, ROTATED, shift, *sizes


def pair(before: Layout, after: Layout) -> Args:
    """The core's numbers for an exchange: what each rank holds before and after."""
    return len(before), *before, *after


def by_receiver(dim: int, world: int, sizes: Sequence[int]) -> Args:
    """Each rank sends parts of its own, one behind the other, and receives those for it, owner by owner.

    sizes: how much each receiver gets from each owner, receiver by receiver.
    """
    sent = [sum(sizes[owner::world]) for owner in range(world)]
    return pair(by_sizes(dim, sent), packed(dim, world, sizes))


def moved(layout: Layout) -> Layout:
    """The layout once a dim was inserted before all others."""
    return layout[0] + 1, *layout[1:]


def shards_pair(shard: Layout, world: int, sums: bool) -> Args:
    """Return the numbers of an exchange that gathers shards, or that sums the ranks' parts of each shard.

    A sum has a dim in front that counts the ranks: its shards become shards of the scattered dim.
    """
    return pair(even(0, world), moved(shard)) if sums else pair(shard, WHOLE)


def moved_back(layout: Layout) -> Layout:
    """Undo `moved`."""
    return layout[0] - 1, *layout[1:]


def swapped(args: Args) -> Args:
    """The inverse exchange, which carries the gradient back."""
    before, after = args[1 : 1 + args[0]], args[1 + args[0] :]
    return len(after), *after, *before


def share_start(total: int, world: int, rank: int) -> int:
    """Return the offset of `rank`'s shard of `total`, whose size is `share`."""
    extra = total % world
    # min of a symbolic int would branch; torch.sym_min takes a third of a split's time
    return rank * (total // world) + (min(rank, extra) if type(extra) is int else torch.sym_min(rank, extra))


def _levels(inner: int, world: int, rank: int) -> tuple[int, int, int, int]:
    """Return the number of inner and of ring ranks, and a rank's inner and ring rank."""
    if inner < 0:
        return -inner, world // -inner, rank % -inner, rank // -inner
    outer = world // inner
    return inner, outer, rank // outer, rank % outer


def total_of(layout: Layout) -> int:
    """Return the sharded dim's global extent."""
    _, kind, *numbers = layout
    if kind in (EVEN, ZIGZAG):
        return numbers[-1]
    if kind == RUNS:
        return sum(numbers[1 : 1 + numbers[0]])
    return sum(numbers[2 if kind == PACKED else 1 if kind == ROTATED else 0 :])


def extent(layout: Layout, world: int, rank: int) -> int:
    """Return the sharded dim's extent on a rank."""
    _, kind, *numbers = layout
    if kind == EVEN:
        return share(numbers[0], world, rank)
    if kind == SIZES:
        return numbers[rank]
    if kind == ROTATED:
        return numbers[1 + (rank - numbers[0]) % world]
    if kind == RUNS:
        return numbers[rank - world]
    inner, outer, part, ring = _levels(numbers[0], world, rank)
    if kind == ZIGZAG:
        chunks = 2 * outer
        size = share(numbers[1], chunks, ring) + share(numbers[1], chunks, chunks - 1 - ring)
    else:
        size = sum(_packed_sizes(layout, outer, ring))
    return share(size, inner, part)


def out_shape(shape: Sequence[int], args: Args, world: int, rank: int) -> list[int]:
    """Return the shape of a rank's output."""
    sizes, before, after = list(shape), args[1 : 1 + args[0]], args[1 + args[0] :]
    if before[0] >= 0:
        sizes[before[0]] = total_of(before)
    if after[0] >= 0:
        sizes[after[0]] = extent(after, world, rank)
    return sizes


# ---- pieces ----


class Piece(NamedTuple):
    """A run of the sharded dim: its place in the whole, and the packed sequence that it is in, or 0."""

    start: int
    size: int
    sequence: int


def pieces(layout: Layout, world: int, rank: int) -> list[Piece]:
    """Return the runs that a rank holds, in its order."""
    _, kind, *numbers = layout
    if kind == EVEN:
        return [Piece(share_start(numbers[0], world, rank), share(numbers[0], world, rank), 0)]
    if kind in (SIZES, ROTATED):
        chunk = rank if kind == SIZES else (rank - numbers[0]) % world
        sizes = numbers[-world:]
        return [Piece(sum(sizes[:chunk]), sizes[chunk], 0)]
    if kind == RUNS:
        return _listed_pieces(numbers, world)[rank]
    inner, outer, part, ring = _levels(numbers[0], world, rank)
    if kind == ZIGZAG:
        total, chunks = numbers[1], 2 * outer
        runs = [
            Piece(share_start(total, chunks, chunk), share(total, chunks, chunk), 0)
            for chunk in (ring, chunks - 1 - ring)
        ]
    else:
        runs = _packed_pieces(layout, outer, ring)
    return runs if inner == 1 else _cut(runs, inner, part)


def shards(layout: Layout, world: int) -> list[list[Piece]]:
    """Return the `pieces` of each rank."""
    if layout[1] == RUNS:
        return _listed_pieces(layout[2:], world)
    return [pieces(layout, world, rank) for rank in range(world)]


def _listed_pieces(numbers: Sequence[int], world: int) -> list[list[Piece]]:
    """Return the runs of each rank."""
    first = 1 + numbers[0]
    lengths, runs = numbers[1:first], numbers[first : len(numbers) - world]
    found: list[list[Piece]] = [[] for _ in range(world)]
    document, start, end = 0, 0, sum(lengths[:1])
    for rank, size in zip(runs[::2], runs[1::2], strict=True):
        while start >= end and document < len(lengths) - 1:
            document += 1
            end += lengths[document]
        found[rank].append(Piece(start, size, document))
        start += size
    return found


def _packed_pieces(layout: Layout, outer: int, ring: int) -> list[Piece]:
    """Return the ring rank's part of each sequence."""
    sizes = [_packed_sizes(layout, outer, ring_rank) for ring_rank in range(outer)]
    runs, begin = [], 0
    for sequence, parts in enumerate(zip(*sizes, strict=True)):
        runs.append(Piece(begin + sum(parts[:ring]), parts[ring], sequence))
        begin += sum(parts)
    return runs


def _cut(outer: list[Piece], inner: int, part: int) -> list[Piece]:
    """Shard what a ring rank holds once more; return the inner rank's part."""
    total = sum([piece.size for piece in outer])
    begin = share_start(total, inner, part)
    end = begin + share(total, inner, part)
    runs, at = [], 0
    for start, size, sequence in outer:
        low, high = max(at, begin), min(at + size, end)
        if low < high:
            runs.append(Piece(start + low - at, high - low, sequence))
        at += size
    return runs


# ---- selections ----


def select(input_: torch.Tensor, layout: Layout, world: int, rank: int) -> torch.Tensor | None:
    """Return a rank's part of a whole tensor in torch ops, as a view if possible.

    None for kinds of many pieces: too many ops to trace.
    """
    dim, kind = layout[0], layout[1]
    if kind == EVEN:
        total = layout[2]
        return input_.narrow(dim, share_start(total, world, rank), share(total, world, rank))
    if kind in LISTED:
        return None
    parts = [input_.narrow(dim, start, size) for start, size, _ in pieces(layout, world, rank)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else input_.narrow(dim, 0, 0)


def _packed_sizes(layout: Layout, outer: int, ring: int) -> list[int]:
    """Return the ring rank's local size of each sequence."""
    _, _, _, sequences, *numbers = layout
    if sequences == len(numbers):
        return [share(length, outer, ring) for length in numbers]
    return numbers[ring * sequences : (ring + 1) * sequences]


def listed_index(layout: Layout, world: int, rank: int) -> torch.Tensor:
    """Return the global index of each item that `rank` holds in a layout of many pieces."""
    if layout[1] == PACKED:
        return _packed_index(layout, world, rank)
    runs = torch.tensor([run[:2] for run in pieces(layout, world, rank)], dtype=torch.int64, device="cpu")
    starts, sizes = runs.reshape(-1, 2).unbind(1)
    ends, total = sizes.cumsum(0), extent(layout, world, rank)
    return (starts - ends + sizes).repeat_interleave(sizes, output_size=total) + _places(total)


def _places(total: int) -> torch.Tensor:
    return torch.arange(total, device="cpu")


def _packed_index(layout: Layout, world: int, rank: int) -> torch.Tensor:
    _, _, inner, sequences, *flat = layout
    inner, outer, part, ring = _levels(inner, world, rank)
    numbers = torch.tensor(flat, dtype=torch.int64, device="cpu")
    if sequences == len(flat):
        numbers = numbers // outer + (torch.arange(outer, device="cpu")[:, None] < numbers % outer)
    table = numbers.reshape(outer, sequences)
    ends = table.T.reshape(-1).cumsum(0).reshape(sequences, outer)  # where each part ends in the whole
    sizes = table[ring]
    starts = ends[:, ring] - sizes - (sizes.cumsum(0) - sizes)
    # A tensor adds them faster, where it has values.
    total = sum(_packed_sizes(layout, outer, ring)) if is_fake(sizes) else int(sizes.sum())
    index = starts.repeat_interleave(sizes, output_size=total) + _places(total)
    begin = share_start(len(index), inner, part)
    return index[begin : begin + share(len(index), inner, part)]
