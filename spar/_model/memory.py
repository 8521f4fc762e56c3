# SPDX-License-Identifier: Apache-2.0
"""How tensors lie in memory, and which results share it with an input, on parts and if nothing is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .nested import tensors_in

_VIEWS_NAMES = """
narrow view reshape view_as reshape_as flatten unflatten chunk split unbind tensor_split select transpose
permute expand squeeze unsqueeze diagonal movedim moveaxis swapaxes swapdims unfold t get_T get_mT get_H
adjoint split_with_sizes unsafe_chunk unsafe_split hsplit vsplit dsplit ravel expand_as broadcast_to
get_data detach alias slice get_real get_imag real imag view_as_real view_as_complex
"""
_VIEWS = frozenset(_VIEWS_NAMES.split())
_MAKING_NAMES = """
zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
"""
MAKING = frozenset(_MAKING_NAMES.split())  # functions that make a tensor of no other's elements
_MAY_COPY = frozenset({"reshape", "reshape_as", "flatten", "ravel"})  # in one process, too
MAY_SHARE = _MAY_COPY | {"contiguous"}


def is_view(name: str, args: Any) -> bool:
    """Whether a function's results share memory with its first argument."""
    return name in _VIEWS or (name == "__getitem__" and _is_basic(args[1]))


def are_copies(name: str, args: Any, base: Any, out: Any, is_moved: bool) -> bool:
    """Whether results that would share a tensor's memory if nothing was sharded do not."""
    if not isinstance(base, Tensor) or not is_view(name, args) or (name in _MAY_COPY and not is_moved):
        return False
    memory = memory_of(base)
    return any(memory_of(x) != memory for x in tensors_in(out))


def has_no_gaps(x: Tensor, dim: int) -> bool:
    """Whether x is contiguous, and would be if its dim of size 1 were larger."""
    return x.is_contiguous() and x.stride(dim) == prod(x.shape[dim + 1 :])


def _is_basic(index: Any) -> bool:
    entries = index if isinstance(index, tuple) else (index,)
    return all(
        entry is None or entry is Ellipsis or isinstance(entry, (slice, Integral)) for entry in entries
    )


def memory_of(x: Tensor) -> int:
    """Return the address of a tensor's storage: tensors that share memory have the same."""
    number: int = x.untyped_storage()._cdata
    return number


def version_of(x: Tensor) -> int | None:
    """Return how often a tensor was changed; None for inference tensors, which do not count it."""
    return None if x.is_inference() else x._version


def memory_order(x: Tensor) -> list[int]:
    """Return the dims of a part, from the outermost in memory to the innermost."""
    # Of dims of one stride, the inner one has size 1 or 0 here.
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda dim: (-strides[dim], x.shape[dim] < 2))


def in_order_of(out: Tensor, x: Tensor) -> Tensor:
    """Return a contiguous tensor with its dims in memory as those of x, as it would be in one process."""
    order = memory_order(x)
    return out if order == sorted(order) else in_memory_order(out, order)


def in_memory_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return a copy without gaps whose dims are in this order in memory, the outermost first."""
    dense = x.permute(list(order)).clone(memory_format=torch.contiguous_format)
    return dense.permute([order.index(dim) for dim in range(len(order))])
