# SPDX-License-Identifier: Apache-2.0
"""Functions that make several rows of each, or one of several: a rank's rows stay on it."""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..call import FunctionCall, Plan, are_ints, moves_to, rule
from ..part import Part, mark, whole_shape
from .spatial import along, on_rows, one_run

_WEIGHTED = ("linear", "bilinear", "bicubic", "trilinear")  # modes that leave a dim as it is by a factor of 1


def _fewer(part: Part, times: int) -> tuple[Part, Part] | None:
    """Return a part of which each block of rows lies on one rank, and the part of one row for each block."""
    found = one_run(part, times) if part.inner % times else part
    if found is None:
        return None
    return found, part.parts.part(found.dim, found.lengths, found.outer, found.inner // times)


@rule("interpolate")
def interpolate(call: FunctionCall) -> Plan | None:
    """Repeat rows by a factor that rounds to the same rows on each rank."""
    x, part = call.input, call.part
    if part is None or part.is_padded:
        return None
    function, axis, dims, whole = call.function, part.dim - 2, x.dim() - 2, whole_shape(x)[part.dim]
    arguments = inspect.signature(F.interpolate)

    def times(*args: Any, **kwargs: Any) -> int | None:
        given = arguments.bind(*args, **kwargs).arguments
        size, mode = given.get("size"), given.get("mode", "nearest")
        if axis < 0:
            return 1
        factor = along(given["scale_factor"], axis) if size is None else along(size, axis) / max(whole, 1)
        if mode in _WEIGHTED:
            return 1 if factor == 1 and not given.get("antialias") else None
        powers = mode == "nearest-exact" or (mode == "nearest" and not int(factor) & int(factor) - 1)
        return int(factor) if powers and factor >= 1 and factor == int(factor) else None

    if times(*call.args, **call.kwargs) is None:
        return None

    def run(*args: Any, **kwargs: Any) -> Tensor:
        """Decide again: a plan serves calls with other floats, too."""
        factor, given = times(*args, **kwargs), arguments.bind(*args, **kwargs)
        x = given.arguments.pop("input")
        size = given.arguments.get("size")
        if factor is None:
            whole: Tensor = function(part.parts.gather(x), **given.arguments)
            return whole
        if size is not None and axis >= 0:
            local = max(part.local, 1) * factor
            given.arguments["size"] = [local if i == axis else along(size, i) for i in range(dims)]
        out = on_rows(lambda x: function(x, **given.arguments), x, part.dim)
        return mark(out, part.repeated(1, factor))

    return Plan(run=run)


@rule("pixel_shuffle pixel_unshuffle")
def pixels(call: FunctionCall) -> Plan | None:
    """Exchange rows with channels of the same rank."""
    x, part = call.input, call.part
    times = call.get(1, "upscale_factor", "downscale_factor")
    if part is None or part.is_padded or part.dim == x.dim() - 3 or not are_ints((times,)):
        return None
    found: tuple[Part, Part] | None = part, part
    if part.dim > x.dim() - 3:
        found = (part, part.repeated(1, times)) if call.name == "pixel_shuffle" else _fewer(part, times)
    if found is None:
        return None
    function, dim, least = call.function, part.dim, times if part.dim > x.dim() - 3 else 1

    def run(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return on_rows(lambda x: function(x, *args, **kwargs), input, dim, least)

    return Plan(found[1], moves_to(call, [(x, found[0])]), run=run)


@rule("avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d")
def pool(call: FunctionCall) -> Plan | None:
    """Reduce blocks of rows that lie on one rank."""
    x, part = call.input, call.part
    if part is None or part.is_padded:
        return None
    names = ("stride", "padding") if call.name.startswith("avg") else ("stride", "padding", "dilation")
    kernel = call.get(1, "kernel_size")
    stride, padding, *dilation = (call.get(2 + i, name) for i, name in enumerate(names))
    if call.get(6, "return_indices") and not call.name.startswith("avg"):
        return None
    function, dim, axis = call.function, part.dim, part.dim - x.dim() + int(call.name[-2])

    size = along(kernel, axis) if axis >= 0 else 1

    def run(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return on_rows(lambda x: function(x, *args, **kwargs), input, dim, size)

    if axis < 0:
        return Plan(part, run=run)
    moves = size if stride is None or stride in ((), []) else along(stride, axis)
    aligned = moves == size and not along(padding or 0, axis)
    if not are_ints((size, moves)) or not aligned or any(along(value or 1, axis) != 1 for value in dilation):
        return None
    found = _fewer(part, size)
    return None if found is None else Plan(found[1], moves_to(call, [(x, found[0])]), run=run)
