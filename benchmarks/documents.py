# SPDX-License-Identifier: Apache-2.0
"""A training step over packed documents, in layouts that cut each document or keep most of them whole."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import spar
from spar import SequenceLayout
from spar._commands.bench.measure import reduced

HEADS, WIDTH, LAYERS = 4, 64, 2
MEAN, SPREAD = 5.0, 1.2  # of the logarithms of lengths
WAYS: tuple[tuple[str, str | None], ...] = (
    ("packed", "ulysses"),
    ("packed", "gather"),
    ("packed", "ring"),
    ("balanced", None),
    ("balanced", "ring"),
)


def draw_lengths(tokens: int) -> list[int]:
    """Return log-normal lengths whose sum is a number of tokens."""
    random = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = int(torch.empty(1).log_normal_(MEAN, SPREAD, generator=random).item())
        lengths.append(min(max(1, drawn), left))
    return lengths


class Layers(nn.Module):
    """Attention with its projections."""

    def __init__(self) -> None:
        super().__init__()
        size = HEADS * WIDTH
        self.inner = nn.ModuleList(nn.Linear(size, 3 * size) for _ in range(LAYERS))
        self.outer = nn.ModuleList(nn.Linear(size, size) for _ in range(LAYERS))

    def forward(self, x: Tensor, layout: SequenceLayout, method: str | None) -> Tensor:
        for inner, outer in zip(self.inner, self.outer, strict=True):
            q, k, v = inner(x).unflatten(-1, (3 * HEADS, WIDTH)).chunk(3, 2)
            out = spar.attention(q, k, v, layout, causal=True, method=method)
            x = x + outer(out.flatten(2))
        return x


def steps(tokens: int) -> dict[str, Callable[[], float]]:
    """Return, for each way, a function that returns the slowest rank's seconds for a step."""
    lengths = draw_lengths(tokens)
    layouts = {"packed": SequenceLayout.packed(lengths), "balanced": SequenceLayout.balanced(lengths)}
    torch.manual_seed(0)
    model = Layers()
    whole = torch.randn(1, sum(lengths), HEADS * WIDTH)

    def step(name: str, method: str | None) -> float:
        layout = layouts[name]
        x = layout.shard(whole, 1)
        dist.barrier()
        begin = time.perf_counter()
        model(x, layout, method).square().mean().backward()
        spent = reduced(time.perf_counter() - begin)
        model.zero_grad()
        return spent

    def way(name: str, method: str | None) -> Callable[[], float]:
        return lambda: step(name, method)

    return {f"{name}, {method or 'default'}": way(name, method) for name, method in WAYS}
