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


def repeated(x: torch.Tensor, dim: int, plan: Heads) -> torch.Tensor:
    """Lay out each rank's key heads one behind the other; the gradients of repeated heads are summed."""
    wanted = [
        head
        for first, count in zip(plan.first, plan.keys, strict=True)
        for head in range(first, first + count)
    ]
    if wanted == list(range(x.size(dim))):
        return x
    return x.index_select(dim, torch.tensor(wanted, dtype=torch.int64, device=x.device))


def key_of_each(plan: Heads, group: int, rank: int) -> list[int]:
    """Return the key head, among this rank's, of each of this rank's query heads."""
    begin = sum(plan.queries[:rank])
    return [head // group - plan.first[rank] for head in range(begin, begin + plan.queries[rank])]


def is_uniform(owners: list[int]) -> bool:
    """Whether every key head has equally many query heads, in order: torch's enable_gqa."""
    each = len(owners) // (owners[-1] + 1)
    return owners == [i // each for i in range(len(owners))]
