# SPDX-License-Identifier: Apache-2.0
"""Functions that add to rows, or reduce into them, by an index, as a graph's nodes take from their edges.

Each rank reduces its part of what is added, for its own rows and for those of others, which it sends to them.
The result is a part of the rows, also of rows that were whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..call import FunctionCall, Plan, moves_to, rule
from ..dtensors import is_distributed
from ..indexed import RowTable, row_table
from ..part import Part, mark, part_of, whole_shape
from .rows import one_of_equal

_SCATTERS = "scatter_add scatter_add_ scatter_reduce scatter_reduce_"
_INDEXED = "index_add index_add_ index_reduce index_reduce_"
_PUTS = "index_put index_put_"


@dataclass(frozen=True, eq=False)
class _Scatter:
    """The arguments of a function that reduces into rows: x[index[i]] = how(x[index[i]], source[i]).

    index: of one dim, or of as many as x has.
    """

    dim: int
    index: Tensor
    source: Tensor
    how: str
    includes: bool  # the rows themselves, where something is added to them
    wraps: bool  # as of `row_table`

    @property
    def is_sum(self) -> bool:
        return self.how == "sum" and self.includes

    @property
    def shape(self) -> list[int]:
        """The whole shape that the source has for its index."""
        shape, index = whole_shape(self.source), whole_shape(self.index)
        return index if self.is_of_items else [*shape[: self.dim], *index, *shape[self.dim + 1 :]]

    @property
    def is_of_items(self) -> bool:
        return self.index.dim() == self.source.dim()


def _arguments(call: FunctionCall) -> _Scatter | None:
    """Return what a call reduces, and how; None for one that has no rule."""
    count, x = len(call.args) + len(call.kwargs), call.input
    if call.name.rstrip("_") == "index_put":
        indices, values = call.get(1, "indices"), call.get(2, "values")
        is_one = isinstance(indices, (list, tuple)) and len(indices) == 1 and isinstance(indices[0], Tensor)
        if not is_one or call.get(3, "accumulate", default=False) is not True:
            return None
        index = indices[0]
        is_of_rows = index.dim() == 1 and index.dtype in (torch.int64, torch.int32)
        return _Scatter(0, index, values, "sum", True, True) if is_of_rows else None
    (dim,) = call.dims(x, call.get(1, "dim"))
    index, source = call.get(2, "index"), call.get(3, "src", "source")
    how, includes = "sum", True
    if "reduce" in call.name:
        how = call.get(4, "reduce")
        includes = call.get(5, "include_self", default=True)
    elif count > 4:
        return None  # alpha
    is_known = how in ("sum", "mean", "amax", "amin") and isinstance(includes, bool)
    return _Scatter(dim, index, source, how, includes, False) if is_known else None


@rule("scatter scatter_ index_copy index_copy_ index_fill index_fill_")
def written(call: FunctionCall) -> Plan | None:
    """Write along another dim than that of the tokens, of which each rank writes its own."""
    (dim,) = call.dims(call.input, call.get(1, "dim"))
    return _along_other(call, dim, call.get(2, "index"))


def _along_other(call: FunctionCall, dim: int, index: Tensor) -> Plan | None:
    """Return a plan if another dim than `dim` is sharded; None if a tensor is not as long there."""
    x = call.input
    each = [t for t in call.tensors if t.dim() == x.dim() and (t is not index or index.dim() > 1)]
    part = next((part for part in map(part_of, [x, *each]) if part is not None), None)
    if part is None or part.dim == dim or (call.is_inplace and part_of(x) is None):
        return None
    if any(whole_shape(t)[part.dim] != part.whole for t in each) or any(map(is_distributed, call.tensors)):
        return None
    if any(0 < t.dim() < x.dim() for t in call.tensors if t is not index):
        return None  # values that broadcast to rows
    alike = {id(t) for t in each}
    return Plan(part, moves_to(call, [(t, part if id(t) in alike else None) for t in call.tensors]))


@rule(f"{_SCATTERS} {_INDEXED} {_PUTS}")
def scattered(call: FunctionCall) -> Plan | None:
    found = _arguments(call)
    if found is not None and (plan := _along_other(call, found.dim, found.index)) is not None:
        return plan
    if found is None or len(call.tensors) != 3 or any(map(is_distributed, call.tensors)):
        return None
    x, dim, source, parts = call.input, found.dim, found.source, call.parts
    shape, of_source, part = whole_shape(x), part_of(source), part_of(x)
    if x.dim() != source.dim() or found.shape != whole_shape(source):
        return None
    is_as_wide = [*shape[:dim], *shape[dim + 1 :]] == [*found.shape[:dim], *found.shape[dim + 1 :]]
    if not is_as_wide and not (found.is_sum and found.is_of_items):
        return None
    if not found.is_sum and not x.is_floating_point():
        return None
    of_source = of_source or parts.part(dim, (found.shape[dim],))
    if of_source.dim != dim or (part is not None and part.dim != dim):
        return None
    of_rows, of_index = part or parts.part(dim, (shape[dim],)), of_source
    name, function, is_inplace = call.name, call.function, call.is_inplace
    is_few = part is None and shape[dim] < parts.world

    def run(*args: Any, **kwargs: Any) -> Tensor:
        given = FunctionCall(parts, name, function, args, kwargs)
        x, scatter = given.input, cast(_Scatter, _arguments(given))
        own = x if part_of(x) is of_rows else parts.shard(x, of_rows)
        out = mark(_reduced(own, scatter, of_rows, of_index), of_rows)
        if is_few or (is_inplace and own is not x):
            out = parts.gather(out)
        return x.copy_(out) if is_inplace else out

    becomes = None if not is_inplace or part is not None or is_few else of_rows
    return Plan(moves=moves_to(call, [(source, of_source)]), becomes=becomes, run=run)


def _reduced(x: Tensor, scatter: _Scatter, part: Part, of_index: Part) -> Tensor:
    """Return what a function makes of this rank's rows."""
    dim, source, how, includes = scatter.dim, scatter.source, scatter.how, scatter.includes
    index = part.parts.gather(scatter.index).to(x.device)
    if not scatter.is_of_items:
        index = index.view([-1 if d == dim else 1 for d in range(x.dim())])
    index = one_of_equal(index, dim)
    rows = row_table(part, index, of_index, scatter.wraps)
    if scatter.is_sum:
        return x + _summed(rows, x, source)
    sizes = [part.whole if d == dim else size for d, size in enumerate(index.shape)]
    # How much is added to each row, of which all ranks know; own: to this rank's.
    count = index.new_zeros(sizes).scatter_add_(dim, index.long(), torch.ones_like(index))
    own = part.parts.shard(count, part)
    if how in ("amax", "amin"):
        return _extreme(rows, x, source, how, includes, own > 0)
    out = _summed(rows, x, source)
    out = x + out if includes else out
    if how == "mean":
        out = out / (own + includes).clamp(min=1)
    return out if includes else torch.where(own > 0, out, x)


