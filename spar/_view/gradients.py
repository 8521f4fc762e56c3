# SPDX-License-Identifier: Apache-2.0
"""Gradients as one process has them, for code that need not be linear in them: hooks and custom Functions.

In backward a rank has a share of a whole tensor's gradient; the mean of all ranks' shares is right. Of a part
it has the gradient of the sum of all ranks' losses: that of one process, times the number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._exchange.arguments import ranks_of
from .._group.group import MOST_EXCHANGES, Call
from ..ops.gather import all_gather, reduce_scatter
from ..sizes import cal_split_sizes
from .part import Part, Parts, changed, mark, part_of, tensors_in

Hook = Callable[[Tensor], Tensor | None]


def average_gradients(parts: Parts, out: Any) -> Any:
    """Let backward average the ranks' shares of the gradients of a Function's outputs, which are whole."""
    for x in tensors_in(out):
        if x.requires_grad:
            x.register_hook(functools.partial(_mean, parts))
    return out


def gathered(value: Any) -> Any:
    """Return a nested value with whole tensors, for a Function with `average_gradients`."""

    def whole(x: Tensor) -> Any:
        part = part_of(x)
        return x if part is None else _Gathered.apply(x, part)  # type: ignore[no-untyped-call]

    return changed(whole, value)


class _Gathered(torch.autograd.Function):
    """The whole of a part. In backward each rank has the whole gradient already: it needs no exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Part) -> Tensor:
        ctx.part = part
        return part.parts.gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _of_part(gradient, ctx.part), None


def register_hook(parts: Parts, x: Tensor, hook: Hook) -> Any:
    """Call `Tensor.register_hook` with a hook that gets the whole gradient."""
    part = part_of(x)

    @functools.wraps(hook, updated=())  # torch's errors name it
    def of_whole(gradient: Tensor) -> Tensor | None:
        with Call(ranks_of(parts.group, ""), "a hook of a gradient", MOST_EXCHANGES, gradient.device.type):
            whole = _mean(parts, gradient) if part is None else _whole(gradient, part)
            version = whole._version
            result = hook(whole)
            if result is None and whole._version != version:  # the hook changed it in place
                result = whole
            if result is None or part is None:
                return result
            if result.shape != whole.shape:
                raise RuntimeError(
                    f"a hook of a gradient on rank {parts.rank} of {parts.world} returned a tensor of shape "
                    f"{list(result.shape)}; expected {list(whole.shape)}, that of the gradient"
                )
            return _of_part(result, part)

    return x.register_hook(of_whole)


def _mean(parts: Parts, share: Tensor) -> Tensor:
    """Return the whole gradient by all ranks' shares of it."""
    sizes = cal_split_sizes(share.numel(), parts.world)
    total = reduce_scatter(share.reshape(-1), parts.group, 0, sizes)
    return all_gather(total / parts.world, parts.group, 0, sizes).view(share.shape)


def _whole(gradient: Tensor, part: Part) -> Tensor:
    """Return the whole gradient of a tensor by those of its parts, one on each rank."""
    return part.parts.gather(mark(gradient.view_as(gradient), part)) / part.parts.world


def _of_part(whole: Tensor, part: Part) -> Tensor:
    """Return the gradient of this rank's part, by that of the whole tensor."""
    return part.parts.shard(whole, part) * part.parts.world
