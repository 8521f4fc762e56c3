# SPDX-License-Identifier: Apache-2.0
"""Losses over tokens: each rank's sum, and the sum over the ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import FunctionCall, Plan, moves_to, rule
from ..part import Part, part_of, whole_shape
from ..sums import sum_over_ranks
from ..waiting import later_of

_REDUCTION = {"mse_loss": 4, "l1_loss": 4, "smooth_l1_loss": 4, "huber_loss": 2}


@rule("cross_entropy nll_loss")
def of_classes(call: FunctionCall) -> Plan | None:
    """Reduce over the targets that are not ignored, of all ranks."""
    x, target = call.input, call.get(1, "target")
    weight, ignored = call.get(2, "weight"), call.get(4, "ignore_index", default=-100)
    reduction = call.get(6, "reduction", default="mean")
    part = part_of(x) or part_of(target)
    if part is None or call.get(3, "size_average") is not None or call.get(5, "reduce") is not None:
        return None
    if call.function is not getattr(F, call.name):  # one in C, which takes reductions as ints
        return None
    if target.is_floating_point() or weight is not None or reduction not in ("none", "sum", "mean"):
        return None
    logits, targets = _places(x, target, part)
    if logits is None or whole_shape(target)[targets.dim] != part.whole:
        return None
    moves = moves_to(call, [(x, logits), (target, targets)])
    if reduction == "none":
        return Plan(targets, moves)
    parts, function, mean = call.parts, call.function, reduction == "mean"

    def run(input: Tensor, target: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        smoothing = rest[5] if len(rest) > 5 else kwargs.get("label_smoothing", 0.0)
        options = {"label_smoothing": smoothing} if smoothing else {}
        loss = functools.partial(function, ignore_index=ignored, reduction="sum", **options)
        later = later_of(input)
        total = sum_over_ranks(parts, loss(input, target) if later is None else later.summed(loss, target))
        return total / sum_over_ranks(parts, (target != ignored).sum()) if mean else total

    return Plan(moves=moves, run=run)


def _places(x: Tensor, target: Tensor, part: Part) -> tuple[Part | None, Part]:
    """Return the part of logits [N, C, ...] and that of their targets [N, ...]."""
    if part_of(x) is not None:
        classes = 1 if x.dim() > 1 else 0
        if part.dim == classes:
            return None, part
        return part, part.at(part.dim - (part.dim > classes))
    return part.at(part.dim + (part.dim > 0)), part


@rule(" ".join(_REDUCTION))
def of_elements(call: FunctionCall) -> Plan | None:
    x, target = call.input, call.get(1, "target")
    reduction = call.get(_REDUCTION[call.name], "reduction", default="mean")
    shape = whole_shape(x)
    old = [call.kwargs.get(name) for name in ("size_average", "reduce")]
    if shape != whole_shape(target) or len(call.tensors) != 2 or any(value is not None for value in old):
        return None
    if (
        call.function is not getattr(F, call.name)
        or len(call.args) > 2
        or reduction not in ("none", "sum", "mean")
    ):
        return None
    part = part_of(x) or part_of(target)
    moves = moves_to(call, [(x, part), (target, part)])
    if reduction == "none":
        return Plan(part, moves)
    parts, function, count = call.parts, call.function, torch.Size(shape).numel()

    def run(input: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
        total = sum_over_ranks(parts, function(input, target, **{**kwargs, "reduction": "sum"}))
        return total / count if reduction == "mean" else total

    return Plan(moves=moves, run=run)
