# SPDX-License-Identifier: Apache-2.0
"""Turn a function of (batch, head, query, key) indices into the intervals of `Spans`, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._exchange.arguments import ranks_of
from .._group.group import Call
from ..ops.gather import all_gather
from ..sizes import cal_split_sizes
from ..topology.resolve import process_group

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# So many pairs are evaluated at a time.
_PAIRS = 1 << 20


def by_bisection(function: Function, shape: Sequence[int], device: torch.device | str) -> Tensor:
    """Return [B, H, S, 2]: each query's keys, one interval that has its own place in it."""
    batch, heads, queries, keys = shape
    if queries != keys:
        raise ValueError(f"Spans.of: contiguous=True and {queries} queries of {keys} keys; expected as many")
    b, h, q = (torch.arange(size, device=device) for size in (batch, heads, queries))
    b, h, q = b[:, None, None], h[:, None], q.expand(batch, heads, -1)

    def attends(k: Tensor) -> Tensor:
        return _checked(function(b.expand_as(q), h.expand_as(q), q, k), q.shape)

    own = attends(q)
    if not bool(own.all()):
        at = own.logical_not().nonzero()[0].tolist()
        raise ValueError(
            f"Spans.of: contiguous=True, and query {at[2]} of sample {at[0]}, head {at[1]}, does not attend "
            "to the key in its own place; expected that all do. Pass contiguous=False"
        )
    low, high = torch.zeros_like(q), q.clone()
    while bool((low < high).any()):
        middle = (low + high) // 2
        yes = attends(middle)
        low, high = torch.where(yes, low, middle + 1), torch.where(yes, middle, high)
    first = high
    low, high = q.clone(), torch.full_like(q, keys - 1)
    while bool((low < high).any()):
        middle = (low + high + 1) // 2
        yes = attends(middle)
        low, high = torch.where(yes, middle, low), torch.where(yes, high, middle - 1)
    return torch.stack([first, low + 1], -1).to(torch.int32)


def by_pairs(function: Function, shape: Sequence[int], device: torch.device | str, group: Any) -> Tensor:
    """Return [B, H, S, 2n]; with a group each rank evaluates some of the queries, and all gather them."""
    queries = shape[2]
    if group is None:
        return _of_rows(function, shape, device, 0, queries)
    real = process_group(group, "Spans.of")
    sizes = cal_split_sizes(queries, real.size())
    begin = sum(sizes[: real.rank()])
    # A function that fails on one rank must not leave the others waiting for its part.
    with Call(ranks_of(real, "Spans.of"), "Spans.of", 2, torch.device(device).type):
        ends = _of_rows(function, shape, device, begin, sizes[real.rank()])
        most = int(all_gather(torch.tensor([ends.size(3)], device=device), real).max())
        ends = torch.nn.functional.pad(ends, (0, most - ends.size(3)))
        return all_gather(ends, real, 2, sizes)


def _of_rows(
    function: Function, shape: Sequence[int], device: torch.device | str, begin: int, size: int
) -> Tensor:
    batch, heads, _, keys = shape
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[:, None, None]
    k = torch.arange(keys, device=device)
    strip = max(1, _PAIRS // max(1, batch * heads * keys))
    parts = []
    for first in range(begin, begin + size, strip):
        q = torch.arange(first, min(first + strip, begin + size), device=device)[:, None]
        allowed = _checked(function(b, h, q, k), (batch, heads, len(q), keys))
        parts.append(intervals_of(allowed))
    most = max([part.size(3) for part in parts], default=2)
    parts = [torch.nn.functional.pad(part, (0, most - part.size(3))) for part in parts]
    return torch.cat(parts, 2) if parts else torch.zeros(batch, heads, 0, 2, dtype=torch.int32, device=device)


def intervals_of(allowed: Tensor) -> Tensor:
    """Return the runs of True along the last dim as int32 [.., 2n], (0, 0) behind the last."""
    shape, rows = allowed.shape[:-1], allowed.flatten(0, -2)
    # A run begins and ends where neighbours differ.
    rises, falls = rows.clone(), rows.clone()
    rises[:, 1:] &= ~rows[:, :-1]
    falls[:, :-1] &= ~rows[:, 1:]
    row, first = rises.nonzero(as_tuple=True)
    _, last = falls.nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=len(rows))
    most = max(int(counts.max()) if len(rows) else 0, 1)
    number = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    found = torch.zeros(len(rows), most, 2, dtype=torch.int32, device=allowed.device)
    found[row, number] = torch.stack([first, last + 1], -1).to(torch.int32)
    return found.reshape(*shape, 2 * most)


def _checked(result: object, shape: Sequence[int]) -> Tensor:
    """Return what the function returned, of the whole shape; refuse anything that is not a mask of it."""
    if not isinstance(result, Tensor) or result.dtype != torch.bool:
        value = f"a tensor of {result.dtype}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise TypeError(f"Spans.of: the function returned {value}; expected a bool tensor")
    try:
        return result.expand(list(shape))
    except RuntimeError:
        raise ValueError(
            f"Spans.of: the function returned a tensor of shape {list(result.shape)}; expected "
            f"{list(shape)}, or one that broadcasts to it"
        ) from None
