"""Which key and value heads the query heads of each rank need."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..sizes import share


class Heads(NamedTuple):
    """Query heads by the size rule; for each rank the key heads that its query heads attend to.

    Query head h of H attends to key head h // (H / key heads), as in torch's enable_gqa. Neighbouring ranks
    can need the same key head.
    """

    queries: tuple[int, ...]  # each rank's number of query heads
    first: tuple[int, ...]  # each rank's first key head
    keys: tuple[int, ...]  # each rank's number of key heads


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
    """A part of the key heads, each of which one rank receives: what an exchange can scatter."""

    heads: tuple[int, ...]  # one behind the other
    sizes: tuple[int, ...]  # each rank's number of them

    def of(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        first, count = self.heads[0], len(self.heads)
        if self.heads == tuple(range(first, first + count)):
            # another tensor for each layer: dynamo traces no Function that has one twice
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
        own = next((i for i, layer in enumerate(heads) if layer[-1] + 1 == first), len(heads))
        if own == len(heads) and own < most:
            heads.append([])
            sizes.append([0] * len(plan.keys))
        own = min(own, most - 1)
        heads[own] += range(first, first + count)
        sizes[own][rank] = count
    return [Layer(tuple(held), tuple(parts)) for held, parts in zip(heads, sizes, strict=True)]


def key_of_each(plan: Heads, group: int, rank: int) -> list[int]:
    """Return the key head, among this rank's, of each of this rank's query heads."""
    begin = sum(plan.queries[:rank])
    return [head // group - plan.first[rank] for head in range(begin, begin + plan.queries[rank])]


def is_uniform(owners: list[int]) -> bool:
    """Whether every key head has equally many query heads, in order: torch's enable_gqa."""
    each = len(owners) // (owners[-1] + 1)
    return owners == [i // each for i in range(len(owners))]
