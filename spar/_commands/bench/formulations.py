# SPDX-License-Identifier: Apache-2.0
"""The usual formulation of each operation over torch.distributed alone, as a reference for the benchmarks.

Even sizes only, except for `padded_gather`: the benchmarks need no others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


def exchange(x: Tensor, scatter: int, gather: int) -> Tensor:
    """Permute, all_to_all_single, permute."""
    world = dist.get_world_size()
    parts = x.unflatten(scatter, (world, -1)).movedim(scatter, 0).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return received.movedim(0, gather).flatten(gather, gather + 1).contiguous()


def gather_parts(x: Tensor) -> list[Tensor]:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return parts


def own_part(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size(), 0)[dist.get_rank()].contiguous()


def own_chunks(x: Tensor) -> Tensor:
    rank, chunks = dist.get_rank(), 2 * dist.get_world_size()
    indices = torch.tensor([rank, chunks - 1 - rank])
    whole: Tensor = x.unflatten(0, (chunks, -1))
    return whole.index_select(0, indices).flatten(0, 1)


def gathered_places(world: int) -> list[int]:
    """Return where each zigzag chunk of the whole lies among the ranks' gathered chunks."""
    return [2 * r for r in range(world)] + [2 * r + 1 for r in reversed(range(world))]


def gather_chunks(x: Tensor) -> Tensor:
    """Run all_gather and cat, then an index_select into natural order."""
    world = dist.get_world_size()
    gathered: Tensor = torch.cat(gather_parts(x)).unflatten(0, (2 * world, -1))
    return gathered.index_select(0, torch.tensor(gathered_places(world))).flatten(0, 1)


def split_sequences(x: Tensor, lengths: list[int]) -> Tensor:
    return torch.cat([own_part(sequence) for sequence in x.split(lengths)])


def gather_sequences(x: Tensor, lengths: list[int]) -> Tensor:
    world = dist.get_world_size()
    part_sizes = [length // world for length in lengths]
    parts = [part.split(part_sizes) for part in gather_parts(x)]
    return torch.cat([part[s] for s in range(len(lengths)) for part in parts])


def sum_parts(x: Tensor) -> Tensor:
    """all_to_all_single of the parts, then their sum in float32."""
    world = dist.get_world_size()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x.contiguous())
    parts: Tensor = received.unflatten(0, (world, -1))
    return parts.sum(0, dtype=torch.float32).to(x.dtype)


def sum_chunks(x: Tensor) -> Tensor:
    """Bring the chunks of each rank together, then sum_parts."""
    world = dist.get_world_size()
    chunks: Tensor = x.unflatten(0, (2 * world, -1))
    order = torch.tensor([chunk for r in range(world) for chunk in (r, 2 * world - 1 - r)])
    return sum_parts(chunks.index_select(0, order).flatten(0, 1))


def padded_index(sizes: list[int]) -> Tensor:
    """Return where each row of the whole lies once the ranks' zigzag chunks, of which each was padded to the
    first one's size, were gathered."""
    starts = [place * sizes[0] for place in gathered_places(len(sizes) // 2)]
    return torch.cat([torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])


def own_sizes(sizes: list[int]) -> list[int]:
    return [sizes[dist.get_rank()], sizes[len(sizes) - 1 - dist.get_rank()]]


def gather_padded(x: Tensor, sizes: list[int]) -> Tensor:
    """Pad both chunks, run all_gather and cat, and select the rows in natural order."""
    most, chunk_sizes = sizes[0], own_sizes(sizes)
    if min(chunk_sizes) < most:
        fill = (0, 0) * (x.dim() - 1)
        x = torch.cat([pad(part, (*fill, 0, most - len(part))) for part in x.split(chunk_sizes)])
    return gather_rows(x).index_select(0, padded_index(sizes))


def sum_padded(x: Tensor, sizes: list[int]) -> Tensor:
    """Put the rows where the padded chunks have them, sum_parts, and drop the padding."""
    most, chunk_sizes = sizes[0], own_sizes(sizes)
    rows = x.new_zeros(len(sizes) * most, *x.shape[1:]).index_copy_(0, padded_index(sizes), x)
    first, last = sum_parts(rows).split(most)
    return torch.cat((first[: chunk_sizes[0]], last[: chunk_sizes[1]]))


def pair(forward: Any, backward: Any) -> Any:
    """Make an operation of two functions of (x, *more)."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *more: Any) -> Tensor:
            ctx.more = more
            result: Tensor = forward(x, *more)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return backward(grads[0], *ctx.more), *[None] * len(ctx.more)

    return Pair.apply


def down(gather: Any) -> Any:
    return lambda x, *more: gather(x, *more) / dist.get_world_size()


def up(split: Any) -> Any:
    return lambda x, *more: split(x * dist.get_world_size(), *more)


def gather_rows(x: Tensor) -> Tensor:
    return torch.cat(gather_parts(x))


def exchange_equal(parts: Tensor) -> Tensor:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return received


def fourth_rows(x: Tensor) -> Tensor:
    """Return every fourth row of the whole, from the rank's number modulo 4 on."""
    sent = torch.stack([x[rank % 4 :: 4] for rank in range(dist.get_world_size())])
    return exchange_equal(sent).flatten(0, 1)


def add_fourth_rows(y: Tensor) -> Tensor:
    world = dist.get_world_size()
    received = exchange_equal(y.unflatten(0, (world, -1)).contiguous())
    sums = y.new_zeros(4 * received.size(1), *y.shape[1:])
    for rank, part in enumerate(received):
        sums[rank % 4 :: 4] += part
    return sums


all_to_all = pair(lambda x: exchange(x, 2, 1), lambda x: exchange(x, 1, 2))
all_to_all_back = pair(lambda x: exchange(x, 1, 2), lambda x: exchange(x, 2, 1))
padded_gather = pair(gather_padded, sum_padded)
split = pair(own_part, down(gather_rows))
unscaled_split = pair(own_part, gather_rows)
gather = pair(gather_rows, up(own_part))
zigzag_split = pair(own_chunks, down(gather_chunks))
zigzag_gather = pair(gather_chunks, up(own_chunks))
all_gather = pair(gather_rows, sum_parts)
zigzag_all_gather = pair(gather_chunks, sum_chunks)
indexed_rows = pair(fourth_rows, add_fourth_rows)
reduce_scatter = pair(sum_parts, gather_rows)
packed_split = pair(split_sequences, down(gather_sequences))
packed_gather = pair(gather_sequences, up(split_sequences))
