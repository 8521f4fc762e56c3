# SPDX-License-Identifier: Apache-2.0
"""Norms over spatial dims, of which each rank has rows: moments of each rank, merged over the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.gather import all_gather
from ..call import FunctionCall, Plan, rule
from ..part import Part, part_of
from .spatial import on_rows


@rule("group_norm")
def group_norm(call: FunctionCall) -> Plan | None:
    part = call.part
    if part is None or part.dim == 1 or any(part_of(t) is not None for t in call.tensors[1:]):
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
        return _normalized(part, input, num_groups, weight, bias, eps)

    return Plan(part, run=run)


@rule("instance_norm")
def instance_norm(call: FunctionCall) -> Plan | None:
    part = call.part
    # torch.instance_norm has its arguments in another order
    if part is None or part.dim == 1 or call.function is not F.instance_norm:
        return None
    if call.get(1, "running_mean") is not None or not call.get(5, "use_input_stats", default=True):
        return None
    if any(part_of(t) is not None for t in call.tensors[1:]):
        return None
    if part.dim == 0:
        return _of_samples(call, part)

    def run(
        input: Tensor,
        running_mean: None = None,
        running_var: None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        return _normalized(part, input, input.size(1), weight, bias, eps)

    return Plan(part, run=run)


@rule("batch_norm")
def batch_norm(call: FunctionCall) -> Plan | None:
    """Normalize by running moments, which do not depend on the rows."""
    part = call.part
    if part is None or part.dim == 1 or call.get(5, "training", default=False):
        return None
    return None if any(part_of(t) is not None for t in call.tensors[1:]) else Plan(part)


def _of_samples(call: FunctionCall, part: Part) -> Plan:
    function = call.function
    return Plan(part, run=lambda x, *args, **kwargs: on_rows(lambda x: function(x, *args, **kwargs), x, 0))


def _normalized(
    part: Part, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalize groups of channels [N, C, ...] over their channels and all rows."""
    mean, var = _moments(part, x.unflatten(1, (groups, -1)))
    shape = x.size(0), groups, x.size(1) // groups
    scale = (var + eps).rsqrt()[..., None].expand(shape).flatten(1)
    if weight is not None:
        scale = scale * weight
    shift = -mean[..., None].expand(shape).flatten(1) * scale
    if bias is not None:
        shift = shift + bias
    return _affine(x, scale, shift)


def _moments(part: Part, x: Tensor) -> Tensor:
    """Return mean and variance [2, N, G] of [N, G, ...] over the rows of all ranks."""
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    dims = list(range(2, x.dim()))
    if part.local:
        var, mean = torch.var_mean(x, dims, correction=0)
    else:
        var = mean = x.sum(dims)
    each = all_gather(torch.stack([mean, var])[None], part.parts.group)
    share = torch.tensor(part.sizes, dtype=x.dtype, device=x.device).view(-1, 1, 1) / part.whole
    mean = (share * each[:, 0]).sum(0)
    return torch.stack([mean, (share * (each[:, 1] + (each[:, 0] - mean).square())).sum(0)])


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return x * scale + shift for scales and shifts [N, C], in the type of x."""
    if scale.dtype == x.dtype:
        ones = (1,) * (x.dim() - 2)
        return torch.addcmul(shift.view(*shift.shape, *ones), x, scale.view(*scale.shape, *ones))
    # The norm by moments that are 0 and 1 computes in float32, without a copy of x in it.
    flat, none = x.flatten(0, 1)[None], torch.zeros_like(scale).flatten()
    out = torch.batch_norm(
        flat, scale.flatten(), shift.flatten(), none, torch.ones_like(none), False, 0.0, 0.0, False
    )
    return out.view(x.shape)
