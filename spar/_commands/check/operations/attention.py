# SPDX-License-Identifier: Apache-2.0
"""Cases of spar.attention: each method over several layouts, against the whole sequence in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import spar

from ..shards import DOCUMENTS, joined
from ..trial import SUMMED, Case, Setting, Tensors, Trial
from .layouts import LAYOUTS

WIDTH = 8
TOLERANCE = 1e-4  # kernels compute in float32, the reference in float64


def plain_attention(q: Tensor, k: Tensor, v: Tensor, forbidden: Tensor) -> Tensor:
    """Attend over [B, S, H, D] in float64; a query without keys receives zeros."""
    repeats = q.size(2) // k.size(2)
    q, k, v = q.double(), k.double().repeat_interleave(repeats, 2), v.double().repeat_interleave(repeats, 2)
    scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(WIDTH)
    weights = scores.masked_fill(forbidden, -1e30).softmax(-1).masked_fill(forbidden, 0.0)
    return torch.einsum("bhst,bthd->bshd", weights, v).float()


def _forbidden(total: int, causal: bool, key_mask: Tensor | None, separate: bool) -> Tensor:
    """Return [B or 1, 1, S, S]: which keys a query must not attend to."""
    position = torch.arange(total)
    forbidden = (position > position[:, None]) if causal else torch.zeros(total, total, dtype=torch.bool)
    if separate:
        document = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
        forbidden = forbidden | (document != document[:, None])
    forbidden = forbidden[None, None]
    return forbidden if key_mask is None else forbidden | ~key_mask[:, None, None]


def _trial(name: str, method: str | None, causal: bool, masked: bool = False) -> Callable[[Setting], Trial]:
    layout, index, total = LAYOUTS[name]

    def make(s: Setting) -> Trial:
        size = total(s.world)
        query_heads, key_heads = 2 * s.world + 2, s.world + 1
        generator = torch.Generator().manual_seed(3)
        shapes = [(2, size, n, WIDTH) for n in (query_heads, key_heads, key_heads)]
        wholes = [torch.randn(shape, generator=generator) for shape in shapes]
        key_mask = torch.arange(size).expand(2, -1) % 4 != 1 if masked else None
        places = index(size, s)
        forbidden = _forbidden(size, causal, key_mask, name == "packed")

        def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
            mask = None if key_mask is None else key_mask.to(s.device)
            with s.topology:
                return spar.attention(q, k, v, layout(s, size), causal=causal, mask=mask, method=method)

        def reference(inputs: list[Tensors]) -> list[Tensors]:
            q, k, v = (joined(parts, places, 1) for parts in zip(*inputs, strict=True))
            y = plain_attention(q, k, v, forbidden)
            return [[y.index_select(1, i)] for i in places]

        inputs = [[x.index_select(1, i) for x in wholes] for i in places]
        return Trial(inputs, run, reference, SUMMED, tolerance=TOLERANCE)

    return make


def attention_cases(world: int) -> list[Case]:
    cases = []
    for method in ("ulysses", "gather", "ring"):
        cases += [
            (method, _trial("even", method, causal=False)),
            (f"{method}, causal, zigzag", _trial("zigzag", method, causal=True)),
            (f"{method}, causal, packed", _trial("packed", method, causal=True)),
            (f"{method}, key mask", _trial("even", method, causal=False, masked=True)),
        ]
    if world > 1:  # a parallel state of one rank has no groups
        cases.append(("ring x ulysses, causal", _trial("hybrid", None, causal=True)))
    return [Case("attention", variant, make) for variant, make in cases]
