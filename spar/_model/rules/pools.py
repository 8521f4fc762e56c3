# SPDX-License-Identifier: Apache-2.0
"""Pools: of blocks of rows that lie on one rank, of windows of them, or of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.gather import all_gather
from ...ops.unused import on_rows
from ..call import FunctionCall, Plan, are_ints, moves_to, part_rule
from ..memory import in_order_of
from ..part import Part
from ..sums import sum_over_ranks
from .windows import each, one_run, windowed


def fewer(part: Part, times: int) -> tuple[Part, Part] | None:
    """Return a part of which each block of rows lies on one rank, and the part of one row for each block."""
    found = one_run(part, times) if part.inner % times else part
    if found is None:
        return None
    return found, part.parts.part(found.dim, found.lengths, found.outer, found.inner // times)


@part_rule("avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d")
def pool(call: FunctionCall, part: Part) -> Plan | None:
    """Reduce blocks of rows where they lie, or windows of rows, for an even part of the result."""
    x, dims, is_max = call.input, int(call.name[-2]), call.name.startswith("max")
    if is_max and call.get(6, "return_indices"):
        return None
    kernel, stride, padding = (call.get(1 + i, n) for i, n in enumerate(("kernel_size", "stride", "padding")))
    sizes, sides = each(kernel, dims), each(padding or 0, dims)
    steps = sizes if stride in (None, (), []) else each(stride, dims)
    by = each(call.get(4, "dilation", default=1) if is_max else 1, dims)
    ceil = bool(call.get(5 if is_max else 4, "ceil_mode", default=False))
    with_zeros, divisor = call.get(5, "count_include_pad", default=True), call.get(6, "divisor_override")
    if not are_ints((*sizes, *steps, *sides, *by)):
        return None
    function, dim, axis = call.function, part.dim, part.dim - x.dim() + dims
    rest = [by, ceil] if is_max else [ceil, with_zeros, *([] if divisor is None else [divisor])]

    def pooled(x: Tensor) -> Tensor:
        return on_rows(lambda x: function(x, sizes, steps, sides, *rest), x, dim, span)

    if axis < 0:
        span = 1
        return Plan(part, run=lambda x, *_, **__: pooled(x))
    span, step, side = by[axis] * (sizes[axis] - 1) + 1, steps[axis], sides[axis]
    blocks = fewer(part, span) if span == sizes[axis] == step and not side and not part.is_padded else None
    if blocks is not None:
        return Plan(blocks[1], moves_to(call, [(x, blocks[0])]), run=lambda x, *_, **__: pooled(x))
    count = (part.whole + 2 * side - span + (step - 1) * ceil) // step + 1
    if ceil and (count - 1) * step >= part.whole + side:
        count -= 1  # a window of padding alone
    found = windowed(part, count, lambda a, b: (a * step - side, (b - 1) * step - side + span))
    if found is None:
        return None
    (result, take), sides[axis] = found, 0
    if is_max:
        return Plan(result, run=lambda x, *_, **__: pooled(take(x, _lowest(x))))
    start, zeros = sum(result.sizes[: part.parts.rank]), side if with_zeros else 0
    ends = [(i * step - side, i * step - side + span) for i in range(start, start + result.local)]
    counts = [min(end, part.whole + zeros) - max(begin, -zeros) for begin, end in ends]
    scale = [span / n for n in counts] if divisor is None and counts != [span] * len(ends) else None

    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        out = pooled(take(x))
        if scale is None:
            return out
        return out * out.new_tensor(scale).view([-1 if i == dim else 1 for i in range(out.dim())])

    return Plan(result, run=run)


def _lowest(x: Tensor) -> float:
    return -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min


_ADAPTIVE = " ".join(f"adaptive_{kind}_pool{dims}d" for kind in ("avg", "max") for dims in (1, 2, 3))


@part_rule(_ADAPTIVE)
def adaptive(call: FunctionCall, part: Part) -> Plan | None:
    """Reduce each window where its row of the result is, or all rows on their ranks, and then the ranks'."""
    x, dims, is_max = call.input, int(call.name[-2]), "max" in call.name
    if is_max and (call.get(2, "return_indices") or call.function is not getattr(F, call.name)):
        return None  # torch's own return indices, too
    function, dim, axis, whole = call.function, part.dim, part.dim - x.dim() + dims, part.whole
    sizes = each(call.get(1, "output_size"), dims)
    if not are_ints([size for size in sizes if size is not None]):
        return None
    count = whole if axis < 0 or sizes[axis] is None else sizes[axis]

    def pooled(x: Tensor, rows: int) -> Tensor:
        of_rows = [rows if i == axis else size for i, size in enumerate(sizes)]
        return on_rows(lambda x: function(x, of_rows), x, dim)

    if count == whole:
        return Plan(part, run=lambda x, *_, **__: pooled(x, max(part.local, 1)))
    if count == 1:
        return Plan(run=lambda x, *_, **__: _of_ranks(part, x, is_max, lambda x: pooled(x, 1)))
    ends = [(i * whole // count, -(-(i + 1) * whole // count)) for i in range(count)]
    found = windowed(part, count, lambda a, b: (ends[a][0], ends[b - 1][1])) if count else None
    if found is None:
        return None
    result, take = found
    start = sum(result.sizes[: part.parts.rank])
    own = ends[start : start + result.local]

    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        rows = take(x)
        if whole % count == 0 or not own:
            return pooled(rows, max(len(own), 1))
        out = torch.cat([pooled(rows.narrow(dim, a - own[0][0], b - a), 1) for a, b in own], dim)
        meta = torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device="meta")
        return in_order_of(out, pooled(meta, len(own)))

    return Plan(result, run=run)


def _of_ranks(part: Part, x: Tensor, is_max: bool, pooled: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce all rows to one, on each rank."""
    if not part.local:
        shape = [*x.shape[: part.dim], 1, *x.shape[part.dim + 1 :]]
        x = torch.cat([x, x.new_full(shape, _lowest(x) if is_max else 0.0)], part.dim)
    out = pooled(x)
    if is_max:
        return all_gather(out[None], part.parts.group).max(0).values
    return sum_over_ranks(part.parts, out * (part.local / part.whole))
