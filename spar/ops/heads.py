# SPDX-License-Identifier: Apache-2.0
"""Exchange tokens for heads: which heads of tensors with fewer of them the heads of each rank need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._C import MOST_TENSORS
from .._control.state import Place
from .._exchange.exchange import Exchange
from .._exchange.graph_ops import run_decided
from .._exchange.layouts import Args, Layout, by_sizes, pair
from .._group.group import Group
from ..sizes import share
from .items import as_items, from_items


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


class HeadGroup(NamedTuple):
    """A part of the key heads, each of which one rank receives: what an exchange can scatter.

    heads, sizes: the key heads, one behind the other, and each rank's number of them.
    """

    heads: tuple[int, ...]
    sizes: tuple[int, ...]

    def select(self, x: Tensor, dim: int) -> Tensor:
        """Return these heads of a tensor whose heads are in `dim`."""
        first, count = self.heads[0], len(self.heads)
        if self.heads == tuple(range(first, first + count)):
            # Another tensor for each group: dynamo traces no Function that has one twice.
            return x.view_as(x) if count == x.size(dim) else x.narrow(dim, first, count)
        return x.index_select(dim, torch.tensor(self.heads, dtype=torch.int64, device=x.device))


def groups_of_heads(plan: Heads, most: int) -> list[HeadGroup]:
    """Sort what the ranks need into groups of heads, without copies as far as `most` groups allow.

    A key head that several ranks need is in several groups, so that autograd sums its gradients.
    """
    heads: list[list[int]] = []
    sizes: list[list[int]] = []
    for rank, (first, count) in enumerate(zip(plan.first, plan.keys, strict=True)):
        if count == 0:
            continue
        index = next((i for i, group in enumerate(heads) if group[-1] + 1 == first), len(heads))
        if index == len(heads) and index < most:
            heads.append([])
            sizes.append([0] * len(plan.keys))
        index = min(index, most - 1)
        heads[index] += range(first, first + count)
        sizes[index][rank] = count
    return [HeadGroup(*map(tuple, parts)) for parts in zip(heads, sizes, strict=True)]


def repeats_of(plan: Heads, ratio: int, rank: int) -> list[int] | None:
    """Return the key head, among this rank's, of each of this rank's query heads.

    None if these are in order and equally often, as in torch's enable_gqa.

    ratio: how many query heads attend to one key head.
    """
    begin, count = sum(plan.queries[:rank]), plan.queries[rank]
    order = [head // ratio - plan.first[rank] for head in range(begin, begin + count)]
    if not order:
        return None
    each = count // (order[-1] + 1)
    return None if order == [head // each for head in range(count)] else order


class HeadExchange:
    """An exchange of tokens for heads of several tensors, and that of results back, decided once.

    `scatter` returns tensors of this rank's heads. A tensor of fewer heads than H has those that the rank's
    heads need, in order, equally often each: head i of H goes with head i // (H / its number), as in torch's
    enable_gqa.
    """

    __slots__ = ("_back", "_forward", "_head", "_scattered", "own")

    def __init__(
        self,
        name: str,
        group: Group | Place,
        counts: Sequence[int],
        heads: int,
        head: int,
        sequences: Sequence[Layout],
        results: int,
        note: str = "",
    ) -> None:
        """Decide the exchanges of an operation, which messages name.

        Args:
            counts: each tensor's number of heads, which divides H.
            heads: H.
            head: the dim of the heads.
            sequences: how each tensor's tokens lie on the ranks. Results lie as the first one's.
            results: how many tensors go back.
            note: as in Exchange.
        """
        world, rank, self._head = group.world, group.rank, head
        # Of each tensor: the groups of its heads, each of which is one input of the exchange; whether that is
        # one group of all heads; the index of that of which this rank receives heads; and `repeats_of`.
        self._scattered: list[tuple[list[HeadGroup], bool, int, list[int] | None]] = []
        grouped = sum([count != heads for count in counts])
        most = (MOST_TENSORS - len(counts) + grouped) // max(grouped, 1)
        args: list[Args] = []
        for count, sequence in zip(counts, sequences, strict=True):
            plan = heads_of_ranks(heads, count, world)
            whole = [HeadGroup(tuple(range(heads)), plan.queries)]
            groups = whole if count == heads else groups_of_heads(plan, most)
            # Groups of which this rank receives nothing stay in the graph of the exchange.
            own = next((i for i, part in enumerate(groups) if part.sizes[rank]), 0)
            is_whole = [part.heads for part in groups] == [tuple(range(count))]
            self._scattered.append((groups, is_whole, own, repeats_of(plan, heads // count, rank)))
            args += [pair(sequence, by_sizes(head, part.sizes)) for part in groups]
        sizes = heads_of_ranks(heads, heads, world).queries
        # This rank's heads: the first one's number, and their number.
        self.own = sum(sizes[:rank]), sizes[rank]
        self._forward = _exchanges(name, group, args, note)
        self._back = _exchanges(name, group, [pair(by_sizes(head, sizes), sequences[0])] * results, "")

    def scatter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Exchange tokens of all heads for all tokens of this rank's heads."""
        head, compiles = self._head, is_dynamo_compiling()
        inputs: list[Tensor] = []
        for x, (groups, is_whole, _, _) in zip(tensors, self._scattered, strict=True):
            if is_whole and not compiles:
                inputs.append(x)
            else:
                inputs += [group.select(x, head) for group in groups]
        received, results, first = _run(self._forward, inputs), [], 0
        for groups, _, own, repeats in self._scattered:
            x = received[first + own]
            if repeats is not None:
                x = x.index_select(head, torch.tensor(repeats, dtype=torch.int64, device=x.device))
            results.append(x)
            first += len(groups)
        return results

    def gather(self, results: Sequence[Tensor]) -> Sequence[Tensor]:
        """Exchange all tokens of this rank's heads for its tokens of all heads."""
        return run_decided(self._back[0], results) if len(results) == 1 else _run(self._back, results)


def _exchanges(name: str, group: Group | Place, args: Sequence[Args], note: str) -> list[Exchange]:
    """Return what moves any number of tensors, of which one exchange has so many at most."""
    return [
        Exchange(name, group, tuple(args[i : i + MOST_TENSORS]), note=note)
        for i in range(0, len(args), MOST_TENSORS)
    ]


def _run(exchanges: Sequence[Exchange], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Move tensors of any dtypes."""
    dtype = tensors[0].dtype
    for x in tensors:
        if x.dtype != dtype:
            # Not before heads are selected: autograd sums gradients of key heads in the tensors' own dtype.
            moved = _run(exchanges, as_items(tensors))
            return [from_items(y, like) for y, like in zip(moved, tensors, strict=True)]
    if len(exchanges) == 1:
        return run_decided(exchanges[0], tensors)
    outputs: list[Tensor] = []
    for exchange in exchanges:
        outputs += run_decided(exchange, tensors[len(outputs) : len(outputs) + len(exchange.args)])
    return outputs
