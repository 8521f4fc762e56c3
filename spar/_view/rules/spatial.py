# SPDX-License-Identifier: Apache-2.0
"""Convolutions and padding along a dim of which each rank has rows; those around them are its neighbours'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...sequence_layout import SequenceLayout
from ..call import FunctionCall, Plan, are_ints, moves_to, rule
from ..part import Part, part_of
from ..report import multiply_adds
from .products import shared


def along(value: Any, axis: int) -> Any:
    """Return an argument for one of the spatial dims: it may be one for all of them."""
    if not isinstance(value, (tuple, list)):
        return value
    return value[axis] if len(value) > 1 else value[0]


def on_rows(function: Callable[[Tensor], Tensor], x: Tensor, dim: int, least: int = 1) -> Tensor:
    """Run a function that needs rows; on a rank without any it runs on zeros, and its result is dropped.

    An empty result that is derived from all that others' are lets the rank take part in backward's exchanges.
    """
    if x.size(dim):
        return function(x)
    shape = [*x.shape[:dim], least, *x.shape[dim + 1 :]]
    return function(torch.cat([x, x.new_zeros(shape)], dim)).narrow(dim, 0, 0)


class _Window(NamedTuple):
    """How a convolution moves along the rows.

    Attributes:
        span: the rows that one position covers.
        stride: the rows from one position to the next.
        padding: rows of zeros, added on each side.
    """

    span: int
    stride: int
    padding: int


@rule("conv1d conv2d conv3d")
def convolution(call: FunctionCall) -> Plan | None:
    """Convolve samples, or rows with those of the neighbours."""
    x, weight, part = call.input, call.get(1, "weight"), call.part
    if part is None or part.dim == 1 or x.dim() != weight.dim():
        return None
    if any(part_of(t) is not None for t in call.tensors[1:]):
        return None
    amount = multiply_adds(call.name, call.args, call.kwargs)
    window = _window(call, weight, part.dim - 2) if part.dim > 1 else _Window(1, 1, 0)
    if window == _Window(1, 1, 0):
        return Plan(part, work=shared(amount, part))
    if window is None:
        return None
    found = _halo(part, window)
    moved_to = part if found is not None else one_run(part, window.stride)
    if moved_to is None:
        return None
    part = moved_to
    found = found or _halo(part, window)
    if found is None:
        return None
    result, before, after = found
    run = _convolved(call.function, part, window, before, after, result.padding[1])
    return Plan(result, moves_to(call, [(x, part)]), run=run, work=shared(amount, part))


def one_run(part: Part, unit: int = 1) -> Part | None:
    """Return a part of the same dim, one run of units of rows on each rank; None if they are too few."""
    count, rest = divmod(part.whole, unit)
    if rest or count < part.parts.world or part.parts.state is not None:
        return None
    return part.parts.part(part.dim, (count,), 1, unit)


def _window(call: FunctionCall, weight: Tensor, axis: int) -> _Window | None:
    stride, dilation = (
        along(call.get(at, name, default=1), axis) for at, name in ((3, "stride"), (5, "dilation"))
    )
    padding = along(call.get(4, "padding", default=0), axis)
    padding = 0 if padding == "valid" else padding
    if not are_ints((stride, dilation, padding)):
        return None
    return _Window(dilation * (weight.size(axis + 2) - 1) + 1, stride, padding)


def _halo(part: Part, window: _Window) -> tuple[Part, int, int] | None:
    """Return the part of a convolution's result, and how many rows it needs around each rank's.

    The result has one row for each `stride` rows, without those of padding: then a rank's rows of it are of
    its own rows. Below 0 are rows that it does not need. A causal convolution has more: rows behind the
    tokens, which models cut off, become padding of the result.
    """
    if part.rows is None or part.inner % window.stride or not part.tokens:
        return None
    before, behind = (side + window.padding for side in part.padding)
    after = window.span - window.stride - before
    more = behind - after
    result = part.parts.part(part.dim, part.lengths, 1, part.inner // window.stride)
    if window.stride == 1 and more > 0 and after >= 0 and not part.is_padded:
        return result.padded(0, more), before, after
    return (result, before, after) if 0 <= more < window.stride else None


def _convolved(
    function: Callable[..., Tensor], part: Part, window: _Window, before: int, after: int, more: int
) -> Callable[..., Tensor]:
    """Return what convolves a rank's rows; more: rows of the result behind those of the last rank's."""
    layout, dim, rank = part.rows, part.dim, part.parts.rank
    assert layout is not None
    start = 0 if rank else part.padding[0]
    rows = part.held * part.inner + before + after if part.held else 0
    edged = _edged(part, window)

    def run(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        sides = [0 if padding == "valid" else along(padding, i) for i in range(input.dim() - 2)]

        def convolved(x: Tensor, of_rows: int = 0) -> Tensor:
            sides[dim - 2] = of_rows
            return function(x, weight, bias, stride, sides, dilation, groups)

        if edged is not None:
            return edged(convolved, input)
        x = _around(input, before, after)
        if x is None:
            x = layout.halo(input, before, dim, max(after, 0)) if before or after > 0 else input
            x = x.narrow(dim, start, rows)
        if more and rank == part.last:
            x = torch.cat([x, x.new_zeros([*x.shape[:dim], more, *x.shape[dim + 1 :]])], dim)
        return on_rows(convolved, x, dim, window.span)

    return run


def _edged(part: Part, window: _Window) -> Callable[[Callable[..., Tensor], Tensor], Tensor] | None:
    """Convolve a rank's rows between zeros, and then its first and last rows again, between its neighbours'.

    So no copy of the rows with their halo is made. Returns None where ranks have too few rows for that.
    """
    edge, reach, dim = window.padding, window.span - 1, part.dim
    least = min([size for size in part.sizes if size])
    if part.is_padded or window.stride > 1 or reach != 2 * edge or least < reach:
        return None
    sizes = tuple([2 * edge if size else 0 for size in part.sizes])
    layout = SequenceLayout("local", sizes, part.parts.group)

    def run(convolved: Callable[..., Tensor], x: Tensor) -> Tensor:
        size = x.size(dim)
        if not size:
            return on_rows(convolved, layout.halo(x, edge, dim, edge), dim, window.span)
        edges = torch.cat([x.narrow(dim, 0, edge), x.narrow(dim, size - edge, edge)], dim)
        found = layout.halo(edges, edge, dim, edge)
        above, below = found.narrow(dim, 0, edge), found.narrow(dim, 3 * edge, edge)
        out = convolved(x, edge)
        out.narrow(dim, 0, edge).copy_(convolved(torch.cat([above, x.narrow(dim, 0, reach)], dim)))
        last = convolved(torch.cat([x.narrow(dim, size - reach, reach), below], dim))
        out.narrow(dim, size - edge, edge).copy_(last)
        return out

    return run


_AROUND = "_spar_around"  # the attribute of a padded part: the rows of all that a convolution of it needs


def _around(x: Tensor, before: int, after: int) -> Tensor | None:
    """Return a padded part with its neighbours' rows, if they were gathered and are what they were.

    Not if x has hooks: its gradient would not pass through it.
    """
    found: tuple[Tensor, int, int, int] | None = getattr(x, _AROUND, None)
    if found is None or found[1:] != (before, after, x._version) or x._backward_hooks:
        return None
    return found[0]


@rule("pad")
def pad(call: FunctionCall) -> Plan | None:
    """Pad other dims, or rows of channels [N, C, ...]: the first rank and the last with rows pad theirs.

    Other padded sequences are whole: models cut them at fixed strides, which no part has.
    """
    x, part = call.input, call.part
    if part is None:
        return None
    padding, mode = list(call.get(1, "pad", default=())), call.get(2, "mode", default="constant")
    if not are_ints(padding):
        return None
    at = 2 * (x.dim() - 1 - part.dim)
    before, after = padding[at : at + 2] or (0, 0)
    if before or after:
        if part.dim < 2:
            return None
        if part.rows is None:
            part = one_run(part)
        if part is None or min(before, after) < 0 or not part.tokens:
            return None
        least = {"constant": 0, "replicate": 1, "reflect": max(before, after) + 1}.get(mode)
        if least is None or min(part.sizes[0], part.sizes[part.last]) < least:
            return None
    rank, function, dim = part.parts.rank, call.function, part.dim
    of_rank = (0 if rank else before), (after if rank == part.last else 0)
    halo = _halo_of_padding(part, before, after)

    def run(input: Tensor, pad: Any, *args: Any, **kwargs: Any) -> Tensor:
        sides = of_rank if halo is None else (before, after)
        each = [*padding[:at], *sides, *padding[at + 2 :]] if padding[at : at + 2] else padding
        out = on_rows(lambda x: function(x, each, *args, **kwargs), input, dim)
        return out if halo is None else halo(out)

    return Plan(part.padded(before, after), moves_to(call, [(x, part)]), run=run)


def _halo_of_padding(part: Part, before: int, after: int) -> Callable[[Tensor], Tensor] | None:
    """Return what makes a padded part of a tensor to which each rank added rows on both sides.

    Rows that are no padding become those of its neighbours: a convolution behind then needs no copy with its
    halo.
    """
    sizes, dim, rank = [size for size in part.sizes if size], part.dim, part.parts.rank
    if part.rows is None or part.is_padded or not before + after or min(sizes) <= max(before, after):
        return None
    if len(sizes) == 1:
        return None
    edges = tuple([before + after if size else 0 for size in part.sizes])
    layout = SequenceLayout("local", edges, part.parts.group)
    first, last = rank == 0, rank == part.last

    def run(around: Tensor) -> Tensor:
        size = around.size(dim) - before - after if part.held else 0
        if not part.held:
            return layout.halo(around, before, dim, after)
        # What this rank's rows begin and end with, where the halo has the same rows of it and its neighbours
        top, bottom = around.narrow(dim, before, after), around.narrow(dim, size, before)
        found = layout.halo(torch.cat([top, bottom], dim), before, dim, after)
        top.copy_(found.narrow(dim, before, after))  # the same, so that each rank takes part in backward
        bottom.copy_(found.narrow(dim, before + after, before))
        if not first:
            around.narrow(dim, 0, before).copy_(found.narrow(dim, 0, before))
        if not last:
            around.narrow(dim, before + size, after).copy_(found.narrow(dim, 2 * before + after, after))
        start = 0 if first else before
        out = around.narrow(dim, start, before + size + (after if last else 0) - start)
        if not out.is_inference():  # which has no version, by which a change in place is seen
            setattr(out, _AROUND, (around, before, after, out._version))
        return out

    return run
