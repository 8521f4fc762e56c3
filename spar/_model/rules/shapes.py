# SPDX-License-Identifier: Apache-2.0
"""Functions that give a tensor another shape, or its dims another order."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..call import FunctionCall, Plan, are_ints, moves_to, part_rule, rule
from ..moving import in_other_dim
from ..part import Part, evenest, whole_shape


def reshaped(shape: Sequence[int], part: Part, new: Sequence[int]) -> tuple[list[int], Part] | None:
    """Return the local sizes and the part of a tensor of a new shape; None if it cuts the tokens up."""
    sizes = _inferred(list(new), prod(shape))
    before = prod(shape[: part.dim]) * part.outer  # rows of tokens in front
    if part.is_padded:
        dims = [d for d, size in enumerate(sizes) if size == part.whole and prod(sizes[:d]) == before]
        if not dims:
            return None
        sizes[dims[0]] = part.local
        return sizes, part.at(dims[0])
    if not prod(shape):  # no elements say which dim goes where
        dims = [d for d, size in enumerate(sizes) if size == part.whole]
        found = part.at(min(dims, key=lambda d: prod(sizes[:d]) != before)) if dims else None
        return None if found is None else ([*sizes[: found.dim], found.local, *sizes[found.dim + 1 :]], found)
    best: tuple[int, int, int, int] | None = None
    front = 1
    for dim, size in enumerate(sizes):
        if front and before % front == 0:
            outer = before // front
            inner, rest = divmod(size, max(outer * part.tokens, 1))
            mixed = (outer > 1) + (inner > 1)
            if not rest and inner and (best is None or mixed < best[0]):
                best = mixed, dim, outer, inner
        front *= size
    if best is None:
        return None
    found = part.parts.part(best[1], part.lengths, best[2], best[3])
    sizes[found.dim] = found.local
    return sizes, found


def _inferred(sizes: list[int], count: int) -> list[int]:
    if -1 in sizes:
        known = prod([size for size in sizes if size != -1])
        sizes[sizes.index(-1)] = count // max(known, 1)
    return sizes


@rule("view reshape view_as reshape_as flatten unflatten ravel", uneven=True)
def reshape(call: FunctionCall) -> Plan | None:
    x, part = call.input, call.part
    if part is None:
        other = call.get(1, "other")
        if call.name in ("view_as", "reshape_as"):
            return Plan(run=_to(whole_shape(other), call.name))
        return None
    shape = whole_shape(x)
    if call.name in ("view_as", "reshape_as"):
        new = whole_shape(call.get(1, "other"))
    elif call.name in ("flatten", "ravel"):
        start, end = call.dims(x, [call.get(1, "start_dim", default=0), call.get(2, "end_dim", default=-1)])
        new = [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]]
    elif call.name == "unflatten":
        (dim,) = call.dims(x, call.get(1, "dim"))
        sizes = list(call.get(2, "sizes"))
        if not are_ints(sizes):
            return None
        new = [*shape[:dim], *_inferred(sizes, shape[dim]), *shape[dim + 1 :]]
    else:
        new = call.sizes(1, "shape", "size", "dtype")
        if not are_ints(new):
            return None  # or view(dtype)
    found = reshaped(shape, part, new)
    if found is not None:
        return Plan(found[1], run=_to(found[0], call.name))
    rows = _rows(shape, part, new)
    found = reshaped(shape, rows, new) if rows is not None else None
    if found is None:
        return None
    return Plan(found[1], moves_to(call, [(x, rows)]), run=_to(found[0], "reshape"))


def _rows(shape: Sequence[int], part: Part, new: Sequence[int]) -> Part | None:
    """Return a part that a shape which cuts the tokens up leaves whole rows, frames or the like of.

    It is of the first dim that lies evenly enough on the ranks, else of that which lies most evenly.
    """
    before, front, world = prod(shape[: part.dim]), 1, part.parts.world
    found: list[Part] = []
    for size in _inferred(list(new), prod(shape)):
        outer, rest = divmod(max(front, before), min(front, before)) if front and before else (0, 1)
        count = size if front >= before else size // max(outer, 1)
        outer = outer if front >= before else 1
        if not rest and count >= world and part.whole % (outer * count) == 0:
            found.append(part.parts.part(part.dim, (count,), outer, part.whole // (outer * count)))
        front *= size
    return evenest(found)


def _to(sizes: list[int], name: str) -> Any:
    if name in ("reshape", "reshape_as", "flatten", "ravel"):
        return lambda x, *_, **__: x.reshape(sizes)
    return lambda x, *_, **__: x.view(sizes)


@part_rule(
    "transpose transpose_ swapaxes swapdims permute movedim moveaxis t get_T get_mT get_H get_mH adjoint",
    uneven=True,
)
def reordered(call: FunctionCall, part: Part) -> Plan | None:
    """Find where the dim of tokens goes by a tensor without elements, whose sizes name its dims."""
    x = call.input
    if call.is_inplace:
        return None
    probe = torch.empty([0, *range(2, x.dim() + 1)] if x.dim() else [], device="meta")
    sizes = list(probe.size())
    order = [sizes.index(n) for n in call.function(probe, *call.args[1:], **_but_input(call)).size()]
    other = _other_of_pair(x, part, order)
    if other is None:
        return Plan(part.at(order.index(part.dim)))
    function = call.function
    return Plan(part, run=lambda x, *args, **kwargs: function(in_other_dim(x, other), *args, **kwargs))


def _other_of_pair(x: Tensor, part: Part, order: list[int]) -> Part | None:
    """Return the part of a pair tensor's columns where a new order of dims exchanges these for its rows.

    The columns then are this rank's rows of the result [B, N, N, ...]: all that follows computes with rows.
    """
    shape, others = whole_shape(x), [dim for dim, place in enumerate(order) if dim != place]
    if x.dim() < 4 or len(others) != 2 or part.dim not in others or others[-1] == x.dim() - 1:
        return None
    other = sum(others) - part.dim
    return part.at(other) if shape[other] == part.whole else None


def _but_input(call: FunctionCall) -> dict[str, Any]:
    return {name: value for name, value in call.kwargs.items() if name not in ("input", "self")}


@part_rule("unsqueeze", uneven=True)
def unsqueeze(call: FunctionCall, part: Part) -> Plan | None:
    dim = call.get(1, "dim") % (call.input.dim() + 1)
    return Plan(part.at(part.dim + (dim <= part.dim)))


@part_rule("squeeze", uneven=True)
def squeeze(call: FunctionCall, part: Part) -> Plan | None:
    """Drop dims of size 1 of the whole: a dim of tokens may have size 1 on this rank alone."""
    x, dim = call.input, call.get(1, "dim")
    shape = whole_shape(x)
    dims = call.dims(x, dim) if dim is not None else list(range(x.dim()))
    dropped = [d for d in dims if shape[d] == 1]
    if part.dim in dropped:
        return None
    return Plan(
        part.at(part.dim - sum(d < part.dim for d in dropped)), run=lambda x, *_, **__: x.squeeze(dropped)
    )


@rule("expand expand_as broadcast_to", uneven=True)
def expand(call: FunctionCall) -> Plan | None:
    x, part = call.input, call.part
    sizes = whole_shape(call.get(1, "other")) if call.name == "expand_as" else call.sizes(1, "size", "shape")
    if part is None:
        return Plan(run=lambda x, *_, **__: x.expand(sizes)) if call.name == "expand_as" else None
    dim = part.dim + len(sizes) - x.dim()
    if not are_ints(sizes) or sizes[dim] not in (-1, part.whole):
        return None
    sizes[dim] = -1
    return Plan(part.at(dim), run=lambda x, *_, **__: x.expand(sizes))


@part_rule("repeat tile", uneven=True)
def repeat(call: FunctionCall, part: Part) -> Plan | None:
    x, times = call.input, call.sizes(1, "repeats", "dims")
    if not are_ints(times):
        return None
    times = [1] * (x.dim() - len(times)) + times
    dim = part.dim + len(times) - x.dim()
    if part.is_padded and times[dim] != 1:
        return None
    return Plan(part.at(dim).repeated(times[dim], 1))


@part_rule("repeat_interleave", uneven=True)
def repeat_interleave(call: FunctionCall, part: Part) -> Plan | None:
    times, dim = call.get(1, "repeats"), call.get(2, "dim")
    if not isinstance(times, int) or dim is None:
        return None
    if call.dims(call.input, dim) != [part.dim]:
        return Plan(part)
    return None if part.is_padded else Plan(part.repeated(1, times))
