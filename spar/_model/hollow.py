# SPDX-License-Identifier: Apache-2.0
"""Hollow tensors: what torch.compile traces a block with, in the place of parts.

Each has the whole tensor's shape and no memory, so that graphs and guards are of whole shapes, and refers to
the part that it stands for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .memory import in_memory_order, memory_order
from .part import whole_shape
from .spans_mask import SpansMask

# Attributes of a hollow tensor: the part, and the list of those like it that are free.
_LOCAL, _FREE = "_spar_local", "_spar_free"


class Hollows(threading.local):
    """Hollow tensors that are free to be used, by all that a guard may depend on."""

    def __init__(self) -> None:
        self._free: dict[Any, list[Tensor]] = {}

    def take(self, x: Tensor) -> Tensor:
        """Return one that stands for x, a part or a mask of spans, until `give_back`."""
        free = self._free.setdefault(_key(x), [])
        hollow = free.pop() if free else _made(x)
        attributes = vars(hollow)
        attributes[_LOCAL], attributes[_FREE] = x, free
        return hollow

    @staticmethod
    def give_back(hollow: Tensor) -> None:
        attributes = vars(hollow)
        del attributes[_LOCAL]
        attributes[_FREE].append(hollow)


def local_of(x: Any) -> Any:
    """Return the part that a hollow tensor stands for; anything else as it is."""
    return vars(x).get(_LOCAL, x) if isinstance(x, Tensor) else x


def is_hollow(x: Tensor) -> bool:
    return _LOCAL in vars(x)


def order_of(x: Tensor) -> tuple[int, ...] | None:
    """Return the dims of a part from the outermost in memory; None if they are in their order.

    By strides alone: a rank that has one token finds what others find.
    """
    if x.stride() == dense_strides(x.shape, None):
        return None
    order = tuple(memory_order(x))
    return None if order == tuple(range(x.dim())) else order


def dense_strides(shape: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps whose dims are in this order in memory."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order or range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def dense(x: Tensor, order: Sequence[int] | None) -> Tensor:
    """Return x without gaps, with its dims in this order in memory; x itself where it is so."""
    if order is None:
        return x.contiguous()
    return x if x.stride() == dense_strides(x.shape, order) else in_memory_order(x, order)


def _key(x: Tensor) -> Any:
    is_mask = isinstance(x, SpansMask)
    order = None if is_mask else order_of(x)
    inference = torch.is_inference_mode_enabled()
    return tuple(whole_shape(x)), order, x.dtype, x.device, x.requires_grad, inference, is_mask


def _made(x: Tensor) -> Tensor:
    shape = whole_shape(x)
    if isinstance(x, SpansMask):
        return torch.empty((), dtype=x.dtype, device=x.device).expand(shape)
    strides = dense_strides(shape, order_of(x))
    hollow = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
    if x.requires_grad:
        # No leaf, as activations are none: blocks may change them in place.
        with torch.enable_grad():
            hollow = hollow.requires_grad_().clone()
    hollow.untyped_storage().resize_(0)
    return hollow
