# SPDX-License-Identifier: Apache-2.0
"""A sum over tokens, as of their losses, computed on tiles with its gradients: each tile runs once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .tile_parts import TileParts
from .tiled_call import AGAIN, TiledCall, in_dtypes, named_parameters


class TiledSum(TiledCall):
    """A call whose run returns the sum of what it computes of a tile's tokens, a 0-dim tensor."""

    def checked(self, out: Any, tile: TileParts, given: Sequence[Tensor]) -> Any:
        return out

    def sum(self, inputs: list[Tensor]) -> Tensor:
        """Return the sum over this rank's tokens. Call it outside of the view."""
        tensors = [*inputs, *named_parameters(self.module)]
        total: Tensor = _Sum.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return total


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: TiledSum, *tensors: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
        kind = total.dtype

        def of_tile(results: list[Tensor], start: int, size: int) -> list[tuple[Tensor, Tensor]]:
            nonlocal total, kind
            (x,) = results
            total, kind = total + x.detach(), x.dtype
            return [(x, torch.ones_like(x))]

        needs = ctx.needs_input_grad[1:]
        # A checkpoint around the loss would recompute for each tile what is differentiated here.
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            found = call.differentiated(tensors, needs, None, of_tile).found
        ctx.kinds, ctx.module = [x.dtype for x in tensors], type(call.module).__name__
        ctx.save_for_backward(*found)
        return total.to(kind)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{ctx.module} {AGAIN}")
        # The factor of a mean is infinite where all targets are ignored, whose gradients are zeros.
        found = [None if x is None else x * torch.where(x.any(), given, 0) for x in ctx.saved_tensors]
        return None, *in_dtypes(found, ctx.kinds)
