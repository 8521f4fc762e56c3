# SPDX-License-Identifier: Apache-2.0
"""CPU kernels of aten's _flash_attention_forward and _flash_attention_backward, which have none.

They compute by definition in float32: queries and keys [B, S, H, D], or with `cum_seq` parts of [S, H, D]. As
the real ones they refuse other dtypes and layouts, align windows to the last query and key of a part, return
inf as the log-sum-exp of a query without keys, and read one as if it were contiguous. torch differentiates
the forward by the backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from helpers import flash_attn_standin
from spar._attention.kernels import KERNELS
from spar._attention.kernels.aten import FlashCuda


class Called(NamedTuple):
    """A call: of which op, with how many parts that have queries and keys, and with which window."""

    op: str
    parts: int
    window: tuple[int, int]


CALLS: list[Called] = []


def _ranges(
    op: str,
    q: Tensor,
    k: Tensor,
    ends: tuple[Tensor | None, Tensor | None],
    most: tuple[int, int],
    causal: bool,
    options: dict[str, Any],
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Check a call, and return each part's queries, keys, and which of them attend, [queries, keys]."""
    for x in (q, k):
        assert x.dtype in (torch.float16, torch.bfloat16), x.dtype
        assert x.stride(-1) == 1 and x.size(-1) % 8 == 0 and x.size(-1) <= 256
    assert q.size(-2) % k.size(-2) == 0
    bounds = []
    for x, end, number in zip((q, k), ends, most, strict=True):
        if end is None:
            assert x.dim() == 4 and number == x.size(1)
            bounds.append([0, x.size(1)])
            continue
        assert x.dim() == 3 and end.dtype == torch.int32 and end.dim() == 1 and end.is_contiguous()
        assert not end.is_inference()
        sizes = end.diff()
        assert int(end[0]) == 0 and int(end[-1]) == x.size(0) and int(sizes.min()) >= 0
        assert int(sizes.max()) == number or (x is q and number == 2 > int(sizes.max()))
        bounds.append(end.tolist())
    assert len(bounds[0]) == len(bounds[1])
    left, right = options["window_size_left"], options["window_size_right"]
    assert min(left, right) >= -1
    flash_attn_standin.CALLS.append(f"varlen {op}")
    CALLS.append(
        Called(op, len([1 for s, t in zip(*map(_sizes, bounds), strict=True) if s and t]), (left, right))
    )
    right = 0 if causal else right
    left, right = (2**30 if side < 0 else side for side in (left, right))
    for (begin, end), (first, last) in zip(*map(itertools.pairwise, bounds), strict=True):
        ahead = torch.arange(first - last, 0) - torch.arange(begin - end, 0)[:, None]
        yield slice(begin, end), slice(first, last), (ahead >= -left) & (ahead <= right)


def _sizes(ends: list[int]) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(ends)]


def _by_head(x: Tensor, heads: int) -> Tensor:
    x = x.float().transpose(-3, -2)
    return x.repeat_interleave(heads // x.size(-3), -3)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
    most_q: int,
    most_k: int,
    dropout_p: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
    **options: Any,
) -> tuple[Tensor, ...]:
    assert not dropout_p and not debug and k.shape == v.shape
    heads, batch = q.size(-2), q.shape[:-3]
    out, lse = (
        torch.full_like(q, torch.nan),
        q.new_full((*batch, heads, q.size(-3)), torch.nan, dtype=torch.float),
    )
    for queries, keys, allowed in _ranges(
        "forward", q, k, (ends_q, ends_k), (most_q, most_k), causal, options
    ):
        of_q, of_k, of_v = _by_head(q, heads)[..., queries, :], _by_head(k, heads), _by_head(v, heads)
        scores = (of_q @ of_k[..., keys, :].transpose(-1, -2) * scale).masked_fill(~allowed, -torch.inf)
        empty = ~allowed.any(1)
        weights = scores.masked_fill(empty[:, None], 0.0).softmax(-1).masked_fill(empty[:, None], 0.0)
        out[..., queries, :, :] = (weights @ of_v[..., keys, :]).transpose(-3, -2).to(q.dtype)
        lse[..., queries] = scores.logsumexp(-1).masked_fill(empty, torch.inf)
    none = torch.empty(2, dtype=torch.uint64)
    return out, lse, none, torch.empty((), dtype=torch.uint64), q.new_empty(0)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
    most_q: int,
    most_k: int,
    dropout_p: float,
    causal: bool,
    state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    **options: Any,
) -> tuple[Tensor, ...]:
    assert not dropout_p and grad.dtype == out.dtype == q.dtype and lse.dtype == torch.float32
    heads, key_heads = q.size(-2), k.size(-2)
    lse = lse.as_strided(lse.shape, torch.empty(lse.shape).stride())
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))

    def summed(x: Tensor) -> Tensor:
        return x.unflatten(-3, (key_heads, -1)).sum(-3).transpose(-3, -2).to(q.dtype)

    for queries, keys, allowed in _ranges(
        "backward", q, k, (ends_q, ends_k), (most_q, most_k), causal, options
    ):
        of_q, upper, of_out = (_by_head(x, heads)[..., queries, :] for x in (q, grad, out))
        of_k, of_v = (_by_head(x, heads)[..., keys, :] for x in (k, v))
        weights = torch.exp(of_q @ of_k.transpose(-1, -2) * scale - lse[..., queries, None])
        weights = weights.masked_fill(~allowed, 0.0)
        inner = weights * (upper @ of_v.transpose(-1, -2) - (upper * of_out).sum(-1, keepdim=True)) * scale
        dq[..., queries, :, :] = (inner @ of_k).transpose(-3, -2).to(q.dtype)
        dk[..., keys, :, :] = summed(inner.transpose(-1, -2) @ of_q)
        dv[..., keys, :, :] = summed(weights.transpose(-1, -2) @ upper)
    return dq, dk, dv


@contextmanager
def registered() -> Iterator[None]:
    """Let the ops compute CPU tensors."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    CALLS.clear()
    flash_attn_standin.CALLS.clear()
    yield
    library._destroy()


@contextmanager
def installed() -> Iterator[None]:
    """Let CPU tensors reach the kernel "flash" of GPUs."""
    ops = {
        "_scaled_dot_product_flash_attention": flash_attn_standin.aten_forward,
        "_scaled_dot_product_flash_attention_backward": flash_attn_standin.aten_backward,
    }
    with (
        registered(),
        mock.patch.dict(KERNELS["cpu"], flash=FlashCuda()),
        mock.patch("torch.cuda.get_device_capability", lambda device: (8, 0)),
        mock.patch.multiple(torch.ops.aten, create=True, **ops),
    ):
        yield
