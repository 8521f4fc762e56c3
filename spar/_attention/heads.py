# SPDX-License-Identifier: Apache-2.0
"""Which key and value heads the query heads of each rank need."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..sizes import share


class Heads(NamedTuple):
    """Query heads by the size rule; for each rank the key heads that its query heads attend to.

    Query head h of H attends to key head h // (H / key heads), as in torch's enable_gqa. Neighbouring ranks
    can need the same key head.

    queries, first, keys: each rank's number of query heads, its first key head, its number of key heads.
    """

    queries: tuple[int, ...]
    first: tuple[int, ...]
    keys: tuple[int, ...]


def heads_of_ranks(heads: int, key_heads: int, world: int) -> Heads:
    queries = [share(heads, world, rank) for rank in range(world)]
    group, begin = heads // key_heads, 0
    first, keys = [], []
    for size in queries:
        first.append(begin // group)
        keys.append((begin + size - 1) // group + 1 - first[-1] if size else 0)
        begin += size
    return Heads(tuple(queries), tuple(first), tuple(keys))


class Layer(NamedTuple):
    """A part of the key heads, each of which one rank receives: what an exchange can scatter.

    heads, sizes: the key heads, one behind the other, and each rank's number of them.
    """

    heads: tuple[int, ...]
    sizes: tuple[int, ...]

    def select(self, x: Tensor, dim: int) -> Tensor:
        """Return these heads of a tensor whose heads are in `dim`."""
        first, count = self.heads[0], len(self.heads)
        if self.heads == tuple(range(first, first + count)):
            # Another tensor for each layer: dynamo traces no Function that has one twice.
            return x.view_as(x) if count == x.size(dim) else x.narrow(dim, first, count)
        return x.index_select(dim, torch.tensor(self.heads, dtype=torch.int64, device=x.device))


def layers_of(plan: Heads, most: int) -> list[Layer]:
    """Sort what the ranks need into layers, without copies as far as `most` layers allow.

    A key head that several ranks need is in several layers, so that autograd sums its gradients.
    """
    heads: list[list[int]] = []
    sizes: list[list[int]] = []
    for rank, (first, count) in enumerate(zip(plan.first, plan.keys, strict=True)):
        if count == 0:
            continue
        index = next((i for i, layer in enumerate(heads) if layer[-1] + 1 == first), len(heads))
        if index == len(heads) and index < most:
            heads.append([])
            sizes.append([0] * len(plan.keys))
        index = min(index, most - 1)
        heads[index] += range(first, first + count)
        sizes[index][rank] = count
    return [Layer(*map(tuple, parts)) for parts in zip(heads, sizes, strict=True)]


def matching_key_heads(plan: Heads, group: int, rank: int) -> list[int]:
    """Return the key head, among this rank's, of each of this rank's query heads."""
    begin = sum(plan.queries[:rank])
    return [head // group - plan.first[rank] for head in range(begin, begin + plan.queries[rank])]


def is_uniform(key_heads: list[int]) -> bool:
    """Whether the key heads of all query heads are in order, and equally often: torch's enable_gqa."""
    group = len(key_heads) // (key_heads[-1] + 1)
    return key_heads == [query_head // group for query_head in range(len(key_heads))]
