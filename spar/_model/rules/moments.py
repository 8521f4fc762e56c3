# SPDX-License-Identifier: Apache-2.0
"""Variances, extremes and softmax over a dim of which each rank has a part, merged over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...ops.gather import all_gather
from ..part import Part
from ..sums import sum_over_ranks

_HALVES = (torch.float16, torch.bfloat16)


def in_single(x: Tensor) -> Tensor:
    """Return x in the dtype in which torch's kernels add it up."""
    return x.float() if x.dtype in _HALVES else x


def moments(part: Part, x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """Return mean and variance, uncorrected and stacked, over dims of the whole of a part."""
    x = in_single(x)
    if part.local:
        var, mean = torch.var_mean(x, list(dims), correction=0, keepdim=keepdim)
    else:
        var = mean = x.sum(list(dims), keepdim=keepdim)
    ranks = all_gather(torch.stack([mean, var])[None], part.parts.group)
    share = torch.tensor(part.sizes, dtype=x.dtype, device=x.device).view(-1, *[1] * mean.dim()) / part.whole
    mean = (share * ranks[:, 0]).sum(0)
    return torch.stack([mean, (share * (ranks[:, 1] + (ranks[:, 0] - mean).square())).sum(0)])


def corrected(var: Tensor, count: int, correction: float) -> Tensor:
    """Return the variance of `count` elements, of which so many are not counted; inf or nan as in torch."""
    return var * count / max(count - correction, 0)


def root(var: Tensor) -> Tensor:
    """Return the square root, with the gradient 0 where torch's std has it."""
    is_zero = var == 0
    return var.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


def softmax(part: Part, x: Tensor, is_log: bool) -> Tensor:
    """Return the softmax over the dim of a part, or its logarithm."""
    dim = part.dim
    kind = x.new_zeros(1).softmax(0).dtype  # another one under autocast
    x = in_single(x).contiguous()
    shape = [1 if i == dim else size for i, size in enumerate(x.shape)]
    own = x.detach().amax(dim, True) if part.local else x.new_full(shape, -torch.inf)
    x = x - all_gather(own[None], part.parts.group).amax(0)
    weights = x.exp()
    total = sum_over_ranks(part.parts, weights.sum(dim, True))
    return (x - total.log() if is_log else weights / total).to(kind)
