# SPDX-License-Identifier: Apache-2.0
"""Turn a function of (batch, head, query, key) indices into the intervals of `Spans`, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._exchange.arguments import ranks_of
from .._group.group import Call
from ..ops.gather import all_gather
from ..sizes import cal_split_sizes
from ..topology.resolve import process_group
from .pairs import EACH, Function, of_pairs, without_repeats

_NAME = "Spans.of: the function"
# So many pairs are evaluated at a time.
_PAIRS = 1 << 20


def by_bisection(function: Function, shape: Sequence[int], device: torch.device | str) -> Tensor:
    """Return [B, H, S, 2]: each query's keys, one interval that has its own place in it."""
    batch, heads, queries, keys = shape
    if queries != keys:
        raise ValueError(f"Spans.of: contiguous=True and {queries} queries of {keys} keys; expected as many")
    indices = [torch.arange(size, device=device) for size in (batch, heads, queries)]
    q = indices[2].expand(batch, heads, -1)
    if not q.numel():
        return torch.zeros(*q.shape, 2, dtype=torch.int32, device=device)

    def attends(k: Tensor) -> Tensor:
        return of_pairs(_NAME, function, "bool", [*indices, k], EACH)

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
    if 0 in (batch, heads, size, keys):
        return torch.zeros(batch, heads, size, 2, dtype=torch.int32, device=device)
    b, h, k = (torch.arange(count, device=device) for count in (batch, heads, keys))
    strip = max(1, _PAIRS // (batch * heads * keys))
    parts = []
    for first in range(begin, begin + size, strip):
        q = torch.arange(first, min(first + strip, begin + size), device=device)
        allowed = without_repeats(of_pairs(_NAME, function, "bool", [b, h, q, k]))
        found = intervals_of(allowed.expand(-1, -1, -1, keys))
        parts.append(found.expand(batch, heads, len(q), -1))
    most = max([part.size(3) for part in parts])
    return torch.cat([torch.nn.functional.pad(part, (0, most - part.size(3))) for part in parts], 2)


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
