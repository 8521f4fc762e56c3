# SPDX-License-Identifier: Apache-2.0
"""DTensors whose local shards are parts: over other ranks than those of the sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_distributed(x: Any) -> bool:
    """Whether x is a DTensor."""
    return hasattr(x, "_local_tensor")


def gathered(x: Any, dim: int, gather: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a DTensor of whole tensors, by what gathers a local one along `dim`."""
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate() if divides(placement, dim) else placement for placement in x.placements]
    whole = gather(arrived(x.redistribute(placements=placements).to_local()))
    shape = torch.Size([*x.shape[:dim], whole.size(dim), *x.shape[dim + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(whole, x.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def divides(placement: Any, dim: int) -> bool:
    """Whether a placement divides a dim."""
    return getattr(placement, "dim", None) == dim


def is_waiting(x: Any) -> bool:
    """Whether x is what a functional collective returns before it has ended."""
    return hasattr(x, "trigger_wait")


def arrived(x: Any) -> Any:
    """Return the tensor of a functional collective, once it has ended."""
    return _Waited.apply(x) if is_waiting(x) else x  # type: ignore[no-untyped-call]


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        found: Tensor = x.trigger_wait()
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
