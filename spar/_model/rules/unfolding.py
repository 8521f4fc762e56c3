# SPDX-License-Identifier: Apache-2.0
"""Windows of rows as elements of a result, their sum, and differences of neighbour rows."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...ops.unused import on_rows
from ..call import FunctionCall, Plan, are_ints, part_rule
from ..part import Part
from .windows import each, reaching, windowed


@part_rule("unfold")
def unfold(call: FunctionCall, part: Part) -> Plan | None:
    """Make each window of rows a row, with a dim behind the others for what is in it."""
    if call.function is F.unfold:
        return None  # its body calls im2col
    (dim,) = call.dims(call.input, call.get(1, "dimension"))
    size, step = call.get(2, "size"), call.get(3, "step")
    if dim != part.dim:
        return Plan(part)
    if not are_ints((size, step)) or not 0 < size <= part.whole or step < 1:
        return None
    count = (part.whole - size) // step + 1
    found = windowed(part, count, lambda a, b: (a * step, (b - 1) * step + size))
    if found is None:
        return None
    result, take = found
    return Plan(
        result, run=lambda x, *_, **__: on_rows(lambda x: x.unfold(dim, size, step), take(x), dim, size)
    )


@part_rule("diff")
def diff(call: FunctionCall, part: Part) -> Plan | None:
    """Subtract neighbour rows, `n` times."""
    count = call.get(1, "n", default=1)
    (dim,) = call.dims(call.input, call.get(2, "dim", default=-1))
    if len(call.tensors) > 1 or not are_ints((count,)) or count < 0:
        return None
    if dim != part.dim:
        return Plan(part)
    found = windowed(part, part.whole - count, lambda a, b: (a, b + count))
    if found is None:
        return None
    result, take = found
    return Plan(
        result, run=lambda x, *_, **__: on_rows(lambda x: x.diff(count, dim), take(x), dim, count + 1)
    )


@part_rule("im2col")
def columns(call: FunctionCall, part: Part) -> Plan | None:
    """Make columns [N, C * kernel, windows] of images [N, C, H, W]: their last dim has rows of windows."""
    x, function, dim, axis = call.input, call.function, part.dim, part.dim - 2
    names = enumerate(("kernel_size", "dilation", "padding", "stride"), 1)
    kernel, by, sides, steps = options = [each(call.get(at, name), 2) for at, name in names]
    if x.dim() != 4 or axis < 0 or not all(map(are_ints, options)):
        return None
    spans = [b * (size - 1) + 1 for size, b in zip(kernel, by, strict=True)]
    sizes = [part.whole if i == axis else x.size(i + 2) for i in range(2)]
    counts = [(sizes[i] + 2 * sides[i] - spans[i]) // steps[i] + 1 for i in range(2)]
    span, side, step = spans[axis], sides[axis], steps[axis]
    found = windowed(part, counts[axis], lambda a, b: (a * step - side, (b - 1) * step - side + span))
    if found is None:
        return None
    rows, take = found
    sides = [0 if i == axis else side for i, side in enumerate(sides)]

    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return on_rows(lambda x: function(x, kernel, by, sides, steps), take(x), dim, span, 2)

    return Plan(rows.at(2).repeated(*([1, counts[1]] if axis == 0 else [counts[0], 1])), run=run)


@part_rule("col2im")
def images(call: FunctionCall, part: Part) -> Plan | None:
    """Make rows of images [N, C, H, W] of the columns of all windows that reach them."""
    x, function = call.input, call.function
    names = enumerate(("output_size", "kernel_size", "dilation", "padding", "stride"), 1)
    sizes, kernel, by, sides, steps = options = [each(call.get(at, name), 2) for at, name in names]
    if x.dim() != 3 or part.dim != 2 or not all(map(are_ints, options)):
        return None
    span, wide = (b * (size - 1) + 1 for size, b in zip(kernel, by, strict=True))
    each_row = (sizes[1] + 2 * sides[1] - wide) // steps[1] + 1  # windows

    def reach(start: int, stop: int) -> tuple[int, int]:
        return reaching(start, stop, span, steps[0], sides[0])

    def columns_of(start: int, stop: int) -> tuple[int, int]:
        first, last = reach(start, stop)
        return first * each_row, last * each_row

    found = windowed(part, sizes[0], columns_of)
    if found is None:
        return None
    result, take = found
    start = sum(result.sizes[: part.parts.rank])
    first, last = reach(start, start + result.local) if result.local else (0, 1)
    height, skipped = (last - first - 1) * steps[0] + span, start + sides[0] - first * steps[0]

    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        def folded(x: Tensor) -> Tensor:
            out: Tensor = function(x, [height, sizes[1]], kernel, by, [0, sides[1]], steps)
            return out.narrow(2, skipped, result.local) if result.local else out

        return on_rows(folded, take(x), 2, each_row)

    return Plan(result, run=run)
