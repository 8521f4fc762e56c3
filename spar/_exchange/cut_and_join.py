# SPDX-License-Identifier: Apache-2.0
"""Cut out of a shard what a GatherPlan sends, join a result of own and received parts; and the transposes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .gather_plan import ZEROS, GatherPlan, Interval, runs_in_halo
from .layouts import Piece

# With more parts than that, one index is faster than a concatenation.
_FEW = 16


def ordered(plan: GatherPlan, own: Tensor, received: Tensor, dim: int, fill: float) -> Tensor:
    """Put parts of a rank's own and received items in order.

    Both stay in the graph of autograd where none of their items is used: peers wait for the gradient.
    """
    size = own.size(dim)

    def filled(count: int) -> Tensor:
        shape = list(own.shape)
        shape[dim] = count
        return own.new_full(shape, fill)

    if len(plan.order) > _FEW:
        index = _index(plan.order, size + received.size(dim), own.device)
        return torch.cat([own, received, filled(1)], dim).index_select(dim, index)
    parts = [own.narrow(dim, 0, 0), received.narrow(dim, 0, 0)]
    for first, count in plan.order:
        if first == ZEROS:
            parts.append(filled(count))
        elif first < size:
            parts.append(own.narrow(dim, first, count))
        else:
            parts.append(received.narrow(dim, first - size, count))
    return torch.cat(parts, dim)


def added_back(plan: GatherPlan, grad: Tensor, shard: int, received: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of a rank's own and received items: the transpose of `ordered`."""

    def sized(size: int) -> Tensor:
        shape = list(grad.shape)
        shape[dim] = size
        return grad.new_empty(shape)

    own, others = sized(shard), sized(received)
    if len(plan.order) > _FEW:
        sums = torch.cat([own.zero_(), others.zero_(), sized(1)], dim)
        sums.index_add_(dim, _index(plan.order, shard + received, grad.device), grad)
        return sums.narrow(dim, 0, shard).contiguous(), sums.narrow(dim, shard, received).contiguous()
    places = itertools.accumulate([count for _, count in plan.order], initial=0)
    parts = [
        (first, count, grad.narrow(dim, at, count))
        for (first, count), at in zip(plan.order, places, strict=False)
        if first != ZEROS
    ]
    # Runs are apart and cover the shard; a halo of own tokens is added to them.
    copies: list[tuple[int, int, Tensor]] = []
    additions: list[tuple[int, int, Tensor]] = []
    for first, count, part in sorted([part for part in parts if part[0] < shard], key=lambda part: -part[1]):
        is_apart = all(first + count <= at or first >= at + size for at, size, _ in copies)
        (copies if is_apart else additions).append((first, count, part))
    if sum([count for _, count, _ in copies]) < shard:
        own.zero_()
        copies, additions = [], copies + additions
    # Copies first: an addition can reach into several of them.
    for first, count, part in copies:
        own.narrow(dim, first, count).copy_(part)
    for first, count, part in additions:
        own.narrow(dim, first, count).add_(part)
    if sum([count for first, count, _ in parts if first >= shard]) < received:
        others.zero_()
    for first, count, part in parts:
        if first >= shard:
            others.narrow(dim, first - shard, count).copy_(part)
    return own, others


def _index(order: Sequence[Interval], zeros: int, device: torch.device) -> Tensor:
    """Return the item of each place of a result; `zeros`: of those that are zeros."""
    ranges = [
        torch.full((count,), zeros, device="cpu")
        if first == ZEROS
        else torch.arange(first, first + count, device="cpu")
        for first, count in order
    ]
    return torch.cat(ranges).to(device)


def selected(x: Tensor, parts: Sequence[Interval], dim: int) -> Tensor:
    """Return parts of a tensor, one behind the other along dim; a view if there is one part."""
    if len(parts) == 1:
        return x.narrow(dim, *parts[0])
    if len(parts) > _FEW:
        return x.index_select(dim, _index(parts, 0, x.device))
    return torch.cat([x.narrow(dim, *part) for part in parts], dim) if parts else x.narrow(dim, 0, 0)


def add_selected(x: Tensor, parts: Sequence[Interval], added: Tensor, dim: int) -> None:
    """Add to parts of a tensor in place what lies one behind the other along dim: `selected` transposed."""
    at = 0
    for first, count in parts:
        x.narrow(dim, first, count).add_(added.narrow(dim, at, count))
        at += count


def without_halo(
    where: str, y: Tensor, dim: int, runs: Sequence[Piece], sides: tuple[int, int], layout: object
) -> Tensor:
    """Keep the runs of a tensor that has each with a halo of so many tokens; where, layout: for messages."""
    parts = runs_in_halo(runs, *sides)
    expected = sum([size + sum(sides) for _, size in parts])
    if y.size(dim) != expected:
        raise ValueError(
            f"{where}: y is of size {y.size(dim)} in dim {dim}; expected {expected}, the runs of {layout} "
            f"with {sides[0]} and {sides[1]} tokens"
        )
    return selected(y, parts, dim)
