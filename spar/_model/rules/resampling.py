# SPDX-License-Identifier: Apache-2.0
"""Functions that make several rows of each, or one of several: a rank's rows stay on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.unused import on_rows
from ..call import FunctionCall, Plan, are_ints, moves_to, part_rule, rule
from ..moving import moved
from ..part import Part, mark, part_of, whole_shape
from .pools import fewer
from .windows import along, each, format_of, windowed

_WEIGHTED = ("linear", "bilinear", "bicubic", "trilinear")  # modes that leave a dim as it is by a factor of 1
# Modes by what they are in one dim: those that read one row or two of each.
_RAMPS = dict.fromkeys(("linear", "bilinear", "trilinear"), "linear") | {
    mode: mode for mode in ("nearest", "nearest-exact")
}


@part_rule("interpolate")
def interpolate(call: FunctionCall, part: Part) -> Plan | None:
    """Repeat rows by a factor that rounds to the same rows on each rank, or make each of one or two rows."""
    x = call.input
    if part.dim == 1:
        return None
    function, axis, dims, whole = call.function, part.dim - 2, x.dim() - 2, whole_shape(x)[part.dim]
    arguments = inspect.signature(F.interpolate)

    def times(given: dict[str, Any]) -> int | None:
        size, mode = given.get("size"), given.get("mode", "nearest")
        if axis < 0:
            return 1
        factor = along(given["scale_factor"], axis) if size is None else along(size, axis) / max(whole, 1)
        if mode in _WEIGHTED:
            return 1 if factor == 1 and not given.get("antialias") else None
        powers = mode == "nearest-exact" or (mode == "nearest" and not int(factor) & int(factor) - 1)
        return int(factor) if powers and factor >= 1 and factor == int(factor) else None

    asked = arguments.bind(*call.args, **call.kwargs).arguments
    is_ramp = axis >= 0 and asked.get("mode", "nearest") in _RAMPS and not asked.get("antialias")
    if not is_ramp and (part.is_padded or times(asked) is None):
        return None

    def run(*args: Any, **kwargs: Any) -> Tensor:
        """Decide again: a plan serves calls with other floats, too."""
        given = arguments.bind(*args, **kwargs).arguments
        factor, x, size = times(given), given.pop("input"), given.get("size")
        if factor is None or part.is_padded:
            ramped = _of_rows(function, part, x, given) if is_ramp else None
            return function(part.parts.gather(x), **given) if ramped is None else ramped
        if size is not None and axis >= 0:
            local = max(part.local, 1) * factor
            given["size"] = [local if i == axis else along(size, i) for i in range(dims)]
        out = on_rows(lambda x: function(x, **given), x, part.dim)
        repeated = part.repeated(1, factor)
        return moved(mark(out, repeated), repeated.balanced)

    return Plan(run=run)


def _of_rows(function: Callable[..., Tensor], part: Part, x: Tensor, given: dict[str, Any]) -> Tensor | None:
    """Interpolate between the rows that the function itself finds: its result of a ramp says which."""
    dim, axis, dims, mode = part.dim, part.dim - 2, x.dim() - 2, given.get("mode", "nearest")
    places = _places(function, part.whole, axis, x, given)
    first, last = places.floor().long(), places.ceil().long()
    found = windowed(part, len(places), lambda a, b: (int(first[a]), int(last[b - 1]) + 1))
    if found is None:
        return None
    (result, take), rest = found, dict(given)
    start = sum(result.sizes[: part.parts.rank])
    own, rows = slice(start, start + result.local), take(x)
    for name, same in (("size", max(rows.size(dim), 1)), ("scale_factor", 1.0)):
        if given.get(name) is not None:
            rest[name] = [same if i == axis else value for i, value in enumerate(each(given[name], dims))]
    rows = on_rows(lambda x: function(x, **rest), rows, dim)
    offset = int(first[start]) if result.local else 0
    low, high = (rows.index_select(dim, (at[own] - offset).to(x.device)) for at in (first, last))
    if mode in _WEIGHTED:
        shape = [-1 if i == dim else 1 for i in range(x.dim())]
        weight = (places - first)[own].to(rows).view(shape)
        low = torch.lerp(low, high, weight)
    return mark(low.contiguous(memory_format=format_of(x)), result)


def _places(
    function: Callable[..., Tensor], whole: int, axis: int, x: Tensor, given: dict[str, Any]
) -> Tensor:
    """Return between which rows each row of the result lies.

    Which row is the nearest depends on the kernel that computes it: that of x's device, type and dims.
    """
    mode, sizes = given.get("mode", "nearest"), ("size", "scale_factor")
    if mode in _WEIGHTED:
        ramp = torch.arange(whole, dtype=torch.float64, device="cpu")[None, None]
        along_axis = {name: along(given[name], axis) for name in sizes if name in given}
        return function(ramp, **{**given, **along_axis, "mode": _RAMPS[mode]})[0, 0]
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    shape = [whole if dim == axis + 2 else 1 for dim in range(x.dim())]
    ramp = torch.arange(whole, dtype=kind, device=x.device).view(shape).contiguous(memory_format=format_of(x))
    along_axis = {}
    for name in sizes:
        if given.get(name) is not None:
            values = each(given[name], x.dim() - 2)
            along_axis[name] = [value if i == axis else type(value)(1) for i, value in enumerate(values)]
    return function(ramp, **{**given, **along_axis}).flatten().cpu()


@part_rule("channel_shuffle")
def channels(call: FunctionCall, part: Part) -> Plan | None:
    """Exchange channels of the same rows."""
    return Plan(part) if part.dim != 1 else None


@rule("grid_sampler")
def sample(call: FunctionCall) -> Plan | None:
    """Sample a whole image [N, C, H, W] at a part of the points [N, H, W, 2], which may be anywhere in it."""
    image, points = call.input, call.get(1, "grid")
    part, function = part_of(points), call.function
    if part is None or not 0 < part.dim < points.dim() - 1:
        part = call.parts.part(1, (whole_shape(points)[1],))
        if part.whole < call.parts.world:
            return None

    def run(input: Tensor, grid: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return on_rows(lambda grid: function(input, grid, *args, **kwargs), grid, part.dim, 1, part.dim + 1)

    return Plan(part.at(part.dim + 1), moves_to(call, [(image, None), (points, part)]), run=run)


@part_rule("pixel_shuffle pixel_unshuffle")
def pixels(call: FunctionCall, part: Part) -> Plan | None:
    """Exchange rows with channels of the same rank."""
    x, times = call.input, call.get(1, "upscale_factor", "downscale_factor")
    if part.is_padded or part.dim == x.dim() - 3 or not are_ints((times,)):
        return None
    found: tuple[Part, Part] | None = part, part
    if part.dim > x.dim() - 3:
        found = (part, part.repeated(1, times)) if call.name == "pixel_shuffle" else fewer(part, times)
    if found is None:
        return None
    function, dim, least = call.function, part.dim, times if part.dim > x.dim() - 3 else 1

    result = found[1].balanced

    def run(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = on_rows(lambda x: function(x, *args, **kwargs), input, dim, least)
        return moved(mark(out, found[1]), result)

    return Plan(result, moves_to(call, [(x, found[0])]), run=run)
