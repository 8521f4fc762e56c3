# SPDX-License-Identifier: Apache-2.0
"""Results of which each row is made of a window of rows: each rank gathers those that its own need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._exchange.gather_plan import ZEROS, plan_pieces, within
from ..memory import in_order_of, memory_of
from ..moving import gathered, runs_of
from ..part import Part

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


def reaching(start: int, stop: int, span: int, step: int, padding: int) -> tuple[int, int]:
    """Return which windows, `step` rows apart, may reach rows from start to before stop: at least one."""
    first = min((start + padding) // step, -((span - 1 - start - padding) // step))
    return first, (stop - 1 + padding) // step + 1 + (span < step)


def one_run(part: Part, unit: int = 1) -> Part | None:
    """Return a part of the same dim, one run of units of rows on each rank; None if they are too few."""
    count, rest = divmod(part.whole, unit)
    if rest or count < part.parts.world or not part.parts.is_in_order:
        return None
    return part.parts.part(part.dim, (count,), 1, unit)


def windowed(part: Part, count: int, reach: Reach, result: Part | None = None) -> tuple[Part, Take] | None:
    """Return the part of a result of `count` rows, and what gathers the rows that this rank's are made of.

    reach: returns which rows of the whole, from the first to before the last, a run of the result is made of.
        Those beyond its ends have the value `fill`, by which the second result is called. A rank without rows
        of the result gathers none.
    result: where its rows are to lie, in one run on each rank; by default evenly.
    """
    if result is None:
        if count < 2 or not part.tokens or not part.parts.is_in_order:
            return None
        result = part.parts.part(part.dim, (count,))
    wanted: list[list[tuple[int, int]]] = []
    start = 0
    for size in result.sizes:
        first, last = reach(start, start + size) if size else (0, 0)
        wanted.append(within(first, last - first, 0, part.whole))
        start += size
    return result, _taking(part, wanted, f"windows of {count} rows")


def listed(part: Part, runs: Sequence[range], result: Part | None = None) -> tuple[Part | None, Take]:
    """Return the part of a result of listed rows, and what gathers those of this rank, as `windowed` does.

    runs: rows of the whole, in the order of the result; those beyond its ends have the value `fill`.
    result: where the rows are to lie; by default as sequences do, or on every rank if they are fewer than
        ranks: then the part is None.
    """
    parts, dim, count = part.parts, part.dim, sum(map(len, runs))
    if result is None and count >= parts.world:
        result = parts.part(dim, (count,))
    found: list[list[range]] = []
    for rank in range(parts.world):
        places = [(0, count)] if result is None else [(at.start, at.size) for at in runs_of(result, rank)]
        found.append([run for start, size in places for run in _sliced(runs, start, size)])
    wanted = [[piece for run in of_rank for piece in within(*_span(run), 0, part.whole)] for of_rank in found]
    found_rows = _taking(part, wanted, f"{count} listed rows")
    own = found[parts.rank]
    spans = [_span(run)[1] for run in own]

    def take(x: Tensor, fill: float = 0.0) -> Tensor:
        y = found_rows(x, fill)
        if all(run.step == 1 for run in own):
            return y
        # Nothing is saved for backward, as a checkpoint would compute more again on ranks that save more.
        pieces = y.split(spans, dim) if len(own) > 1 else [y]
        pieces = [_stepped(piece, dim, run.step) for piece, run in zip(pieces, own, strict=True)]
        return in_order_of(torch.cat(pieces, dim), x) if len(own) > 1 else pieces[0]

    return result, take


def _stepped(x: Tensor, dim: int, step: int) -> Tensor:
    """Return every so many rows, from the first on, or from the last on if they are counted back."""
    x = x.flip(dim) if step < 0 else x
    return x[(slice(None),) * dim + (slice(None, None, abs(step)),)]


def _span(run: range) -> tuple[int, int]:
    """Return where the rows of a run begin, and how many there are from the first to the last."""
    first, last = sorted((run[0], run[-1]))
    return first, last + 1 - first


def _sliced(runs: Sequence[range], start: int, size: int) -> list[range]:
    """Return what lies at some places of runs, one behind the other."""
    found, at = [], 0
    for run in runs:
        found.append(run[max(start - at, 0) : max(start + size - at, 0)])
        at += len(run)
    return [run for run in found if len(run)]


def _taking(part: Part, wanted: list[list[tuple[int, int]]], note: str) -> Take:
    """Return what gathers the intervals that each rank wants."""
    parts, dim = part.parts, part.dim
    held = [runs_of(part, rank) for rank in range(parts.world)]
    plan = plan_pieces(held, wanted, parts.rank)
    pieces = [[start for start, size in of_rank if size] for of_rank in wanted]
    is_there = not any(plan.sizes) and all(
        len(runs) < 2 and len(starts) < 2 and ZEROS not in starts
        for runs, starts in zip(held, pieces, strict=True)
    )

    def take(x: Tensor, fill: float = 0.0) -> Tensor:
        if is_there:  # a view on each rank
            return x.narrow(dim, *(plan.order or ((0, 0),))[0])
        return gathered(x, part, plan, note, fill)

    return take


def separate(out: Tensor, x: Tensor) -> Tensor:
    """Return a result that shares no memory with x: what gathers rows may return a view."""
    return out.clone() if memory_of(out) == memory_of(x) else out


def format_of(x: Tensor) -> torch.memory_format:
    """Return the memory format that torch's functions over spatial dims give to their results."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    found = formats.get(x.dim(), torch.contiguous_format)
    return found if x.is_contiguous(memory_format=found) else torch.contiguous_format
