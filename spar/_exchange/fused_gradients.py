# SPDX-License-Identifier: Apache-2.0
"""Gradients of tensors that are columns of one tensor, as columns of its gradient.

torch joins them in a new tensor, whose page faults take longer than the copy. Here they are joined in reused
memory; those that an exchange returns are written there side by side, and need no copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._group.group import Group
from ..errors import SparError
from .exchange import MOVE, Chain, Exchange
from .layouts import out_shape
from .observers import is_any_traced

# Backwards of views of [B, S, ...] that leave its items in their order. Torch's own nodes have no type in
# Python that tells them apart, but a name.
_SAME_ORDER = frozenset(("AliasBackward0", "UnsqueezeBackward0", "ViewBackward0"))


class Rows(NamedTuple):
    """A tensor as rows [B, S, columns], of which each of the parts `[B, S, ...]` has some columns.

    Attributes:
        order: the parts, from the first columns on.
        shape, strides: of the rows.
    """

    order: list[int]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Columns(torch.autograd.Function):
    """The parts of a tensor that rows describe."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, rows: Rows, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
        ctx.rows, ctx.shapes = rows, shapes
        ctx.base = base.shape, base.stride()
        whole = base.as_strided(rows.shape, rows.strides)
        parts: list[Any] = [None] * len(shapes)
        for i, part in zip(rows.order, _cut(whole, rows, shapes), strict=True):
            parts[i] = part.view(shapes[i])
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows = ctx.rows
        if torch.is_grad_enabled():  # a graph sees nothing in place
            whole = torch.cat([grads[i].flatten(2) for i in rows.order], 2)
        elif are_columns(grads, rows):
            whole = grads[rows.order[0]].as_strided(rows.shape, rows.strides)
        else:
            found = _reused(grads[0], rows)
            whole = grads[0].new_empty_strided(*rows[1:]) if found is None else found
            for i, columns in zip(rows.order, _cut(whole, rows, ctx.shapes), strict=True):
                part = grads[i].flatten(2)
                if rows.strides[1] != 1:
                    columns.copy_(part)
                    continue
                for to, sample in zip(columns, part, strict=True):
                    to.t().copy_(sample.t())  # torch transposes a matrix by blocks, in a third of the time
        # As the memory, and that as the base.
        shape, strides = ctx.base
        memory = whole.permute(by_stride(rows.strides)).reshape(-1)
        dims = by_stride(strides)
        places = [dims.index(dim) for dim in range(len(dims))]
        return memory.view([shape[dim] for dim in dims]).permute(places), None, None


_NODE: Any = Columns._backward_cls


def targets_of(back: Exchange | Chain, grads: Sequence[Tensor], edges: Sequence[Any]) -> list[Any] | None:
    """Return where an exchange shall write its outputs, the gradients that autograd passes to the edges.

    Each rank decides for itself: what is not written side by side, it joins after the exchange.

    Returns:
        For each output columns of a tensor in the arena, or None; None where all are None.
    """
    joins: dict[Any, dict[int, int]] = {}  # backward of Columns -> the number of its part -> of the gradient
    for i, edge in enumerate(edges):
        node, part = _behind_views(*edge)
        if type(node) is _NODE:
            joins.setdefault(node, {})[part] = i
    if not joins or isinstance(back, Chain) or not _takes_columns(back, grads):
        return None
    targets: list[Any] = [None] * len(grads)
    taken = False
    for node, outputs in joins.items():
        for i, target in _columns_of(node, outputs, back, grads).items():
            targets[i], taken = target, True
    return targets if taken else None


def _behind_views(node: Any, number: int) -> tuple[Any, int]:
    """Return the edge to which a gradient goes in the end, as the same memory: models view parts as heads."""
    while node is not None and node.name() in _SAME_ORDER:
        node, number = node.next_functions[0]
    return node, number


def _takes_columns(back: Exchange, grads: Sequence[Tensor]) -> bool:
    group = back.group
    if not isinstance(group, Group) or back.kind != MOVE or back.is_local or group.world == 1:
        return False
    channel = group.channels.get("cpu")
    return (
        channel is not None
        and channel.takes_columns
        and not (torch.is_grad_enabled() or is_any_traced(grads))
        and grads[0].is_cpu
    )


def _columns_of(
    node: Any, outputs: dict[int, int], back: Exchange, grads: Sequence[Tensor]
) -> dict[int, Tensor]:
    """Return columns of new memory for the outputs of a node, all of which are gradients of the exchange."""
    rows, shapes = node.rows, node.shapes
    tokens, columns = rows.shape[1:]
    if len(outputs) != len(shapes) or rows.strides != (tokens * columns, columns, 1) or not tokens:
        return {}
    place = back.group.world, back.group.rank
    places = {i: out_shape(grads[i].shape, back.args[i], *place) for i in outputs.values()}
    if {tuple(shape[:2]) for shape in places.values()} != {rows.shape[:2]}:
        return {}
    whole = _reused(grads[outputs[0]], rows)
    if whole is None:
        return {}
    parts = zip(rows.order, _cut(whole, rows, shapes), strict=True)
    return {outputs[number]: part.view(places[outputs[number]]) for number, part in parts}


def are_columns(grads: Sequence[Tensor], rows: Rows) -> bool:
    """Whether tensors are the columns of one in memory, as the rows describe it."""
    first, unit = grads[rows.order[0]], rows.strides[2]
    memory, at = first.untyped_storage().data_ptr(), first.storage_offset()
    for i in rows.order:
        x = grads[i]
        shape, strides = x.shape, x.stride()
        if x.storage_offset() != at or x.untyped_storage().data_ptr() != memory:
            return False
        for extent, stride, expected in zip(shape[:2], strides, rows.strides, strict=False):
            if extent != 1 and stride != expected:
                return False
        if not are_in_order(shape[2:], strides[2:], unit):
            return False
        at += shape[2:].numel() * unit
    return True


def are_in_order(shape: Sequence[int], strides: Sequence[int], unit: int) -> bool:
    """Whether items lie in row-major order, `unit` items of memory apart."""
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != unit:
            return False
        unit *= extent
    return True


def by_stride(strides: Sequence[int]) -> list[int]:
    """Return the dims, those of the longest strides first."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _cut(whole: Tensor, rows: Rows, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    """Return the columns of each part, the first ones first."""
    return torch.split(whole, [shapes[i][2:].numel() for i in rows.order], 2)


def _reused(like: Tensor, rows: Rows) -> Tensor | None:
    """Return rows in the arena; None where half of it is in use, as exchanges need the rest."""
    size = torch.Size(rows.shape).numel() * like.element_size()
    cap, _, allocated, *_ = _C.arena_stats()
    if size <= cap // 2 - allocated:
        with contextlib.suppress(SparError):  # no run of free pages is as long: this rank must not fail alone
            memory = _C.arena_take(size).untyped_storage()
            return torch.empty(0, dtype=like.dtype, device=like.device).set_(memory, 0, *rows[1:])
    return None
