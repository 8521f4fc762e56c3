# SPDX-License-Identifier: Apache-2.0
"""Random attentions, the same on all ranks by their seed, and what one process computes in float64."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import spar
from spar import SequenceLayout
from spar._attention import local, tiles

LIMITS = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}
Make = Callable[[Any], SequenceLayout]


@dataclass
class Case:
    """One attention.

    Attributes:
        layout: makes that of the queries of a group, or of a state of parallel groups if it is hybrid.
        keys: likewise of the keys, or "as queries"; None: each rank holds all.
        hybrid: whether the layout is.
        tensors: q, k, v and the gradient of the output, in float64, of the whole sequence.
        allowed: bool, broadcasts to [B, H, S, T]: which keys the mask, the window and all else leave.
        dtype: of the inputs; under autocast that of the computation, of float32.
        order: of the dims that the caller passes, among (batch, tokens, heads).
        recomputed: whether a checkpoint recomputes it, and whether a reentrant one.
        added: what a mask adds to the scores, or None.
        upper_lse: the gradient [B, S, H] of the log-sum-exp, if that is asked for.
        keywords: of `spar.attention`.
        parts: names of what the case has, for its message.
    """

    layout: Make
    tensors: list[Tensor]
    allowed: Tensor
    dtype: torch.dtype
    tile: int
    keys: Make | str | None = "as queries"
    hybrid: bool = False
    autocast: bool = False
    order: tuple[int, ...] = (0, 1, 2)
    recomputed: bool = False
    reentrant: bool = False
    added: Tensor | None = None
    sinks: Tensor | None = None
    upper_lse: Tensor | None = None
    keywords: dict[str, Any] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)


def _layout_of(kind: str, total: int, draw: random.Random, world: int) -> tuple[Make, Tensor | None]:
    """Return what makes a layout, and the document of each token."""
    cuts = sorted(draw.randint(0, total) for _ in range(world - 1))
    sizes = tuple(b - a for a, b in itertools.pairwise([0, *cuts, total]))
    cuts = sorted(draw.randint(0, total) for _ in range(draw.randint(0, 4)))
    lengths = [b - a for a, b in itertools.pairwise([0, *cuts, total])]
    make: dict[str, Make] = {
        "even": lambda group: SequenceLayout.even(total, group),
        "zigzag": lambda group: SequenceLayout.zigzag(total, group),
        "packed": lambda group: SequenceLayout.packed(lengths, group),
        "balanced": lambda group: SequenceLayout.balanced(lengths, group),
        "local": lambda group: SequenceLayout("local", sizes, group),
        "hybrid": lambda state: SequenceLayout.hybrid(total, state),
    }
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return make[kind], owner if kind in ("packed", "balanced") else None


def make_case(
    seed: int, world: int, hybrid: bool = False, methods: Sequence[str] = ("ulysses", "gather", "ring")
) -> Case:
    """Draw a case. hybrid: whether there is a state of parallel groups, for hybrid layouts."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    batch, total = draw.choice([1, 2, 3]), draw.choice([1, 2, 7, 19, 40, 61])
    key_heads = draw.choice([1, 2, 3])
    heads = key_heads * draw.choice([1, 2, 4])
    width = draw.choice([4, 8])
    value_width = draw.choice([width, width, 3])
    method = draw.choice(methods)
    kind = draw.choice(["even", "zigzag", "packed", "balanced", "local", *["hybrid"] * 3 * hybrid])
    parts = [kind]
    layout, owner = _layout_of(kind, total, draw, world)
    # ---- the keys ----
    keys: Make | str | None = "as queries"
    total_keys = total
    if draw.random() < 0.25 and owner is None and method != "ring" and kind != "hybrid":
        total_keys = draw.choice([total, total, 5, 33])
        if draw.random() < 0.4:
            keys, method = None, "gather"
        else:
            other = draw.choice(["even", "zigzag", "local"])
            keys = _layout_of(other, total_keys, draw, world)[0]
            parts.append(f"keys {other}")
        parts.append(f"{total_keys} keys {'whole' if keys is None else ''}")
    shapes = [(batch, total, heads, width), (batch, total_keys, key_heads, width)]
    shapes += [(batch, total_keys, key_heads, value_width), (batch, total, heads, value_width)]
    query, key = torch.arange(total)[:, None], torch.arange(total_keys)
    allowed = torch.ones(1, 1, total, total_keys, dtype=torch.bool)
    if owner is not None:
        allowed = allowed & (owner[:, None] == owner)
    tensors = [normal(*shape) for shape in shapes]
    case = Case(layout, tensors, allowed, torch.float64, draw.choice([2, 5, 16, 256]), keys, kind == "hybrid")
    case.dtype = draw.choices(list(LIMITS), (4, 4, 1, 1))[0]
    case.parts = parts
    case.keywords["method"] = None if case.hybrid and draw.random() < 0.7 else method

    def note(part: str) -> None:
        case.parts.append(part)

    # ---- what leaves keys ----
    if draw.random() < 0.5:
        note("causal")
        case.keywords["causal"] = True
        case.allowed = case.allowed & (key <= query)
    if draw.random() < 0.4 and total_keys == total:
        left, right = (draw.choice([None, 0, 1, 5, 30]) for _ in range(2))
        note(f"window {left, right}")
        case.keywords["window"] = left, right
        near = (query - key <= (total if left is None else left)) & (
            key - query <= (total if right is None else right)
        )
        case.allowed = case.allowed & near
    kinds = ["none", "none", "spans", "function", "tensor", "added"]
    mask = draw.choice([*kinds, *["padding", "documents", "prefix"] * (total_keys == total)])
    if mask != "none":
        note(mask)
        sizes = batch, heads, total, total_keys
        case.keywords["mask"], more, case.added = _mask(mask, draw, generator, sizes)
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
    changed = case.sinks is not None or {"softcap", "bias"} & case.keywords.keys()
    if draw.random() < 0.3 and not changed and case.keywords["method"] in ("ulysses", "gather"):
        # Torch's kernels for dropout compute it, and drop nothing.
        note("dropout")
        case.keywords["dropout_p"] = 1e-13
    # ---- how it is called ----
    if draw.random() < 0.3:
        case.order = draw.choice(list(itertools.permutations(range(3))))
        note(f"order {case.order}")
        case.keywords |= {"seq_dim": case.order.index(1), "head_dim": case.order.index(2)}
    if draw.random() < 0.2:
        case.recomputed, case.reentrant = True, draw.random() < 0.5
        note("reentrant checkpoint" if case.reentrant else "checkpoint")
    if case.dtype in (torch.bfloat16, torch.float16) and draw.random() < 0.4:
        case.autocast = True
        note("autocast")
    if draw.random() < 0.3 and "dropout_p" not in case.keywords:
        note("lse")
        case.upper_lse = normal(batch, total, heads)
        case.keywords["return_lse"] = True
    return case


