# SPDX-License-Identifier: Apache-2.0
"""Norms; over dims of which each rank has rows, by moments of each rank, merged over the ranks."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.unused import on_rows
from ..call import FunctionCall, Plan, part_rule
from ..part import Part, whole_shape
from .moments import corrected, in_single, moments
from .windows import format_of


@part_rule("layer_norm rms_norm")
def layer_norm(call: FunctionCall, part: Part) -> Plan | None:
    first = call.input.dim() - len(call.get(1, "normalized_shape"))
    if call.has_later_part:
        return None
    if part.dim < first:
        return Plan(part)
    if call.name == "rms_norm":
        return None
    of_weight = part.at(part.dim - first)

    def run(
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *_: Any,
    ) -> Tensor:
        mean, var = moments(part, input, range(first, input.dim()), keepdim=True)
        out: Tensor = (in_single(input) - mean) * (var + eps).rsqrt()
        if weight is not None:
            out = out * part.parts.shard(weight, of_weight)
        if bias is not None:
            out = out + part.parts.shard(bias, of_weight)
        return out.to(input.dtype).contiguous()

    return Plan(part, run=run)


@part_rule("group_norm")
def group_norm(call: FunctionCall, part: Part) -> Plan | None:
    if part.dim == 1 or call.has_later_part:
        return None
    if part.dim == 0:
        return _of_samples(call, part)

    def run(
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *_: Any,
    ) -> Tensor:
        out = _of_groups(part, input, num_groups, weight, bias, eps)
        return out.contiguous(memory_format=format_of(input) if input.is_cpu else torch.contiguous_format)

    return Plan(part, run=run)


@part_rule("instance_norm")
def instance_norm(call: FunctionCall, part: Part) -> Plan | None:
    # torch.instance_norm has its arguments in another order.
    if part.dim == 1 or call.has_later_part or call.function is not F.instance_norm:
        return None
    if not call.get(5, "use_input_stats", default=True):
        return Plan(part)
    if part.dim == 0:
        return None if call.get(1, "running_mean") is not None else _of_samples(call, part)
    count = prod(whole_shape(call.input)[2:])
    if count < 2:
        return None  # torch's own error

    def run(
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        found = moments(part, input, range(2, input.dim()))
        _follow(running_mean, running_var, found.mean(1), count, momentum)
        return _normalized(input, found[0], found[1], weight, bias, eps).contiguous()

    return Plan(part, run=run)


@part_rule("batch_norm")
def batch_norm(call: FunctionCall, part: Part) -> Plan | None:
    """Normalize by running moments, which do not depend on the rows, or by those of all ranks' rows."""
    x = call.input
    if part.dim == 1 or call.has_later_part:
        return None
    if not call.get(5, "training", default=False):
        return Plan(part)
    is_native = call.function is not F.batch_norm  # torch.batch_norm has its arguments in another order
    count = prod([size for dim, size in enumerate(whole_shape(x)) if dim != 1])
    if count < 2:
        return None  # torch's own error

    def run(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        names = _NATIVE if is_native else _FUNCTIONAL
        given = dict(zip(names, args, strict=False)) | kwargs
        momentum, eps = given.get("momentum", 0.1), given.get("eps", 1e-5)
        found = moments(part, input, [dim for dim in range(input.dim()) if dim != 1])
        _follow(given.get("running_mean"), given.get("running_var"), found, count, momentum)
        weight, bias = given.get("weight"), given.get("bias")
        return _normalized(input, found[0, None], found[1, None], weight, bias, eps).contiguous(
            memory_format=format_of(input)
        )

    return Plan(part, run=run)


def _follow(mean: Tensor | None, var: Tensor | None, found: Tensor, count: int, momentum: float) -> None:
    """Move running moments towards those of all rows, of which there are so many."""
    with torch.no_grad():
        for running, value in ((mean, found[0]), (var, corrected(found[1], count, 1))):
            if running is not None:  # torch's kernels leave the version, too
                running.data.lerp_(value.to(running.dtype), momentum)


_FUNCTIONAL = ("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_NATIVE = ("weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")


def _of_samples(call: FunctionCall, part: Part) -> Plan:
    function = call.function
    return Plan(part, run=lambda x, *args, **kwargs: on_rows(lambda x: function(x, *args, **kwargs), x, 0))


def _of_groups(
    part: Part, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalize groups of channels [N, C, ...] over their channels and all rows."""
    flat = x.unflatten(1, (groups, -1))
    found = moments(part, flat, range(2, flat.dim()))
    shape = x.size(0), groups, x.size(1) // groups
    mean, var = found[..., None].expand(2, *shape).flatten(2)
    return _normalized(x, mean, var, weight, bias, eps)


def _normalized(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalize [N, C, ...] by moments [N or 1, C]."""
    scale = (var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    return _affine(x, scale.expand(x.size(0), -1), shift.expand(x.size(0), -1))


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return x * scale + shift for scales and shifts [N, C], in the type of x."""
    if scale.dtype == x.dtype:
        ones = (1,) * (x.dim() - 2)
        return torch.addcmul(shift.reshape(*shift.shape, *ones), x, scale.reshape(*scale.shape, *ones))
    # The norm by moments that are 0 and 1 computes in float32, without a copy of x in it.
    flat, none = x.flatten(0, 1)[None], torch.zeros_like(scale).flatten()
    out = torch.batch_norm(
        flat, scale.flatten(), shift.flatten(), none, torch.ones_like(none), False, 0.0, 0.0, False
    )
    return out.view(x.shape)
