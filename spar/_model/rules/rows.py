# SPDX-License-Identifier: Apache-2.0
"""Rows that are taken or changed by an index or a mask, as experts take their tokens.

How many rows a mask takes is known when it runs: such plans mark their results themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call import FunctionCall, Plan, moves_to, rule
from ..dtensors import is_distributed
from ..indexed import part_of_index, row_table
from ..moving import moved
from ..part import Part, Parts, mark, part_of, whole_shape

_MASKS = (torch.bool, torch.uint8)


def index_of_rows(index: Any) -> tuple[int, Tensor] | None:
    """Return the dim that one tensor of ints, or a mask of one dim, is for, if all before are taken whole.

    And that tensor.
    """
    entries = index if isinstance(index, tuple) else (index,)
    if not entries or not isinstance(entries[-1], Tensor):
        return None
    if not entries[-1].dim() or (entries[-1].dim() > 1 and entries[-1].dtype in _MASKS):
        return None
    if any(not isinstance(entry, slice) or entry != slice(None) for entry in entries[:-1]):
        return None
    return len(entries) - 1, entries[-1]


def rows(call: FunctionCall, dim: int, index: Tensor) -> Plan | None:
    """Take rows: each rank those of its part of the index."""
    parts, part, of_index = call.parts, call.part, part_of(index)
    if part is not None and part.dim != dim:
        return _of_other_dim(call, part, dim, index)
    if part is None and of_index is not None and index.dtype not in _MASKS:
        return Plan(of_index.at(dim + of_index.dim))
    name, function, at = call.name, call.function, 1 if call.name == "__getitem__" else 2

    def run(*args: Any, **kwargs: Any) -> Tensor:
        given = FunctionCall(parts, name, function, args, kwargs)
        x, index = given.input, given.get(at, "index")
        index = _places(parts, index[-1] if isinstance(index, tuple) else index).to(x.device)
        along = max(range(index.dim()), key=lambda d: index.size(d))
        if index.size(along) < parts.world or is_distributed(x):
            return _taken(name, parts.gather(x), dim, index)
        if part is None:
            of_index = parts.part(along, (index.size(along),))
            own = _taken(name, x, dim, parts.shard(index, of_index))
        else:
            of_index = part_of_index(part, index, along)
            rows = row_table(part, index, of_index, wraps=name == "__getitem__")
            own = _taken(name, rows.table(x), dim, rows.local)
        return mark(own, of_index.at(dim + along))

    return Plan(run=run)


def _of_other_dim(call: FunctionCall, part: Part, dim: int, index: Tensor) -> Plan:
    """Take from each rank's tokens what a whole index says; it may be a mask, whose size says nothing."""
    function, moves, result = call.function, moves_to(call, [(index, None)]), _at_other_dim(part, dim, index)
    return Plan(moves=moves, run=lambda *args, **kwargs: mark(function(*args, **kwargs), result))


def _at_other_dim(part: Part, dim: int, index: Tensor) -> Part:
    """Return the part of what an index of another dim takes."""
    return part.at(part.dim + (index.dim() - 1 if dim < part.dim else 0))


def _places(parts: Parts, index: Tensor) -> Tensor:
    whole = parts.gather(index)
    return whole.nonzero().squeeze(1) if whole.dtype in _MASKS else whole


def _taken(name: str, x: Tensor, dim: int, index: Tensor) -> Tensor:
    return x.index_select(dim, index) if name == "index_select" else x[(slice(None),) * dim + (index,)]


@rule("index_select")
def index_select(call: FunctionCall) -> Plan | None:
    index = call.get(2, "index")
    (dim,) = call.dims(call.input, call.get(1, "dim"))
    return rows(call, dim, index) if index.dim() == 1 else None


@rule("gather")
def gather(call: FunctionCall) -> Plan | None:
    """Take items of each column by an index of its own: each rank those of its part of the index."""
    x, index = call.input, call.get(2, "index")
    (dim,) = call.dims(x, call.get(1, "dim"))
    if len(call.args) + len(call.kwargs) > 3 or x.dim() != index.dim() or is_distributed(x):
        return None
    shape, parts, part = whole_shape(index), call.parts, part_of(x) or part_of(index)
    assert part is not None
    if part.dim != dim:
        if part_of(index) not in (None, part) or shape[part.dim] != whole_shape(x)[part.dim]:
            return None
        return Plan(part, moves_to(call, [(x, part), (index, part)]))
    if part_of(x) is None:
        return Plan(part)
    if shape[dim] < parts.world:
        return None
    of_index, name, function = parts.part(dim, (shape[dim],)), call.name, call.function

    def run(*args: Any, **kwargs: Any) -> Tensor:
        given = FunctionCall(parts, name, function, args, kwargs)
        rows = row_table(part, one_of_equal(parts.gather(given.get(2, "index")), dim), of_index)
        sizes = [of_index.local if d == dim else size for d, size in enumerate(shape)]
        return rows.table(given.input).gather(dim, rows.local.expand(sizes))

    return Plan(of_index, run=run)


def one_of_equal(index: Tensor, dim: int) -> Tensor:
    """Return an index that is of size 1 in the other dims along which it was expanded."""
    for d in range(index.dim()):
        if d != dim and index.stride(d) == 0 and index.size(d):
            index = index.narrow(d, 0, 1)
    return index


def moves_of_value(call: FunctionCall, target: Part, dims: int) -> tuple[tuple[int, Part | None], ...] | None:
    """Return the moves of what is written to an index of so many dims, whose part is the target.

    None if it has another size than the target.
    """
    value = call.args[2]
    if not isinstance(value, Tensor):
        return ()
    dim = target.dim - dims + value.dim()
    if dim < 0:
        return moves_to(call, [(value, None)])
    if part_of(value) is target.at(dim):
        return ()
    size = whole_shape(value)[dim]
    if size == target.whole:
        return moves_to(call, [(value, target.at(dim))])
    return () if size == 1 and part_of(value) is None else None


def set_rows(call: FunctionCall) -> Plan | None:
    """Change the rows of a mask or an index: each rank those of its part."""
    part, found = call.part, index_of_rows(call.args[1])
    if part is None or found is None:
        return None
    dim, index = found
    if dim != part.dim:
        target = _at_other_dim(part, dim, index)
        moves = moves_of_value(call, target, call.input.dim() + index.dim() - 1)
        return None if moves is None else Plan(moves=(*moves_to(call, [(index, None)]), *moves))
    if dim != 0 or index.dim() != 1:
        return None
    parts = part.parts

    def run(x: Tensor, index: Any, value: Any) -> None:
        index = parts.gather(index[-1] if isinstance(index, tuple) else index)
        value = parts.gather(value) if isinstance(value, Tensor) else value
        if index.dtype not in _MASKS:
            whole = parts.gather(x).clone()
            whole[index] = value
            x.copy_(parts.shard(whole, part))
            return
        own = parts.shard(index.bool(), part)
        if isinstance(value, Tensor) and value.dim() == x.dim() and value.size(0) != 1:
            value = value[parts.shard(index.bool().cumsum(0) - 1, part)[own]]
        x[own] = value

    return Plan(run=run)


def reduced(x: Tensor, part: Part) -> Tensor:
    """Return this rank's part of the sum over the ranks."""
    one = part.parts.part(part.dim, (part.whole,))
    return moved(mark(part.parts.layout(one.lengths).reduce_scatter(x, part.dim), one), part)