def _mask(
    kind: str, draw: random.Random, generator: torch.Generator, sizes: tuple[int, int, int, int]
) -> tuple[Any, Tensor, Tensor | None]:
    """Return a mask, the booleans [B, H, S, T] that it stands for, and what it adds to the scores."""
    batch, heads, total, keys = sizes
    key, query = torch.arange(keys), torch.arange(total)[:, None]
    if kind == "tensor":
        full = (
            torch.rand(draw.choice([1, batch]), draw.choice([1, heads]), total, keys, generator=generator)
            > 0.4
        )
        return full, full, None
    if kind == "added":
        values = torch.randn(
            1, draw.choice([1, heads]), total, keys, generator=generator, dtype=torch.float64
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
    several = torch.rand(batch, heads, total, keys, generator=generator) > draw.choice([0.1, 0.5, 0.97])
    if kind == "function":
        return spar.Spans.of(lambda b, h, q, k: several[b, h, q, k], several.shape), several, None
    ends = torch.randint(
        0, keys + 1, (draw.choice([1, batch]), draw.choice([1, heads]), total, 4), generator=generator
    )
    spans = spar.Spans(ends.to(torch.int32), keys)
    allowed = (key >= ends[..., 0:1]) & (key < ends[..., 1:2]) | (key >= ends[..., 2:3]) & (
        key < ends[..., 3:4]
    )
    return spans, allowed, None


def whole(case: Case) -> list[Tensor]:
    """Return the output, the gradients of q, k, v, and of sinks, and the log-sum-exp, in one process."""
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
    lse = scores.masked_fill(dead, 0.0).logsumexp(3).masked_fill(dead[..., 0], -torch.inf).transpose(1, 2)
    if case.upper_lse is None:
        return [y.detach(), *torch.autograd.grad(y, leaves, upper)]
    found = torch.autograd.grad([y, lse], leaves, [upper, case.upper_lse])
    return [y.detach(), *found, lse.detach()]


def error_of_rank(case: Case, group: dist.ProcessGroup, expected: list[Tensor], state: Any = None) -> float:
    """Return the largest error of this rank's output and gradients, relative to the largest value.

    state: of the parallel groups, for hybrid layouts; the group is then that of all its ranks.
    """
    layout = case.layout(state if case.hybrid else group)
    keys = layout if isinstance(case.keys, str) else case.keys and case.keys(group)
    queries = layout.index()
    own = [queries, *[slice(None) if keys is None else keys.index()] * 2, queries]
    inputs = torch.float32 if case.autocast else case.dtype
    given = [
        x[:, index].permute(*case.order, 3).to(inputs) for x, index in zip(case.tensors, own, strict=True)
    ]
    *leaves, upper = [x.contiguous() for x in given]
    if case.autocast:
        # As models leave them: some in 16 bits already, and a gradient of the output's dtype.
        leaves[2], upper = leaves[2].to(case.dtype), upper.to(case.dtype)
    keywords = dict(case.keywords)
    if case.added is not None:
        keywords["mask"] = case.added.to(inputs)
    if case.sinks is not None:
        leaves.append(case.sinks.to(inputs))
    for leaf in leaves:
        leaf.requires_grad_()

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Any:
        return spar.attention(q, k, v, layout if keys is layout else (layout, keys), sinks=sinks, **keywords)

    context = torch.autocast("cpu", case.dtype) if case.autocast else contextlib.nullcontext()
    with mock.patch.object(tiles, "TILE", case.tile), mock.patch.object(local, "MOST_KEYS", 7):
        with context:
            if case.recomputed:
                outs = checkpoint(attend, *leaves, use_reentrant=case.reentrant)
            else:
                outs = attend(*leaves)
        y, uppers = outs, [upper]
        if case.upper_lse is not None:
            y = outs[0]
            assert outs[1].is_contiguous() and outs[1].shape == y.shape[:3]
            uppers.append(case.upper_lse[:, queries].permute(case.order).to(outs[1].dtype))
        assert y.dtype == case.dtype and y.is_contiguous()
        torch.autograd.backward(outs, uppers)
    back = [*torch.tensor(case.order).argsort().tolist(), 3]
    found = [y.detach().permute(back)]
    for leaf in leaves:
        assert leaf.grad is not None
        found.append(leaf.grad if leaf.dim() == 1 else leaf.grad.permute(back))
    parts = [x[:, index] for x, index in zip(expected[:4], [queries, *own[:3]], strict=True)]
    if keys is None:
        found[2], found[3] = found[2].contiguous(), found[3].contiguous()
    if case.sinks is not None:
        parts.append(expected[4])
    # Gradients of what every rank holds are parts of a sum.
    for x in (*(found[2:4] if keys is None else ()), *found[4:]):
        dist.all_reduce(x, group=group)
    if case.upper_lse is not None:
        lse, right = outs[1].detach().permute(back[:3]), expected[-1][:, queries]
        assert (lse == -torch.inf).equal(right == -torch.inf)
        found.append(lse.nan_to_num(neginf=0.0))
        parts.append(right.nan_to_num(neginf=0.0))
    errors = [
        float((x.double() - e).abs().max() / max(1.0, float(e.abs().max())))
        for x, e in zip(found, parts, strict=True)
        if x.numel()
    ]
    assert not any(math.isnan(error) for error in errors)
    return max(errors, default=0.0)
