# SPDX-License-Identifier: Apache-2.0
"""torch's flex_attention, compiled: blocks with masks on a GPU, without their scores in memory.

It has no backward that takes the log-sum-exp of all blocks. So backward computes the block again, and
differentiates both its output and its log-sum-exp. Not verified on hardware: tested over a stand-in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kernel import NO_WINDOW, BlockInputs, Gradients, Needs, accumulated, finite

_ON_A_CPU = "torch's flex_attention has no gradients on a CPU, and no log-sum-exp if compiled for one"


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


class Flex:
    def refuses(self, q: Tensor, v: Tensor, needs: Needs) -> str:
        if q.is_cpu:
            return _ON_A_CPU
        if q.dtype == torch.float64:
            return f"its log-sum-exp is in float32, and the tensors are {q.dtype}"
        if torch.compiler.is_compiling():
            return "it cannot be inside compiled code"
        return NO_WINDOW if needs.window else ""

    def forward(self, block: BlockInputs) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return _attend(block)

    def backward(self, block: BlockInputs, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        kind = accumulated(block.q.dtype)
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in block[:3]]
            out_of_block, lse_of_block = _attend(block._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
        # out is the sum over blocks of exp(lse_of_block - lse) * out_of_block, and so on for lse.
        weight = torch.exp(lse_of_block.detach() - finite(lse))
        inner = (grad.to(kind) * (out_of_block.detach().to(kind) - out.to(kind))).sum(-1)
        upper = (grad * weight[..., None]).to(out_of_block.dtype), weight * inner
        dq, dk, dv = torch.autograd.grad((out_of_block, lse_of_block), leaves, upper)
        return dq, dk, dv


def _attend(block: BlockInputs) -> tuple[Tensor, Tensor]:
    q, k, v, causal, mask, scale, softcap, *_ = block
    change = None if mask is None else _added(mask)
    if causal:
        change = _causal
    if softcap:
        change = _capped(softcap, change)
    outputs: tuple[Tensor, Tensor] = _compiled()(
        q, k, v, score_mod=change, scale=scale, enable_gqa=q.size(1) != k.size(1), return_lse=True
    )
    return outputs


def _causal(score: Any, b: Any, h: Any, query: Any, key: Any) -> Any:
    return torch.where(query >= key, score, -torch.inf)


def _capped(softcap: float, then: Callable[..., Any] | None) -> Callable[..., Any]:
    def change(score: Any, b: Any, h: Any, query: Any, key: Any) -> Any:
        score = softcap * torch.tanh(score / softcap)
        return score if then is None else then(score, b, h, query, key)

    return change


def _added(mask: Tensor) -> Callable[..., Any]:
    """Return a function that adds a mask, of which dims of size 1 broadcast, to a score."""
    wide = [int(size > 1) for size in mask.shape]

    def change(score: Any, b: Any, h: Any, query: Any, key: Any) -> Any:
        return score + mask[b * wide[0], h * wide[1], query * wide[2], key * wide[3]]

    return change
