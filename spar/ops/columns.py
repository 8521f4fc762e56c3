# SPDX-License-Identifier: Apache-2.0
"""Tensors that are columns of one tensor: which are, so that their gradients are joined at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._exchange.fused_gradients import Columns, Rows, are_in_order, by_stride
from .._exchange.observers import is_any_traced, is_transformed
from .._group.registry import group_of

_LARGE = 1 << 20  # bytes; the C library keeps the pages of smaller tensors

_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("Alias", "Permute", "ReshapeAlias", "Slice", "Split", "SplitWithSizes", "Transpose"),
        *("Unsqueeze", "View"),
    )
)


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
            views = Columns.apply(base, rows, [x.shape for x in parts])  # type: ignore[no-untyped-call]
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
        if not are_in_order(x.shape[2:], x.stride()[2:], unit):
            return None
        columns += x.shape[2:].numel()
    rows = Rows(order, (*outer[0], columns), (*outer[1], unit))
    is_all = torch.Size(rows.shape).numel() == base.numel()
    return rows if is_all and _are_dense(*rows[1:]) and _are_dense(base.shape, base.stride()) else None


def _are_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two items share memory, and there is none between them."""
    dims = by_stride(strides)
    return are_in_order([shape[dim] for dim in dims], [strides[dim] for dim in dims], 1)
