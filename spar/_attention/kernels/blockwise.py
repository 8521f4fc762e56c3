# SPDX-License-Identifier: Apache-2.0
"""Matrix products in torch, some queries at a time: any device, dtype and mask."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernel import NO_SPANS, NO_WINDOW, BlockInputs, Gradients, Kernel, Needs, accumulated, finite

# So many scores at a time at most, unless one query alone has more. On a CPU they should stay in its cache.
_SCORES = 1 << 24
_SCORES_OF_CPU = 1 << 20


class Blockwise(Kernel):
    takes_no_width = True

    def refuses(self, q: Tensor, v: Tensor, needs: Needs) -> str:
        if needs.window:
            return NO_WINDOW
        return NO_SPANS if needs.spans else ""

    def suits(self, q: Tensor, v: Tensor, needs: Needs) -> bool:
        """Whether it is as fast as a compiled kernel: always on a CPU, else if all scores fit at once."""
        return q.is_cpu or q.shape[:3].numel() * v.size(2) <= _SCORES

    def forward(self, block: BlockInputs) -> tuple[Tensor, Tensor]:
        block = _grouped(block)
        outs, sums = [], []
        for begin, size in _runs(block):
            scores, _ = _scores(block, begin, size)
            most = finite(scores.amax(-1, keepdim=True))
            weights = torch.exp(scores - most)
            total = weights.sum(-1, keepdim=True)
            # Not exp(scores - lse): a log-sum-exp of 1,000 is rounded by 3e-5. The weights must sum to 1, or
            # backward, which subtracts grad * out from nearly equal products, magnifies the difference.
            outs.append((weights @ block.v) / total.masked_fill(total == 0, 1.0))
            sums.append((most + total.log()).squeeze(-1))
        return torch.cat(outs, 3).flatten(1, 2), torch.cat(sums, 3).flatten(1, 2)

    def backward(self, block: BlockInputs, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        block, heads = _grouped(block), block.k.size(1)
        grad, out = (x.to(block.q.dtype).unflatten(1, (heads, -1)) for x in (grad, out))
        lse, row_sum = lse.unflatten(1, (heads, -1)), (grad * out).sum(-1, keepdim=True)
        dqs, dk, dv = [], torch.zeros_like(block.k), torch.zeros_like(block.v)
        for begin, size in _runs(block):
            q, upper = block.q.narrow(3, begin, size), grad.narrow(3, begin, size)
            scores, slope = _scores(block, begin, size)
            weights = torch.exp(scores - lse.narrow(3, begin, size)[..., None])
            dv = dv + (weights.transpose(-1, -2) @ upper).sum(2, keepdim=True)
            inner = upper @ block.v.transpose(-1, -2) - row_sum.narrow(3, begin, size)
            inner = weights * inner * block.scale
            if slope is not None:
                inner = inner * slope
            dqs.append(inner @ block.k)
            dk = dk + (inner.transpose(-1, -2) @ q).sum(2, keepdim=True)
        return torch.cat(dqs, 3).flatten(1, 2), dk.squeeze(2), dv.squeeze(2)


def _grouped(block: BlockInputs) -> BlockInputs:
    """Return q as [B, K, H / K, S, D], and k and v as [B, K, 1, T, ..], in the dtype of the sums."""
    kind = accumulated(block.q.dtype)
    q = block.q.to(kind).unflatten(1, (block.k.size(1), -1))
    return block._replace(q=q, k=block.k.to(kind)[:, :, None], v=block.v.to(kind)[:, :, None])


def _runs(block: BlockInputs) -> list[tuple[int, int]]:
    """Return (begin, size) of runs of queries whose scores fit; one under torch.compile."""
    batch, heads, group, queries, _ = block.q.shape
    if torch.compiler.is_compiling():
        return [(0, queries)]
    scores = _SCORES_OF_CPU if block.q.is_cpu else _SCORES
    most = max(1, scores // max(1, batch * heads * group * block.k.size(3)))
    return [(begin, min(most, queries - begin)) for begin in range(0, queries, most)]


def _scores(block: BlockInputs, begin: int, size: int) -> tuple[Tensor, Tensor | None]:
    """Return the masked scores of `size` queries, [B, K, H / K, size, T], and the slope of the cap there."""
    q, k, mask = block.q, block.k, block.mask
    scores = (q.narrow(3, begin, size) @ k.transpose(-1, -2)) * block.scale
    slope = None
    if block.softcap:
        capped = torch.tanh(scores / block.softcap)
        scores, slope = block.softcap * capped, 1 - capped * capped
    if mask is not None:
        if mask.size(2) > 1:
            mask = mask.narrow(2, begin, size)
        scores = scores + (mask[:, None] if mask.size(1) == 1 else mask.unflatten(1, (k.size(1), -1)))
    if block.causal:
        places = torch.arange(begin, begin + size, device=q.device)
        later = torch.arange(k.size(3), device=q.device) > places[:, None]
        scores = scores.masked_fill(later, -torch.inf)
    return scores, slope
