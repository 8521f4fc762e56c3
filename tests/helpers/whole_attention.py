"""Attention over a whole sequence in one process, in plain torch: what every rank's part must equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


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
