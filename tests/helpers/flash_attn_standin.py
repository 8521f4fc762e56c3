# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for flash attention on GPUs, of the package flash_attn and of aten, computed with torch.

Tensors are [B, S, H, D], the log-sum-exp [B, H, S] in float32. A causal mask is aligned to the last query and
key. As the real functions, they refuse other dtypes and layouts, and write the gradients to given tensors.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

CALLS: list[str] = []


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int, cap: float) -> Tensor:
    q, k = (x.float().transpose(1, 2) for x in (q, k))
    scores = q @ k.repeat_interleave(q.size(1) // k.size(1), 1).transpose(-1, -2) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    rows, columns = scores.shape[-2:]
    ahead = torch.arange(columns) - torch.arange(rows)[:, None] - (columns - rows)
    if left >= 0:
        scores = scores.masked_fill(ahead < -left, -torch.inf)
    if right >= 0:
        scores = scores.masked_fill(ahead > right, -torch.inf)
    if left >= 0 or right >= 0:
        CALLS.append("window")
    # It returns inf as the log-sum-exp of a query without keys, which spar does not handle.
    assert causal or bool((scores > -torch.inf).any(-1).all())
    if causal:
        rows, columns = scores.shape[-2:]
        allowed = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores


def _wide(x: Tensor, heads: int) -> Tensor:
    return x.float().transpose(1, 2).repeat_interleave(heads // x.size(2), 1)


def _check(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.dtype in (torch.float16, torch.bfloat16), x.dtype
        assert x.dim() == 4 and x.stride(-1) == 1 and x.size(3) % 8 == 0 and x.size(3) <= 256


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(q, k, v)
    assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
    CALLS.append("forward")
    scores = _scores(q, k, softmax_scale, causal, window_size_left, window_size_right, softcap)
    out = (scores.softmax(-1) @ _wide(v, q.size(2))).transpose(1, 2).to(q.dtype)
    return out, scores.logsumexp(-1), q.new_empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    assert dq is not None and dk is not None and dv is not None
    _check(dout, q, k, v, out, dq, dk, dv)
    assert softmax_lse.is_contiguous() and softmax_lse.dtype == torch.float32
    assert (dropout_p, alibi_slopes) == (0.0, None)
    CALLS.append("backward")
    heads = q.size(2)
    scores = _scores(q, k, softmax_scale, causal, window_size_left, window_size_right, softcap)
    weights = torch.exp(scores - softmax_lse[..., None])
    upper, wide = dout.float().transpose(1, 2), _wide(v, heads)
    softmax_d = (upper * out.float().transpose(1, 2)).sum(-1)
    inner = weights * (upper @ wide.transpose(-1, -2) - softmax_d[..., None]) * softmax_scale
    if softcap:
        inner = inner * (1 - (scores / softcap).masked_fill(weights == 0, 0.0).square())

    def summed(x: Tensor) -> Tensor:
        return x.unflatten(1, (k.size(2), -1)).sum(2).transpose(1, 2)

    dq.copy_((inner @ _wide(k, heads)).transpose(1, 2))
    dk.copy_(summed(inner.transpose(-1, -2) @ q.float().transpose(1, 2)))
    dv.copy_(summed(weights.transpose(-1, -2) @ upper))
    return softmax_d


def aten_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, causal: bool, debug: bool, *, scale: float
) -> tuple[Tensor, ...]:
    """As aten's _scaled_dot_product_flash_attention, of [B, H, S, D], without its other results."""
    CALLS.append("aten forward")
    assert not dropout_p and not debug and (not causal or q.size(2) == k.size(2))
    tensors = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse, *_ = _flash_attn_forward(*tensors, 0.0, scale, causal, -1, -1, 0.0, None, False)
    return out.transpose(1, 2), lse


def aten_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ends_q: None,
    ends_k: None,
    most_q: int,
    most_k: int,
    dropout_p: float,
    causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float,
) -> list[Tensor]:
    """As aten's backward, whose kernel reads a log-sum-exp as if it were contiguous, whatever its strides."""
    CALLS.append("aten backward")
    assert (most_q, most_k, dropout_p) == (q.size(2), k.size(2), 0.0)
    lse = lse.as_strided(lse.shape, (lse.size(1) * lse.size(2), lse.size(2), 1))
    tensors = [x.transpose(1, 2) for x in (grad, q, k, v, out)]
    gradients = [torch.empty_like(x) for x in tensors[1:4]]
    _flash_attn_backward(*tensors, lse, *gradients, 0.0, scale, causal, -1, -1, 0.0, None, False)
    return [x.transpose(1, 2) for x in gradients]


def cudnn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: None,
    with_lse: bool,
    dropout_p: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """As aten's _scaled_dot_product_cudnn_attention, of [B, H, S, D], without its other results."""
    CALLS.append("cudnn forward")
    assert bias is None and with_lse and not dropout_p and not debug and min(q.size(2), k.size(2)) > 1
    assert not causal or q.size(2) == k.size(2)
    tensors = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse, *_ = _flash_attn_forward(*tensors, 0.0, scale, causal, -1, -1, 0.0, None, False)
    return out.transpose(1, 2), lse[..., None].contiguous()


def cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    bias: None,
    ends_q: None,
    ends_k: None,
    most_q: int,
    most_k: int,
    dropout_p: float,
    causal: bool,
    *,
    scale: float,
) -> list[Tensor]:
    """As aten's backward, which reads the log-sum-exp as a contiguous [B, H, S, 1]."""
    CALLS.append("cudnn backward")
    assert (
        bias is None
        and (most_q, most_k, dropout_p) == (q.size(2), k.size(2), 0.0)
        and min(most_q, most_k) > 1
    )
    assert lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
    tensors = [x.transpose(1, 2) for x in (grad, q, k, v, out)]
    gradients = [torch.empty_like(x) for x in tensors[1:4]]
    _flash_attn_backward(*tensors, lse[..., 0], *gradients, 0.0, scale, causal, -1, -1, 0.0, None, False)
    return [x.transpose(1, 2) for x in gradients]


@contextmanager
def installed(version: str = "2.8.3") -> Iterator[None]:
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    package.__version__ = version  # type: ignore[attr-defined]
    for function in (_flash_attn_forward, _flash_attn_backward):
        setattr(interface, function.__name__, function)
    modules = {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
    with mock.patch.dict(sys.modules, modules):
        yield
