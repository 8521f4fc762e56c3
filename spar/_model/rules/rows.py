# SPDX-License-Identifier: Apache-2.0
"""Rows that are taken or changed by an index or a mask, as experts take their tokens.

How many rows a mask takes is known when it runs: these plans mark their results themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call import FunctionCall, Plan, moves_to, rule
from ..moving import moved
from ..part import Part, Parts, mark, part_of, whole_shape
from ..sums import sum_over_ranks


def index_of_rows(index: Any) -> tuple[int, Tensor] | None:
    """Return the dim that an index of one dim is for, if all before it are taken whole; and the index."""
    entries = index if isinstance(index, tuple) else (index,)
    if not entries or not isinstance(entries[-1], Tensor) or entries[-1].dim() != 1:
        return None
    if any(not isinstance(entry, slice) or entry != slice(None) for entry in entries[:-1]):
        return None
    return len(entries) - 1, entries[-1]


def rows(call: FunctionCall, dim: int, index: Tensor) -> Plan | None:
    """Take rows: each rank its part of them."""
    parts, part = call.parts, call.part
    if part is not None and part.dim != dim:
        return _of_other_dim(call, part, index)
    name, function, at = call.name, call.function, 1 if call.name == "__getitem__" else 2

    def run(*args: Any, **kwargs: Any) -> Tensor:
        given = FunctionCall(parts, name, function, args, kwargs)
        x, index = parts.gather(given.input), given.get(at, "index")
        index = _places(parts, index[-1] if isinstance(index, tuple) else index)
        if index.size(0) < parts.world:
            return _taken(name, x, dim, index)
        taken = parts.part(dim, (index.size(0),))
        own: Tensor = mark(_taken(name, x, dim, parts.shard(index, taken.at(0))), taken)
        return own

    return Plan(run=run)


def _of_other_dim(call: FunctionCall, part: Part, index: Tensor) -> Plan:
    """Take from each rank's tokens what a whole index says; it may be a mask, whose size says nothing."""
    function = call.function
    moves = moves_to(call, [(index, None)])
    return Plan(moves=moves, run=lambda *args, **kwargs: mark(function(*args, **kwargs), part))


def _places(parts: Parts, index: Tensor) -> Tensor:
    whole = parts.gather(index)
    return whole.nonzero().squeeze(1) if whole.dtype in (torch.bool, torch.uint8) else whole


def _taken(name: str, x: Tensor, dim: int, index: Tensor) -> Tensor:
    return x.index_select(dim, index) if name == "index_select" else x[(slice(None),) * dim + (index,)]


@rule("index_select")
def index_select(call: FunctionCall) -> Plan | None:
    index = call.get(2, "index")
    (dim,) = call.dims(call.input, call.get(1, "dim"))
    return rows(call, dim, index) if index.dim() == 1 else None


def set_rows(call: FunctionCall) -> Plan | None:
    """Change the rows of a mask: each rank those of its part."""
    part, found = call.part, index_of_rows(call.args[1])
    if part is None or found is None or found[0] != 0 or part.dim != 0:
        return None
    parts = part.parts

    def run(x: Tensor, index: Any, value: Any) -> None:
        index = parts.gather(index[-1] if isinstance(index, tuple) else index)
        value = parts.gather(value) if isinstance(value, Tensor) else value
        if index.dtype not in (torch.bool, torch.uint8):
            whole = parts.gather(x).clone()
            whole[index] = value
            x.copy_(parts.shard(whole, part))
            return
        own = parts.shard(index.bool(), part)
        if isinstance(value, Tensor) and value.dim() == x.dim() and value.size(0) != 1:
            value = value[parts.shard(index.bool().cumsum(0) - 1, part)[own]]
        x[own] = value

    return Plan(run=run)


@rule("scatter_add scatter_add_ index_add index_add_ scatter_reduce_ scatter_reduce")
def added(call: FunctionCall) -> Plan | None:
    """Add each rank's rows to zeros, and the sum over the ranks to what is changed."""
    x, index, source = call.input, call.get(2, "index"), call.get(3, "src", "source")
    reduces = call.name.startswith("scatter_reduce")
    if len(call.tensors) != 3 or (reduces and call.get(4, "reduce") != "sum"):
        return None
    if len(call.args) + len(call.kwargs) > (5 if reduces else 4) or whole_shape(source) != _shape(
        call, index
    ):
        return None
    (dim,) = call.dims(x, call.get(1, "dim"))
    part, of_source = part_of(x), part_of(source)
    if of_source is None or of_source.dim != dim or (part is not None and part.dim != dim):
        return None
    shape, at = whole_shape(x), 0 if index.dim() == 1 else dim
    is_inplace, parts, name, function = call.is_inplace, call.parts, call.name, call.function
    method = "index_add" if call.name.startswith("index_add") else "scatter_add"

    def run(*args: Any, **kwargs: Any) -> Tensor:
        given = FunctionCall(parts, name, function, args, kwargs)
        x: Tensor = given.input
        index, source = given.get(2, "index"), given.get(3, "src", "source")
        own = _part(parts, index, of_source.at(at))
        total = getattr(x.new_zeros(shape), method)(dim, own, source)
        total = sum_over_ranks(parts, total) if part is None else reduced(total, part)
        return x.add_(total) if is_inplace else x + total

    return Plan(part, run=run)


def _shape(call: FunctionCall, index: Tensor) -> list[int]:
    """Return the shape that the source of an index has."""
    source = whole_shape(call.get(3, "src", "source"))
    if index.dim() > 1:
        return whole_shape(index)
    (dim,) = call.dims(call.input, call.get(1, "dim"))
    return [*source[:dim], *whole_shape(index), *source[dim + 1 :]]


def _part(parts: Parts, x: Tensor, part: Part) -> Tensor:
    own = part_of(x)
    if own is part:
        return x
    return parts.shard(parts.gather(x), part)


def reduced(x: Tensor, part: Part) -> Tensor:
    """Return this rank's part of the sum over the ranks."""
    one = part.parts.part(part.dim, (part.whole,))
    return moved(mark(part.parts.layout(one.lengths).reduce_scatter(x, part.dim), one), part)
