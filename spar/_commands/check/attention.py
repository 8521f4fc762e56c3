# SPDX-License-Identifier: Apache-2.0
"""The trial of spar.attention: each rank attends with its queries to all keys; in plain torch, in float64."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from .shards import DOCUMENTS, Index, Run, chosen, joined, total
from .trial import Setting, Tensors, Trial

WIDTH = 8
TOLERANCE = 1e-4  # kernels compute in float32, the reference in float64


def plain_attention(qkv: Tensors, forbidden: Tensor) -> Tensor:
    """Attend over [B, S, H, D] in float64; a query without keys receives zeros."""
    q, k, v = (x.double().repeat_interleave(qkv[0].size(2) // x.size(2), 2) for x in qkv)
    scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(WIDTH)
    weights = scores.masked_fill(forbidden, -1e30).softmax(-1).masked_fill(forbidden, 0.0)
    return torch.einsum("bhst,bthd->bshd", weights, v).float()


def attend(s: Setting, run: Run, index: Index, causal: bool, masked: bool, documents: bool) -> Trial:
    """run: also of the mask of keys. documents: each attends to itself alone."""
    query_heads, key_heads = 2 * s.world + 2, s.world + 1
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, total(index), heads, WIDTH) for heads in (query_heads, key_heads, key_heads)]
    held = chosen([torch.randn(shape, generator=generator) for shape in shapes], index)
    position, mask = torch.arange(total(index)), None
    forbidden = ((position > position[:, None]) & causal)[None, None]  # [B or 1, 1, S, S]
    if documents:
        document = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
        forbidden = forbidden | (document != document[:, None])
    if masked:
        mask = position.expand(2, -1) % 4 != 1
        forbidden = forbidden | ~mask[:, None, None]
        mask = mask.to(s.device)

    def reference(inputs: list[Tensors]) -> list[Tensors]:
        return chosen([plain_attention(joined(inputs, index), forbidden)], index)

    return Trial(held, partial(run, mask), reference, tolerance=TOLERANCE)
