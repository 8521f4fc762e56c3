# SPDX-License-Identifier: Apache-2.0
"""Random numbers: drawn for the whole tensor on each rank, as one process does, and sliced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.unused import on_rows
from ..call import FunctionCall, Plan, part_rule
from ..memory import memory_order
from ..part import Part, whole_shape


def draws(call: FunctionCall) -> bool:
    """Whether a dropout draws numbers."""
    return bool(call.get(1, "p", default=0.5) and call.get(2, "training", "train", default=True))


@part_rule("rand_like randn_like randint_like")
def like(call: FunctionCall, part: Part) -> Plan | None:
    function = call.function
    return Plan(part, run=lambda x, *args, **kwargs: _drawn(part, x, lambda e: function(e, *args, **kwargs)))


@part_rule("normal_ uniform_ bernoulli_ random_ exponential_")
def in_place(call: FunctionCall, part: Part) -> Plan | None:
    if len(call.tensors) > 1:
        return None
    function = call.function

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.copy_(_drawn(part, x, lambda e: function(e, *args, **kwargs)))  # autograd sees the change

    return Plan(part, run=run)


@part_rule("dropout dropout_")
def dropout(call: FunctionCall, part: Part) -> Plan | None:
    """Multiply by what dropout makes of ones of the whole shape."""
    function, is_inplace = call.function, call.is_inplace
    if not draws(call):
        return Plan(part)
    if call.get(3, "inplace", default=False):
        return None  # the function's body names what it changes

    def run(input: Tensor, p: float = 0.5, *_: Any, **__: Any) -> Tensor:
        kept = _drawn(part, input, lambda e: function(e.fill_(1), p, True))
        return input.mul_(kept) if is_inplace else input * kept

    return Plan(part, run=run)


@part_rule("feature_dropout")
def feature_dropout(call: FunctionCall, part: Part) -> Plan | None:
    """Drop channels [N, C, ...] of all rows: the same numbers are drawn for any rows."""
    function, dim = call.function, part.dim
    part.parts.check_by_token("random numbers")
    if dim < 2:
        return None
    return Plan(part, run=lambda x, *args, **kwargs: on_rows(lambda x: function(x, *args, **kwargs), x, dim))


def _drawn(part: Part, x: Tensor, draw: Any) -> Tensor:
    """Return this rank's part of what is drawn for an empty tensor of the whole shape."""
    part.parts.check_by_token("random numbers")
    with torch.no_grad():
        return part.parts.shard(draw(_empty_whole(x)), part).detach()


def _empty_whole(x: Tensor) -> Tensor:
    """Return an empty tensor of the whole shape, in whose memory numbers are drawn in one process's order.

    It has gaps where x has: torch draws normal numbers one by one there, and else many at once.
    """
    strides, order = x.stride(), memory_order(x)
    shape = list(whole_shape(x))
    wide, unit = list(shape), 1
    for dim in reversed(order):
        if shape[dim] > 1 and strides[dim] != unit:
            wide[order[-1]] = shape[order[-1]] + 1
        unit *= max(x.shape[dim], 1)
    empty = torch.empty_permuted(wide, order, dtype=x.dtype, device=x.device)
    return empty if wide == shape else empty.narrow(order[-1], 0, shape[order[-1]])
