# SPDX-License-Identifier: Apache-2.0
"""A rank that computes nothing with its tensors still takes part in the exchanges of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def depending_on(result: Tensor, tensors: Iterable[Tensor | None]) -> Tensor:
    """Return a result that also depends on floating tensors, of at least one dim, of which it has no item.

    So this rank records a gradient, and makes the exchanges behind the tensors in backward, as its peers do.
    The product saves a tensor: a checkpoint, which recomputes until the last one that was saved, makes the
    exchanges again.
    """
    for x in tensors:
        if x is not None and x.is_floating_point():
            none = x.narrow(-1, 0, 0)
            # Autocast would sum in float32.
            result = result + (none * none).sum(dtype=result.dtype)
    return result


def on_rows(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    dim: int,
    least: int = 1,
    dim_of_result: int | None = None,
) -> Tensor:
    """Run a function that needs rows; on a rank without any it runs on zeros, and its result is dropped.

    An empty result that is derived from all that others' are lets the rank take part in backward's exchanges.
    """
    if x.size(dim):
        return function(x)
    shape = [*x.shape[:dim], least, *x.shape[dim + 1 :]]
    out = function(torch.cat([x, x.new_zeros(shape)], dim))
    return out.narrow(dim if dim_of_result is None else dim_of_result, 0, 0)
