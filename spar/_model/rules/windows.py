# SPDX-License-Identifier: Apache-2.0
"""Results of which each row is made of a window of rows: each rank gathers those that its own need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._exchange.arguments import Arguments
from ..._exchange.gather_plan import plan_pieces, within
from ..._exchange.gathering import gather_pieces
from ..moving import runs_of
from ..part import Part, in_order_of

Reach = Callable[[int, int], tuple[int, int]]
Take = Callable[..., Tensor]


def along(value: Any, axis: int) -> Any:
    """Return an argument for one of the spatial dims: it may be one for all of them."""
    if not isinstance(value, (tuple, list)):
        return value
    return value[axis] if len(value) > 1 else value[0]


def each(value: Any, axes: int) -> list[Any]:
    """Return an argument for each of the spatial dims."""
    return [along(value, axis) for axis in range(axes)]


def on_rows(function: Callable[[Tensor], Tensor], x: Tensor, dim: int, least: int = 1) -> Tensor:
    """Run a function that needs rows; on a rank without any it runs on zeros, and its result is dropped.

    An empty result that is derived from all that others' are lets the rank take part in backward's exchanges.
    """
    if x.size(dim):
        return function(x)
    shape = [*x.shape[:dim], least, *x.shape[dim + 1 :]]
    return function(torch.cat([x, x.new_zeros(shape)], dim)).narrow(dim, 0, 0)


def one_run(part: Part, unit: int = 1) -> Part | None:
    """Return a part of the same dim, one run of units of rows on each rank; None if they are too few."""
    count, rest = divmod(part.whole, unit)
    if rest or count < part.parts.world or not part.parts.is_in_order:
        return None
    return part.parts.part(part.dim, (count,), 1, unit)


def windowed(part: Part, count: int, reach: Reach) -> tuple[Part, Take] | None:
    """Return the part of a result of `count` rows, and what gathers the rows that this rank's are made of.

    reach: returns which rows of the whole, from the first to before the last, a run of the result is made of.
        Those beyond its ends have the value `fill`, by which the second result is called. A rank without rows
        of the result gathers none.
    """
    if count < 2 or not part.tokens or not part.parts.is_in_order:
        return None
    parts, dim, result = part.parts, part.dim, part.parts.part(part.dim, (count,))
    wanted: list[list[tuple[int, int]]] = []
    start = 0
    for size in result.sizes:
        first, last = reach(start, start + size) if size else (0, 0)
        wanted.append(within(first, last - first, 0, part.whole))
        start += size
    plan = plan_pieces([runs_of(part, rank) for rank in range(parts.world)], wanted, parts.rank)

    def take(x: Tensor, fill: float = 0.0) -> Tensor:
        with Arguments("a sharded model", x, parts.group) as call:
            return in_order_of(gather_pieces(call, plan, [x], dim, f"windows of {count} rows", fill)[0], x)

    return result, take


def format_of(x: Tensor) -> torch.memory_format:
    """Return the memory format that torch's functions over spatial dims give to their results."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    found = formats.get(x.dim(), torch.contiguous_format)
    return found if x.is_contiguous(memory_format=found) else torch.contiguous_format
