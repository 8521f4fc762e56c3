# SPDX-License-Identifier: Apache-2.0
"""By what a group remembers an attention: two calls with one key are decided alike."""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch

from .._exchange.arguments import Key
from .._group.registry import place_of
from .._transports.dtypes import PLAIN_TYPES
from ..sequence_layout import WITH_DOCUMENTS
from .request import Request, hashes_of

# Equal options of other types, such as tensors, need not mean the same.
_EXACT = frozenset({bool, int, float, str, NoneType})


def key_of(request: Request, dtype: torch.dtype | None, groups: tuple[Any, Any] | None) -> Key:
    """Return by what a group remembers the attention of a request; None: it does not.

    A layout's group is not kept, or it would live on. Of values their shapes decide, and what ranks compare.

    dtype: to which autocast casts.
    """
    q, k, v, queries, keys, mask, spans, sinks, bias, attend, causal, window, grid, *others = request
    for x in (q, k, v):
        if type(x) not in PLAIN_TYPES or x.is_nested:
            return None
    sides = window if type(window) is tuple and len(window) == 2 else (window,)
    shape = grid if type(grid) is tuple and len(grid) == 2 else (grid,)
    options = causal, *sides, *shape, *others
    types = tuple(map(type, options))
    if not _EXACT.issuperset(types):
        return None
    values: tuple[object, ...] = ()
    if not (mask is spans is sinks is None and bias is None and attend is None):
        tensors = [x for x in (mask, sinks) if x is not None]
        functions = [x for x in (bias, attend) if x is not None]
        if not all(type(x) in PLAIN_TYPES for x in tensors) or not all(map(callable, functions)):
            return None
        learns = mask is not None and mask.requires_grad and torch.is_grad_enabled()
        passed = mask is None, sinks is None, bias is None, attend is None, learns
        shapes = [(x.shape, x.dtype, x.device, x.layout) for x in tensors]
        values = *passed, *shapes, None if spans is None else spans.shape, hashes_of(request)
    if request.kernel is not None or queries.kind in WITH_DOCUMENTS:
        # Kernels are asked once whether they can compute this.
        values = *values, torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    of_keys = None if keys is None else queries is keys or (keys.kind, keys.numbers, id(keys.group))
    return (
        *("attention", queries.kind, queries.numbers, of_keys, groups and place_of(groups[1]).handle),
        *(q.shape, q.dtype, q.device, q.layout, k.shape, k.dtype, k.device, k.layout),
        *(v.shape, v.dtype, v.device, v.layout, options, types, dtype, values),
    )
