# SPDX-License-Identifier: Apache-2.0
"""Random attentions, the same on all ranks by their seed, and what one process computes in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import spar
from spar import SequenceLayout
from spar._attention import methods, tiles

LIMITS = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 6e-2}


@dataclass
class Case:
    """One attention.

    Attributes:
        layout: makes it of a group.
        tensors: q, k, v and the gradient of the output, in float64, of the whole sequence.
        allowed: bool, broadcasts to [B, H, S, T]: which keys the mask, the window and all else leave.
        added: what a mask adds to the scores, or None.
        keywords: of `spar.attention`.
        parts: names of what the case has, for its message.
    """

    layout: Callable[[dist.ProcessGroup], SequenceLayout]
    tensors: list[Tensor]
    allowed: Tensor
    dtype: torch.dtype
    tile: int
    added: Tensor | None = None
    sinks: Tensor | None = None
    keywords: dict[str, Any] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)


def make_case(seed: int, world: int) -> Case:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    batch, total = draw.choice([1, 2, 3]), draw.choice([1, 2, 7, 19, 40, 61])
    key_heads = draw.choice([1, 2, 3])
    heads = key_heads * draw.choice([1, 2, 4])
    width = draw.choice([4, 8])
    value_width = draw.choice([width, width, 3])
    shapes = (heads, width), (key_heads, width), (key_heads, value_width), (heads, value_width)
    tensors = [normal(batch, total, *shape) for shape in shapes]
    query, key = torch.arange(total)[:, None], torch.arange(total)
    allowed = torch.ones(1, 1, total, total, dtype=torch.bool)
    case = Case(SequenceLayout.even, tensors, allowed, torch.float64, draw.choice([2, 5, 16, 256]))
    case.dtype = draw.choices(list(LIMITS), (4, 4, 1))[0]
    case.keywords["method"] = draw.choice(["ulysses", "gather", "ring"])

    def note(part: str) -> None:
        case.parts.append(part)

    # ---- the layout ----
    kind = draw.choice(["even", "zigzag", "packed", "local"])
    note(kind)
    case.layout = lambda group: SequenceLayout.even(total, group)
    if kind == "zigzag":
        case.layout = lambda group: SequenceLayout.zigzag(total, group)
    elif kind == "packed":
        cuts = sorted(draw.randint(0, total) for _ in range(draw.randint(0, 4)))
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
        case.layout = lambda group: SequenceLayout.packed(lengths, group)
        owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        case.allowed = case.allowed & (owner[:, None] == owner)
    elif kind == "local":
        cuts = sorted(draw.randint(0, total) for _ in range(world - 1))
        sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
        case.layout = lambda group: SequenceLayout("local", sizes, group)
    # ---- what leaves keys ----
    if draw.random() < 0.5:
        note("causal")
        case.keywords["causal"] = True
        case.allowed = case.allowed & (key <= query)
    if draw.random() < 0.4:
        left, right = (draw.choice([None, 0, 1, 5, 30]) for _ in range(2))
        note(f"window {left, right}")
        case.keywords["window"] = left, right
        near = (query - key <= (total if left is None else left)) & (
            key - query <= (total if right is None else right)
        )
        case.allowed = case.allowed & near
    mask = draw.choice(
        ["none", "none", "spans", "function", "padding", "documents", "prefix", "tensor", "added"]
    )
    if mask != "none":
        note(mask)
        case.keywords["mask"], more, case.added = _mask(mask, draw, generator, batch, heads, total)
        case.allowed = case.allowed & more
    # ---- what changes scores ----
    if draw.random() < 0.3:
        note("sinks")
        case.sinks = normal(heads)
    if draw.random() < 0.3:
        note("softcap")
        case.keywords["softcap"] = draw.choice([0.7, 5.0])
    if draw.random() < 0.2:
        note("bias")
        slopes = torch.rand(heads, generator=generator, dtype=torch.float64)
        case.keywords["bias"] = lambda b, h, q, k: slopes[h] * (k - q) + 0.1 * b
    if draw.random() < 0.3:
        case.keywords["scale"] = 0.3
    return case


def _mask(
    kind: str, draw: random.Random, generator: torch.Generator, batch: int, heads: int, total: int
) -> tuple[Any, Tensor, Tensor | None]:
    """Return a mask, the booleans [B, H, S, T] that it stands for, and what it adds to the scores."""
    key, query = torch.arange(total), torch.arange(total)[:, None]
    if kind == "tensor":
        full = (
            torch.rand(draw.choice([1, batch]), draw.choice([1, heads]), total, total, generator=generator)
            > 0.4
        )
        return full, full, None
    if kind == "added":
        values = torch.randn(
            1, draw.choice([1, heads]), total, total, generator=generator, dtype=torch.float64
        )
        return values, torch.tensor(True), values
    if kind == "padding":
        valid = torch.rand(batch, total, generator=generator) > 0.3
        if draw.random() < 0.5:
            starts = torch.randint(0, total + 1, (batch, 1), generator=generator)
            valid = key >= starts
        return spar.Spans.padding(valid), valid[:, None, None], None
    if kind == "documents":
        ids = torch.randint(0, 4, (batch, total), generator=generator).sort(1)[0]
        return spar.Spans.documents(ids), (ids[:, :, None] == ids[:, None])[:, None], None
    if kind == "prefix":
        size = draw.randint(0, total)
        spans = spar.Spans.causal(total) & (spar.Spans.window(total, 3, 0) | spar.Spans.prefix(total, size))
        return spans, ((key <= query) & ((query - key <= 3) | (key < size)))[None, None], None
    several = torch.rand(batch, heads, total, total, generator=generator) > draw.choice([0.1, 0.5, 0.97])
    if kind == "function":
        return spar.Spans.of(lambda b, h, q, k: several[b, h, q, k], several.shape), several, None
    ends = torch.randint(
        0, total + 1, (draw.choice([1, batch]), draw.choice([1, heads]), total, 4), generator=generator
    )
    spans = spar.Spans(ends.to(torch.int32))
    allowed = (key >= ends[..., 0:1]) & (key < ends[..., 1:2]) | (key >= ends[..., 2:3]) & (
        key < ends[..., 3:4]
    )
    return spans, allowed, None


def whole(case: Case) -> list[Tensor]:
    """Return the output and the gradients of q, k, v, and of sinks, of one process in float64."""
    *leaves, upper = (x.clone() for x in case.tensors)
    if case.sinks is not None:
        leaves.append(case.sinks.clone())
    for leaf in leaves:
        leaf.requires_grad_()
    q, k, v = leaves[:3]
    group = q.size(2) // k.size(2)
    scores = torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(group, 2))
    scores = scores * case.keywords.get("scale", 1 / math.sqrt(q.size(3)))
    if softcap := case.keywords.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    if case.added is not None:
        scores = scores + case.added
    if bias := case.keywords.get("bias"):
        b, h, s, t = (torch.arange(size) for size in scores.shape)
        scores = scores + bias(b[:, None, None, None], h[:, None, None], s[:, None], t)
    scores = scores.masked_fill(~case.allowed, -torch.inf)
    if case.sinks is not None:
        scores = torch.cat([scores, leaves[3][None, :, None, None].expand(*scores.shape[:3], 1)], 3)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    values = v.repeat_interleave(group, 2)
    y = torch.einsum("bhst,bthd->bshd", weights[..., : v.size(1)], values)
    return [y.detach(), *torch.autograd.grad(y, leaves, upper)]


def error_of_rank(case: Case, group: dist.ProcessGroup, expected: list[Tensor]) -> float:
    """Return the largest error of this rank's output and gradients, relative to the largest value."""
    layout = case.layout(group)
    own = layout.index()
    *leaves, upper = (x[:, own].to(case.dtype) for x in case.tensors)
    keywords = dict(case.keywords)
    if case.added is not None:
        keywords["mask"] = case.added.to(case.dtype)
    if case.sinks is not None:
        leaves.append(case.sinks.to(case.dtype))
    for leaf in leaves:
        leaf.requires_grad_()
    if case.sinks is not None:
        keywords["sinks"] = leaves[3]
    with mock.patch.object(tiles, "TILE", case.tile), mock.patch.object(methods, "MOST_KEYS", 7):
        y = spar.attention(*leaves[:3], layout, **keywords)
        found = [y.detach(), *torch.autograd.grad(y, leaves, upper)]
    parts = [x[:, own] for x in expected[:4]]
    if case.sinks is not None:
        dist.all_reduce(found[4], group=group)
        parts.append(expected[4])
    errors = [
        float((x.double() - e).abs().max() / max(1.0, float(e.abs().max())))
        for x, e in zip(found, parts, strict=True)
        if x.numel()
    ]
    return max(errors, default=0.0)
