# SPDX-License-Identifier: Apache-2.0
"""Tensors that are columns of one tensor: their gradients are joined to that of the one in reused memory.

torch joins them in a new tensor, whose page faults take longer than the copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _C
from .._exchange.watch import is_any_traced, is_transformed
from .._group.registry import group_of
from ..errors import SparError

_LARGE = 1 << 20  # bytes; the C library keeps the pages of smaller tensors

_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("Alias", "Permute", "ReshapeAlias", "Slice", "Split", "SplitWithSizes", "Transpose"),
        *("Unsqueeze", "View"),
    )
)


class Rows(NamedTuple):
    """A tensor as rows [B, S, columns], of which each of the parts `[B, S, ...]` has some columns.

    Attributes:
        order: the parts, from the first columns on.
        shape, strides: of the rows.
    """

    order: list[int]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def with_one_gradient(tensors: Sequence[Tensor], group: Any) -> list[Tensor]:
    """Return the tensors, those that are all columns of one as views whose gradients are joined at once.

    Only for tensors whose way from the one is known: a hook of a view in between would not be called.

    tensors: `[B, S, ...]`.
    """
    result = list(tensors)
    of_base: dict[int, list[int]] = {}
    for i, x in enumerate(tensors):
        if x._base is not None and x.is_cpu and x.requires_grad:
            of_base.setdefault(id(x._base), []).append(i)
    for indices in of_base.values():
        parts = [tensors[i] for i in indices]
        base = parts[0]._base
        assert base is not None
        rows = _rows(base, parts) if len(parts) > 1 and _serves(base, parts, group) else None
        if rows is not None:
            views = _Columns.apply(base, rows, [x.shape for x in parts])  # type: ignore[no-untyped-call]
            for i, view in zip(indices, views, strict=True):
                result[i] = view
    return result


def _serves(base: Tensor, parts: Sequence[Tensor], group: Any) -> bool:
    return (
        base.nbytes >= _LARGE
        and torch.is_grad_enabled()
        and all(_is_plain_view(x, base) for x in parts)
        and not (is_any_traced([base, *parts]) or is_transformed() or forward_ad._current_level >= 0)
        and not group_of(group).own_output
    )


def _is_plain_view(x: Tensor, base: Tensor) -> bool:
    """Whether the gradient of x becomes that of the base by torch's views alone."""
    if x._backward_hooks or x.retains_grad or x.dtype != base.dtype:
        return False
    node = x.grad_fn
    while node is not None and node is not base.grad_fn:
        if node.name() not in _VIEWS:
            return False
        node = node.next_functions[0][0]
    return node is not None


def _rows(base: Tensor, parts: Sequence[Tensor]) -> Rows | None:
    """Return how the parts lie in the base; None unless they have each of its items once, in rows."""
    if min([x.dim() for x in parts]) < 3:
        return None
    inner = [dim for x in parts for dim in zip(x.shape[2:], x.stride()[2:], strict=True)]
    unit = min([stride for extent, stride in inner if extent > 1], default=1)
    order = sorted(range(len(parts)), key=lambda i: parts[i].storage_offset())
    outer, columns = (parts[0].shape[:2], parts[0].stride()[:2]), 0
    for i in order:
        x = parts[i]
        first = base.storage_offset() + columns * unit
        if (x.shape[:2], x.stride()[:2]) != outer or x.storage_offset() != first:
            return None
        if not _are_in_order(x.shape[2:], x.stride()[2:], unit):
            return None
        columns += x.shape[2:].numel()
    rows = Rows(order, (*outer[0], columns), (*outer[1], unit))
    is_all = torch.Size(rows.shape).numel() == base.numel()
    return rows if is_all and _are_dense(*rows[1:]) and _are_dense(base.shape, base.stride()) else None


def _are_in_order(shape: Sequence[int], strides: Sequence[int], unit: int) -> bool:
    """Whether items lie in row-major order, `unit` items of memory apart."""
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != unit:
            return False
        unit *= extent
    return True


def _are_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two items share memory, and there is none between them."""
    dims = _by_stride(strides)
    return _are_in_order([shape[dim] for dim in dims], [strides[dim] for dim in dims], 1)


def _by_stride(strides: Sequence[int]) -> list[int]:
    """Return the dims, those of the longest strides first."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


class _Columns(torch.autograd.Function):
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
        parts = [grads[i].flatten(2) for i in rows.order]
        if torch.is_grad_enabled():  # a graph sees nothing in place
            whole = torch.cat(parts, 2)
        else:
            whole = _reused(grads[0], rows)
            for part, columns in zip(parts, _cut(whole, rows, ctx.shapes), strict=True):
                columns.copy_(part)
        # As the memory, and that as the base.
        shape, strides = ctx.base
        memory = whole.permute(_by_stride(rows.strides)).reshape(-1)
        dims = _by_stride(strides)
        places = [dims.index(dim) for dim in range(len(dims))]
        return memory.view([shape[dim] for dim in dims]).permute(places), None, None


def _cut(whole: Tensor, rows: Rows, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    """Return the columns of each part, the first ones first."""
    return torch.split(whole, [shapes[i][2:].numel() for i in rows.order], 2)


def _reused(like: Tensor, rows: Rows) -> Tensor:
    """Return rows in the arena; in new memory where half of it is in use, as exchanges need the rest."""
    size = torch.Size(rows.shape).numel() * like.element_size()
    cap, _, allocated, *_ = _C.arena_stats()
    if size <= cap // 2 - allocated:
        with contextlib.suppress(SparError):  # no run of free pages is as long: this rank must not fail alone
            memory = _C.arena_take(size).untyped_storage()
            return torch.empty(0, dtype=like.dtype, device=like.device).set_(memory, 0, *rows[1:])
    return torch.empty_strided(*rows[1:], dtype=like.dtype, device=like.device)
