# SPDX-License-Identifier: Apache-2.0
"""What one rank computes of an attention, and what that results in."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.unused import depending_on
from .kernels.kernel import accumulated
from .problem import Problem
from .scores import Scores

# The output [B, H, S, E], and the log-sum-exp [B, H, S] if the caller asks for it.
Outs = tuple[Tensor, ...]
# q [B, H, S, D], k [B, K, T, D] and v [B, K, T, E].
Tensors = tuple[Tensor, Tensor, Tensor]


class Part(NamedTuple):
    """What a rank computes: q, k and v of some heads, and what belongs to these heads."""

    tensors: Tensors
    mask: Tensor | None
    sinks: Tensor | None
    scores: Scores


def part_of(problem: Problem, tensors: Tensors, first: int = 0) -> Part:
    """Return the part of the heads that q has, from head `first` on."""
    weights, count = problem.weights, tensors[0].size(1)
    mask, sinks, spans = weights.mask, weights.sinks, weights.spans
    if count < problem.inputs.heads:
        mask = mask.narrow(1, first, count) if mask is not None and mask.size(1) > 1 else mask
        sinks = None if sinks is None else sinks.narrow(0, first, count)
        if spans is not None and not torch.compiler.is_compiling():
            spans = spans.of_heads(first, count)
    changes = weights.softcap, spans, weights.bias, first, weights.kernel, problem.varied, weights.returns_lse
    return Part(tensors, mask, sinks, Scores(problem.scale, *changes))


def nothing(problem: Problem, part: Part) -> Outs:
    """Return the outputs of queries without keys, which depend on all inputs, as the peers' outputs do."""
    q, k, v = part.tensors
    outs = [q.new_zeros(*q.shape[:-1], v.size(3))]
    if problem.weights.returns_lse:
        outs.append(q.new_full(q.shape[:-1], -torch.inf, dtype=accumulated(q.dtype)))
    return tuple([depending_on(x, (q, k, v, problem.weights.mask, part.sinks)) for x in outs])
