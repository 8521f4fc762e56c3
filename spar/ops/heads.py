# SPDX-License-Identifier: Apache-2.0
"""Exchange tokens for heads: which heads of tensors with fewer of them the heads of each rank need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._C import MOST_TENSORS
from .._group.registry import place_of
from ..sizes import share
from .all_to_all import How, all_to_all_for
from .items import as_items, from_items

# The dims of heads and tokens, the group, and a number of tokens or None.
Dims = tuple[int, int, Any, int | None]


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


def scatter_heads(
    name: str,
    tensors: Sequence[Tensor],
    heads: int,
    dims: Dims,
    layouts: Sequence[Any] | None,
    note: str = "",
) -> list[Tensor]:
    """Exchange tokens for this rank's heads, in one exchange of tensors that have a number that divides H.

    Args:
        name: of the operation, for messages.
        heads: H, of which each rank has a share.
        dims: of heads and tokens, the group, and the number of tokens of the result if there are no layouts.
        layouts: of each tensor's sequence.
        note: as in Exchange.

    Returns:
        Tensors of this rank's heads. A tensor of fewer heads has those that the rank's heads need, in order,
        equally often each: head i of H goes with head i // (H / its number), as in torch's enable_gqa.
    """
    head, seq, group, size = dims
    place = place_of(group)
    counts = [x.size(head) for x in tensors]
    grouped = sum([count != heads for count in counts])
    most = (MOST_TENSORS - len(counts) + grouped) // max(grouped, 1)
    # One plan and one list of layers for all tensors of as many heads.
    of_count: dict[int, tuple[Heads, list[Layer]]] = {}
    for count in counts:
        if count not in of_count:
            plan = heads_of_ranks(heads, count, place.world)
            all_heads = [Layer(tuple(range(heads)), plan.queries)]
            of_count[count] = plan, layers_of(plan, most) if count != heads else all_heads
    layers = [of_count[count][1] for count in counts]
    inputs = [layer.select(x, head) for x, of in zip(tensors, layers, strict=True) for layer in of]
    sizes = [layer.sizes for of in layers for layer in of]
    by_layer = None
    if layouts is not None:
        by_layer = [layout for layout, of in zip(layouts, layers, strict=True) for _ in of]
    how = How(sizes, None, by_layer, None)
    received = all_to_all_for(name, as_items(inputs), group, (head, seq, size), how, note)
    # A key head that several ranks need is in several inputs: autograd sums its gradients in their dtype.
    outputs = iter([from_items(x, y) for x, y in zip(received, inputs, strict=True)])
    results = []
    for count in counts:
        plan, of = of_count[count]
        parts = [next(outputs) for _ in of]
        # Layers of which this rank receives nothing stay in the graph of the exchange.
        own = parts[next((i for i, layer in enumerate(of) if layer.sizes[place.rank]), 0)]
        results.append(_matched(own, head, matching_key_heads(plan, heads // count, place.rank)))
    return results


def _matched(x: Tensor, head: int, order: Sequence[int]) -> Tensor:
    """Repeat heads of x where the rank's heads, which need those of `order`, do not follow them evenly."""
    order = list(order)
    if order == list(range(x.size(head))) or not order or is_uniform(order):
        return x
    return x.index_select(head, torch.tensor(order, dtype=torch.int64, device=x.device))


def gather_heads(name: str, outputs: Any, heads: int, dims: Dims, layout: Any) -> Any:
    """Exchange a tensor of this rank's heads, or a list of such, for this rank's tokens of all heads.

    layout: of the sequence; None: it is the dims' number of tokens of each rank.
    """
    head, seq, group, _ = dims
    sizes = heads_of_ranks(heads, heads, place_of(group).world).queries
    count = len(outputs) if isinstance(outputs, list) else 1
    how = How(None, [sizes] * count if isinstance(outputs, list) else sizes, None, layout)
    return all_to_all_for(name, outputs, group, (seq, head, None), how)
