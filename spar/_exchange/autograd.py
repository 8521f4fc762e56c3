# SPDX-License-Identifier: Apache-2.0
"""Exchanges as autograd sees them: one Function, and its twin for forward mode and functorch.

The derivative of an exchange is its transpose; the derivative of that is the exchange again. So a penalty on
a gradient, which is differentiated twice, needs the same reduction of parameter gradients as the loss. In
forward mode the tangents go through the exchange itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .. import _C
from .exchange import Chain, Exchange, Tensors
from .observers import _functorch_transforms, must_record

# What is recorded, and what runs it; None: `_C.again`. One argument, because torch spends time on each.
Recorded = tuple[Exchange | Chain, Callable[[Tensors], Tensors] | None]


class SparExchange(torch.autograd.Function):
    """Compute y = scale * exchange(x); the gradient of x is grad_scale * transpose(gradient of y)."""

    @staticmethod
    def forward(ctx: Any, call: Recorded, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        exchange, run = call
        ctx.exchange = exchange
        if run is None:  # no tracer is there, and no Chain
            repeated: Any = exchange
            outputs = _C.again(exchange, inputs)
            ctx.forward = repeated.group.calls
        else:
            outputs = run(inputs)
            ctx.forward = exchange.number()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        exchange = ctx.exchange
        back = exchange.transpose() if is_dynamo_compiling() else exchange.transposed
        before = back.begin()
        try:
            if (torch.is_grad_enabled() or forward_ad._current_level >= 0) and must_record(grads):
                return None, *apply(back.recorded(), grads)
            return None, *back.run(grads, ctx.forward)
        except BaseException as error:
            back.report(before, grads, error)
            raise


class SparTransformed(SparExchange):
    """The same with a derivative in forward mode, and for functorch's transforms.

    These need the context apart from forward, which takes longer. torch.compile traces no class with a jvp.
    """

    @staticmethod
    def forward(call: Recorded, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return SparExchange.forward(SimpleNamespace(), call, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.exchange, _ = inputs[0]
        ctx.forward = () if isinstance(ctx.exchange, Chain) else 0

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        exchange = ctx.exchange
        name = exchange.name
        tangent = exchange.recorded(name if name.startswith("tangent of ") else f"tangent of {name}")
        before = tangent.begin()
        try:
            return tuple(apply(tangent, tangents))
        except BaseException as error:
            tangent.report(before, tangents, error)
            raise


# Function.apply without its check for functorch's wrappers, which takes as long as the rest of it
apply_plain: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, SparExchange).apply


def apply(exchange: Exchange | Chain, inputs: Tensors) -> Tensors:
    """Run an exchange, under autograd if it is to be recorded."""
    if not exchange.gradient:
        return exchange.run(inputs)
    compiles = is_dynamo_compiling()
    if forward_ad._current_level >= 0 or (not compiles and _functorch_transforms()):
        return cast(Tensors, SparTransformed.apply((exchange, exchange.run), *inputs))  # type: ignore[no-untyped-call]
    # Dynamo must see torch's own apply.
    if compiles:
        return cast(Tensors, SparExchange.apply((exchange, exchange.run), *inputs))  # type: ignore[no-untyped-call]
    return apply_plain((exchange, exchange.run), *inputs)
