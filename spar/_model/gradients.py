# SPDX-License-Identifier: Apache-2.0
"""Gradients as one process has them, for code that need not be linear in them: hooks and custom Functions.

In backward a rank has a share of a whole tensor's gradient; the mean of all ranks' shares is right. Of a part
it has the gradient of the sum of all ranks' losses: that of one process, times the number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._exchange.arguments import ranks_of
from .._group.group import MOST_EXCHANGES, Call
from ..ops.gather import all_gather, reduce_scatter
from ..sizes import cal_split_sizes
from .nested import changed, tensors_in
from .part import Part, Parts, mark, part_of

Hook = Callable[[Tensor | None], Tensor | None]


class WholeGradients:
    """The gradients of one call that runs on whole tensors: its backward gets, and returns, whole ones.

    Call its methods outside of the view.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.is_recorded = False  # whether a backward was: in that of its graph, inputs have shares, too

    def gather(self, x: Tensor) -> Tensor:
        """Return the whole of a part."""
        whole: Tensor = _Gathered.apply(x, part_of(x), self)  # type: ignore[no-untyped-call]
        return whole

    def average(self, results: Iterable[Tensor]) -> None:
        """Let backward average the ranks' shares of the gradients of results."""
        for x in {id(x): x for x in results if x.grad_fn is not None}.values():
            x.register_hook(self._average)

    def _average(self, share: Tensor | None) -> Tensor | None:
        if share is None:  # The loss does not use this result.
            return None
        self.is_recorded |= torch.is_grad_enabled()
        return mean_of_shares(self.parts, share)


def average_inputs(parts: Parts, args: Any, kwargs: Any) -> Any:
    """Return a model's arguments, such that the gradients of inputs are the mean of the ranks' shares.

    With respect to an input a penalty may use them as they are; recorded, they have exact gradients.
    """
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors_in(args, kwargs)):
        return args, kwargs

    def averaged(x: Tensor) -> Tensor:
        if x.requires_grad and part_of(x) is None:  # a cache may hold parts
            x = x.view_as(x)
            x.register_hook(lambda share: None if share is None else mean_of_shares(parts, share))
        return x

    return changed(averaged, (args, kwargs))


class _Gathered(torch.autograd.Function):
    """The whole of a part. In backward each rank has the whole gradient already: it needs no exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Part, call: WholeGradients) -> Tensor:
        ctx.part, ctx.call = part, call
        whole = part.parts.gather(x)
        return whole.clone() if whole._is_view() else whole  # views of Functions cannot be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        part: Part = ctx.part
        if ctx.call.is_recorded:
            gradient = mean_of_shares(part.parts, gradient)
        return _of_part(gradient, part), None, None


def register_hook(parts: Parts, x: Tensor, hook: Hook) -> Any:
    """Call `Tensor.register_hook` with a hook that gets the whole gradient."""
    part, group = part_of(x), parts.group

    @functools.wraps(hook, updated=())  # torch's errors name it
    def of_whole(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # The loss does not use this result.
            return hook(gradient)
        with Call(ranks_of(group, ""), "a hook of a gradient", MOST_EXCHANGES, gradient.device.type):
            whole = mean_of_shares(parts, gradient) if part is None else _whole(gradient, part)
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


def mean_of_shares(parts: Parts, share: Tensor) -> Tensor:
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
