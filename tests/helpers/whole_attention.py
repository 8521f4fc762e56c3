# SPDX-License-Identifier: Apache-2.0
"""Attention over a whole sequence in one process, in plain torch, and a rank's error against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

METHODS = ("ulysses", "gather", "ring")


def whole_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    mask: Tensor | None = None,
    documents: Sequence[int] | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend over [B, S, H, D]; a query without keys receives zeros. The mask is [B, S] or [.., S, S]."""
    queries, keys = q.size(1), k.size(1)
    owner = (
        torch.zeros(queries)
        if documents is None
        else torch.arange(len(documents)).repeat_interleave(torch.tensor(documents, dtype=torch.int64))
    )
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    if documents is not None:
        allowed = owner[:, None] == owner
    if causal:
        allowed = allowed & (torch.arange(keys) <= torch.arange(queries)[:, None])
    group = q.size(2) // k.size(2)
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bshd,bthd->bhst", q, k) * (scale or 1 / math.sqrt(q.size(3)))
    if mask is not None:
        mask = mask[:, None, None] if mask.dim() == 2 else mask
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    scores = scores.masked_fill(~allowed, -torch.inf)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return torch.einsum("bhst,bthd->bshd", weights, v)


def inputs(tokens: int, heads: int, key_heads: int, dtype: torch.dtype, width: int = 8) -> list[Tensor]:
    """Return q, k, v and the gradient of the output, the same on all ranks."""
    generator = torch.Generator().manual_seed(tokens * 100 + heads * 10 + key_heads)
    shapes = [(2, tokens, n, width) for n in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def error_of(
    function: Callable[..., Tensor], whole: list[Tensor], expected: list[Tensor], own: Tensor
) -> float:
    """Return the largest error of this rank's output and gradients."""
    *leaves, upper = [x[:, own].clone() for x in whole]
    for leaf in leaves:
        leaf.requires_grad_()
    y = function(*leaves)
    found = [y.detach(), *torch.autograd.grad(y, leaves, upper)]
    assert y.is_contiguous() and [x.dtype for x in found] == [leaves[0].dtype] * 4
    errors = [(x - e[:, own]).abs().max() for x, e in zip(found, expected, strict=True) if x.numel()]
    return float(max(errors, default=0.0))


def expected_of(whole: list[Tensor], **arguments: Any) -> list[Tensor]:
    *leaves, upper = [x.clone() for x in whole]
    for leaf in leaves:
        leaf.requires_grad_()
    y = whole_attention(*leaves, **arguments)
    return [y.detach(), *torch.autograd.grad(y, leaves, upper)]
