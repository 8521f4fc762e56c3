# SPDX-License-Identifier: Apache-2.0
"""Dtypes as the core knows them, and what is done here for those that it does not know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import _C

PLAIN_TYPES = torch.Tensor, torch.nn.Parameter  # no set, which torch 2.6 does not compile
_C.use_torch(torch._C._from_dlpack, torch.uint8, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))

# codes of the dtypes that a copy can scale: csrc/devices/scale.def
SCALE_TYPES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in _C.scale_types()}
# how sums add a dtype: csrc/devices/cpu/sum.c
SUM_TYPES: dict[torch.dtype, int] = {getattr(torch, name): kind for name, kind in _C.sum_types()}


class ItemType(NamedTuple):
    """What an exchange must know of a dtype.

    Attributes:
        size: bytes of an item.
        scale, sums: its entries of SCALE_TYPES and SUM_TYPES; 0: none.
        lazy: the methods that say whether a tensor of it has other values than its memory: a view that
            conjugates, one that negates (the imaginary part of one that conjugates), and zeros without
            memory, which torch makes for gradients. torch's private `_neg_view` can negate tensors of other
            dtypes, too; it is not supported.
    """

    size: int
    scale: int
    sums: int
    lazy: tuple[str, ...]


_DTYPES = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_COMPLEX = {dtype for dtype in _DTYPES if dtype.is_complex}
_NEGATED = _COMPLEX | {dtype.to_real() for dtype in _COMPLEX}


def _lazy(dtype: torch.dtype) -> tuple[str, ...]:
    names = ("is_conj",) * (dtype in _COMPLEX) + ("is_neg",) * (dtype in _NEGATED)
    return (*names, "_is_zerotensor") if dtype.is_floating_point or dtype.is_complex else ()


# one look-up takes a third of asking torch and the tables above
ITEM_TYPES: dict[torch.dtype, ItemType] = {
    dtype: ItemType(
        dtype.itemsize,
        SCALE_TYPES.get(dtype, 0),
        SUM_TYPES.get(dtype, 0),
        _lazy(dtype),
    )
    for dtype in _DTYPES
}
# strided copies move items of these, whatever they mean, by their size in bytes
ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def apply_scale(output: torch.Tensor, factor: float, divide: bool) -> None:
    """output * factor or output / factor, never the product with the reciprocal: it rounds otherwise."""
    if factor != 1.0:
        output.div_(factor) if divide else output.mul_(factor)


def resolved(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its values in memory: x, if it has them there."""
    x = x.resolve_conj().resolve_neg()
    return x.clone() if x._is_zerotensor() else x


def copy_items(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy contiguous items of one size, whatever their dtypes mean."""
    if target.dtype != source.dtype or target.dtype not in SCALE_TYPES:
        item = ITEMS[target.dtype.itemsize]
        target, source = target.view(item), source.view(item)
    target.copy_(source)


_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def add_rows(parts: torch.Tensor) -> torch.Tensor:
    """Sum over dim 0 in its order, 16-bit floats in float32: the same bits as the core's sum."""
    first, *rest = parts.unbind(0)
    if not rest:
        return first.clone()
    total = first.to(_WIDER.get(parts.dtype, parts.dtype)) + rest[0]
    for part in rest[1:]:
        total += part
    return total.to(parts.dtype)


def sums_of(
    rows: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] | None
) -> list[torch.Tensor] | list[None]:
    """Sum each tensor over its dim 0: to `outs`, then None is returned for each, or to new tensors."""
    if outs is None:
        return [add_rows(parts) for parts in rows]
    for out, parts in zip(outs, rows, strict=True):
        out.copy_(add_rows(parts))
    return [None] * len(outs)
