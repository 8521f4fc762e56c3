# SPDX-License-Identifier: Apache-2.0
"""Convolutions and padding along a dim of which each rank has rows; those around them are its neighbours'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.unused import on_rows
from ...sequence_layout import SequenceLayout
from ..call import FunctionCall, Plan, are_ints, moves_to, part_rule
from ..part import Part
from ..report import multiply_adds
from .products import shared
from .windows import along, each, format_of, listed, one_run, reaching, separate, windowed


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


Strategy = Callable[[Callable[..., Tensor], Tensor], Tensor]


@part_rule("conv1d conv2d conv3d")
def convolution(call: FunctionCall, part: Part) -> Plan | None:
    """Convolve samples, or rows with those of the neighbours."""
    x, weight, axis = call.input, call.get(1, "weight"), _axis(call, part)
    if axis is None:
        return None
    amount = multiply_adds(call.name, call.args, call.kwargs)
    window = _window(call, weight, axis) if axis >= 0 else _Window(1, 1, 0)
    if window == _Window(1, 1, 0):
        return Plan(part, work=shared(amount, part))
    if window is None:
        return None
    found, own = _halo(part, window), part
    in_run = one_run(part) if found is None and window.stride == 1 else None
    if in_run is not None and (found := _halo(in_run, window)) is not None:
        own = in_run
    span, stride, padding = window
    count = (part.whole + 2 * padding - span) // stride + 1

    def reach(start: int, stop: int) -> tuple[int, int]:
        return start * stride - padding, (stop - 1) * stride - padding + span

    windows = windowed(own, count, reach, found and found[0])
    if windows is None:
        return None
    result, take = windows

    def in_windows(convolved: Callable[..., Tensor], x: Tensor) -> Tensor:
        around = None if found is None else _around(x, *found[1:])
        return on_rows(convolved, take(x) if around is None else around, own.dim, span)

    rows = (found and _edged(own, window)) or in_windows
    run = _convolved(call.function, axis, rows)
    work = shared(amount, result if found is None else own)
    return Plan(result, moves_to(call, [(x, own)]), run=run, work=work)


def _axis(call: FunctionCall, part: Part) -> int | None:
    """Return the spatial dim that the input is a part of, below 0 for samples; None for channels."""
    axis: int = part.dim - call.input.dim() + call.get(1, "weight").dim() - 2
    return None if axis == -1 or call.has_later_part else axis


def _window(call: FunctionCall, weight: Tensor, axis: int) -> _Window | None:
    stride, dilation = (
        along(call.get(at, name, default=1), axis) for at, name in ((3, "stride"), (5, "dilation"))
    )
    sides = _sides(weight, call.get(4, "padding", default=0), call.get(5, "dilation", default=1))
    if sides is None or not are_ints((stride, dilation, sides[axis])):
        return None
    return _Window(dilation * (weight.size(axis + 2) - 1) + 1, stride, sides[axis])


def _sides(weight: Tensor, padding: Any, dilation: Any) -> list[Any] | None:
    """Return the padding of each spatial dim; None if it differs between the two sides of one."""
    dims = weight.dim() - 2
    if padding != "same":
        return each(0 if padding == "valid" else padding, dims)
    totals = [by * (size - 1) for by, size in zip(each(dilation, dims), weight.shape[2:], strict=True)]
    return None if any(total % 2 for total in totals) else [total // 2 for total in totals]


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


def _convolved(function: Callable[..., Tensor], axis: int, rows: Strategy) -> Callable[..., Tensor]:
    """Return what convolves a rank's rows; `rows` calls the convolution with them and those around them."""

    def run(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        sides = _sides(weight, padding, dilation)
        assert sides is not None

        def convolved(x: Tensor, of_rows: int = 0) -> Tensor:
            sides[axis] = of_rows
            return function(x, weight, bias, stride, sides, dilation, groups)

        return rows(convolved, input)

    return run


def _edged(part: Part, window: _Window) -> Strategy | None:
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


@part_rule("conv_transpose1d conv_transpose2d conv_transpose3d")
def transposed(call: FunctionCall, part: Part) -> Plan | None:
    """Convolve transposed: each row of the result is a sum over the rows whose windows it lies in."""
    weight, axis = call.get(1, "weight"), _axis(call, part)
    if axis is None:
        return None
    amount = multiply_adds(call.name, call.args, call.kwargs)
    if axis < 0:
        return Plan(part, work=shared(amount, part))
    options = (3, "stride", 1), (4, "padding", 0), (5, "output_padding", 0), (7, "dilation", 1)
    values = [along(call.get(at, name, default=value), axis) for at, name, value in options]
    if not are_ints(values):
        return None
    stride, padding, more, dilation = values
    span = dilation * (weight.size(axis + 2) - 1) + 1

    def reach(start: int, stop: int) -> tuple[int, int]:
        return reaching(start, stop, span, stride, padding)

    found = windowed(part, (part.whole - 1) * stride - 2 * padding + span + more, reach)
    if found is None:
        return None
    (result, take), function, dim = found, call.function, part.dim
    start = sum(result.sizes[: part.parts.rank])
    skipped = start + padding - reach(start, start + result.local)[0] * stride

    def run(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        sides, ends = (each(value, weight.dim() - 2) for value in (padding, output_padding))
        sides[axis] = ends[axis] = 0

        def convolved(x: Tensor) -> Tensor:
            out: Tensor = function(x, weight, bias, stride, sides, ends, groups, dilation)
            return out.narrow(dim, skipped, result.local) if result.local else out

        return on_rows(convolved, take(input), dim)

    return Plan(result, run=run, work=shared(amount, result))


_AROUND = "_spar_around"  # the attribute of a padded part: the rows of all that a convolution of it needs


def _around(x: Tensor, before: int, after: int) -> Tensor | None:
    """Return a padded part with its neighbours' rows, if they were gathered and are what they were.

    Not if x has hooks: its gradient would not pass through it.
    """
    found: tuple[Tensor, int, int, int] | None = getattr(x, _AROUND, None)
    if found is None or found[1:] != (before, after, x._version) or x._backward_hooks:
        return None
    return found[0]


@part_rule("pad")
def pad(call: FunctionCall, part: Part) -> Plan | None:
    """Pad other dims, or rows of channels [N, C, ...]: the first rank and the last with rows pad theirs.

    Padded rows of images [N, H, W, C] are laid out anew. Padded sequences [B, S, D] are whole: models cut
    them by `as_strided`, which no part has.
    """
    x = call.input
    padding, mode = list(call.get(1, "pad", default=())), call.get(2, "mode", default="constant")
    if not are_ints(padding):
        return None
    at = 2 * (x.dim() - 1 - part.dim)
    before, after = padding[at : at + 2] or (0, 0)
    if before or after:
        in_run = one_run(part) if part.rows is None else part
        if part.dim < 2 and x.dim() < 4:
            return None
        if part.dim < 2 or in_run is None or min(before, after) < 0 or not in_run.tokens:
            return _with_listed_rows(call, part, padding, None)
        least = {"constant": 0, "replicate": 1, "reflect": max(before, after) + 1}.get(mode)
        if least is None or min(in_run.sizes[0], in_run.sizes[in_run.last]) < least:
            return _with_listed_rows(call, part, padding, in_run.padded(before, after))
        part = in_run
    rank, function, dim = part.parts.rank, call.function, part.dim
    of_rank = (0 if rank else before), (after if rank == part.last else 0)
    halo = _halo_of_padding(part, before, after)

    def run(input: Tensor, pad: Any, *args: Any, **kwargs: Any) -> Tensor:
        sides = of_rank if halo is None else (before, after)
        each = [*padding[:at], *sides, *padding[at + 2 :]] if padding[at : at + 2] else padding
        out = on_rows(lambda x: function(x, each, *args, **kwargs), input, dim)
        return out if halo is None else halo(out)

    return Plan(part.padded(before, after), moves_to(call, [(x, part)]), run=run)


def _with_listed_rows(call: FunctionCall, part: Part, padding: list[int], result: Part | None) -> Plan | None:
    """Gather the rows that padding repeats; below 0 it drops some. result: where the rows are to lie."""
    function, dim, size, at = call.function, part.dim, part.whole, 2 * (call.input.dim() - 1 - part.dim)
    before, after = padding[at : at + 2]
    rest = [0 if i in (at, at + 1) else side for i, side in enumerate(padding)]
    mode = call.get(2, "mode", default="constant")
    rows = range(max(0, -before), size - max(0, -after))
    front, back = max(0, before), max(0, after)
    around = {
        "constant": ([range(-front, 0)], [range(size, size + back)]),
        "replicate": ([range(1)] * front, [range(size - 1, size)] * back),
        "reflect": ([range(front, 0, -1)], [range(size - 2, size - 2 - back, -1)]),
        "circular": ([rows[len(rows) - front :]], [rows[:back]]),  # what is left goes round
    }
    most = {"reflect": size - 1, "circular": len(rows)}.get(mode, front + back)
    if mode not in around or not rows or max(front, back) > most:
        return None  # torch's own error
    part_of_result, take = listed(part, [*around[mode][0], rows, *around[mode][1]], result)

    def run(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor:
        out = take(input, value or 0.0)
        if any(rest):
            return on_rows(lambda x: function(x, rest, mode, value), out, dim)
        if front or back or mode == "circular":
            kind = torch.contiguous_format if mode == "circular" else format_of(input)
            out = out.contiguous(memory_format=kind)
        return separate(out, input)

    return Plan(part_of_result, run=run)


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
        # The same values, so that each rank takes part in backward.
        top.copy_(found.narrow(dim, before, after))
        bottom.copy_(found.narrow(dim, before + after, before))
        if not first:
            around.narrow(dim, 0, before).copy_(found.narrow(dim, 0, before))
        if not last:
            around.narrow(dim, before + size, after).copy_(found.narrow(dim, 2 * before + after, after))
        start = 0 if first else before
        out = around.narrow(dim, start, before + size + (after if last else 0) - start)
        # A change in place is seen by the version, which inference tensors lack.
        if not out.is_inference():
            setattr(out, _AROUND, (around, before, after, out._version))
        return out

    return run