def _summed(rows: RowTable, x: Tensor, source: Tensor) -> Tensor:
    """Return the sum, for each of this rank's rows, of what all ranks add to it."""
    return rows.added(_table(rows, x, 0).scatter_add(*_places(rows, source), source))


def _table(rows: RowTable, x: Tensor, fill: float) -> Tensor:
    dim = rows.part.dim
    return x.new_full([*x.shape[:dim], rows.plan.rows, *x.shape[dim + 1 :]], fill)


def _places(rows: RowTable, source: Tensor) -> tuple[int, Tensor]:
    """Return where a rank's source goes in its table: the dim, and an index as scatter_add has."""
    return rows.part.dim, rows.local.expand_as(source)


def _extreme(
    rows: RowTable, x: Tensor, source: Tensor, how: str, includes: bool, is_reached: Tensor
) -> Tensor:
    """Return the largest or the smallest of what is in each of this rank's rows and added to it.

    is_reached: whether something is added to a row.
    """
    with torch.no_grad():
        limit = -torch.inf if how == "amax" else torch.inf
        table = _table(rows, x, limit).scatter_reduce(*_places(rows, source), source, how)
        own = rows.extremes(table, how)
        if includes:
            own = torch.maximum(x, own) if how == "amax" else torch.minimum(x, own)
        out = torch.where(is_reached, own, x)
    if not (torch.is_grad_enabled() and (x.requires_grad or source.requires_grad)):
        return out
    with torch.no_grad():
        is_own = x == out
        is_source = source == rows.table(out).gather(*_places(rows, source))
        count = is_own + _summed(rows, x, is_source.to(x.dtype))
        counted = is_own if includes else is_own & ~is_reached
    shared: Tensor = _Shared.apply(x, source, out, rows, counted, is_source, count)  # type: ignore[no-untyped-call]
    return shared


class _Shared(torch.autograd.Function):
    """An extreme, whose gradient is shared evenly among all that are as large, as torch's is.

    count: among how many; torch counts a row itself, also one that is not to be included.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        source: Tensor,
        out: Tensor,
        rows: RowTable,
        is_own: Tensor,
        is_source: Tensor,
        count: Tensor,
    ) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(is_own, is_source, count)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        is_own, is_source, count = ctx.saved_tensors
        share = grad / count
        of_source = is_source * ctx.rows.table(share).gather(*_places(ctx.rows, is_source))
        return is_own * share, of_source, *[None] * 5
