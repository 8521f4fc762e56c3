# SPDX-License-Identifier: Apache-2.0
"""Tensors of several dtypes as items of one, so that one exchange moves all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

# By size: the dtype to which narrower ints and bools are converted.
_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_REALS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


class _View(torch.autograd.Function):
    """View a tensor as another dtype, bit by bit, and its gradient likewise back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return x.contiguous().view(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _viewed(grad, ctx.dtype), None


def _viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else cast(Tensor, _View.apply(x, dtype))  # type: ignore[no-untyped-call]


def as_items(tensors: Sequence[Tensor]) -> list[Tensor]:
    """View tensors as items of one dtype, with one more dim to grow, unless they have one dtype.

    An exchange moves items and computes nothing, so that their values do not matter. What is computed of the
    tensors or of their gradients, such as a sum, must be computed before or behind.
    """
    if all(x.dtype == tensors[0].dtype for x in tensors):
        return list(tensors)
    dtypes = [_REALS.get(x.dtype, x.dtype) for x in tensors]
    # Ints have no gradient: tensors that may have one are viewed as floats.
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    items = min(floats or dtypes, key=lambda dtype: dtype.itemsize)
    return [_viewed(_widened(x[..., None], items.itemsize), items) for x in tensors]


def from_items(x: Tensor, like: Tensor) -> Tensor:
    """Undo `as_items`; like: a tensor of the dtype and number of dims."""
    if x.dim() == like.dim():
        return x
    wide = _INTS[x.itemsize] if like.itemsize < x.itemsize else like.dtype
    # Not [..., 0], whose gradient would be a whole tensor of zeros and a copy.
    return _viewed(x, wide).squeeze(-1).to(like.dtype)


def _widened(x: Tensor, size: int) -> Tensor:
    """Convert narrower ints and bools to ints of a size in bytes."""
    return x if x.itemsize >= size else x.to(_INTS[size])
