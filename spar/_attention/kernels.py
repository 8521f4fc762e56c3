"""Attention of one block that also returns each query's log-sum-exp, so that blocks can be merged.

Every kernel takes queries [B, H, S, D], keys [B, K, T, D] and values [B, K, T, E], with H a multiple of K,
and a mask that is added to the scores. `backward` takes the output and the log-sum-exp of all blocks, and
returns this block's part of the gradients.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch

_aten = torch.ops.aten
_SCORES = 1 << 24  # a block of scores has at most so many, unless one query alone has more


class Kernel(Protocol):
    def refuses(self, q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> str:
        """Return the reason why the kernel cannot compute this; empty if it can."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [B, H, S, E] and the log-sum-exp [B, H, S] in `accumulated(q.dtype)`."""

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v."""


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which blocks are merged and gradients are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class FlashCpu:
    """torch's own flash attention for CPUs, behind scaled_dot_product_attention."""

    def refuses(self, q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> str:
        if not hasattr(_aten, "_scaled_dot_product_flash_attention_for_cpu"):
            return f"torch {torch.__version__} does not have it"
        if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"its log-sum-exp has the accuracy of float32, and the tensors are {q.dtype}"
        if q.size(3) != v.size(3):
            return f"heads of q and v differ in width: {q.size(3)} and {v.size(3)}"
        return ""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return cast(
            tuple[torch.Tensor, torch.Tensor],
            _aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=mask, scale=scale
            ),
        )

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return cast(
            tuple[torch.Tensor, torch.Tensor, torch.Tensor],
            _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
            ),
        )


class FlashCuda:
    """torch's own flash attention for GPUs, behind scaled_dot_product_attention. Not verified on hardware."""

    def refuses(self, q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> str:
        if torch.cuda.get_device_capability(q.device) < (8, 0):
            return "the GPU is older than Ampere"
        if not torch.backends.cuda.flash_sdp_enabled():
            return "torch.backends.cuda.enable_flash_sdp(False) was called"
        if q.dtype not in (torch.bfloat16, torch.float16):
            return f"the tensors are {q.dtype}"
        if mask is not None:
            return "it takes no mask"
        if q.size(3) != v.size(3) or q.size(3) % 8 or q.size(3) > 256:
            return f"the heads' widths are {q.size(3)} and {v.size(3)}, not one multiple of 8 up to 256"
        return ""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = _expanded(k, q.size(1)), _expanded(v, q.size(1))
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, none = k.size(1), torch.empty((), dtype=torch.int64, device=q.device)  # without dropout
        k, v = _expanded(k, q.size(1)), _expanded(v, q.size(1))
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.size(2), k.size(2), 0.0, causal, none, none, scale=scale
        )
        return dq, _summed(dk, heads), _summed(dv, heads)


def _expanded(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat key heads, so that each query head has one."""
    return x if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), 1)


def _summed(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x if x.size(1) == heads else x.unflatten(1, (heads, -1)).sum(2, dtype=torch.float32)


class Blockwise:
    """Matrix products in torch, some queries at a time; any device, dtype and mask."""

    def refuses(self, q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> str:
        return ""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind, heads = accumulated(q.dtype), k.size(1)
        q, k, v = q.to(kind).unflatten(1, (heads, -1)), k.to(kind)[:, :, None], v.to(kind)[:, :, None]
        outs, sums = [], []
        for begin, size in _chunks(q, k):
            scores = _scores(q, k, begin, size, causal, mask, scale)
            lse = scores.logsumexp(-1)
            outs.append(torch.exp(scores - _finite(lse)[..., None]) @ v)
            sums.append(lse)
        return torch.cat(outs, 3).flatten(1, 2), torch.cat(sums, 3).flatten(1, 2)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kind, heads = accumulated(q.dtype), k.size(1)
        q, k, v = q.to(kind).unflatten(1, (heads, -1)), k.to(kind)[:, :, None], v.to(kind)[:, :, None]
        grad, out = grad.to(kind).unflatten(1, (heads, -1)), out.to(kind).unflatten(1, (heads, -1))
        lse, own = lse.unflatten(1, (heads, -1)), (grad * out).sum(-1, keepdim=True)
        dqs, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
        for begin, size in _chunks(q, k):
            part, upper = q.narrow(3, begin, size), grad.narrow(3, begin, size)
            scores = _scores(q, k, begin, size, causal, mask, scale)
            weights = torch.exp(scores - lse.narrow(3, begin, size)[..., None])
            dv = dv + (weights.transpose(-1, -2) @ upper).sum(2, keepdim=True)
            inner = weights * (upper @ v.transpose(-1, -2) - own.narrow(3, begin, size)) * scale
            dqs.append(inner @ k)
            dk = dk + (inner.transpose(-1, -2) @ part).sum(2, keepdim=True)
        return torch.cat(dqs, 3).flatten(1, 2), dk.squeeze(2), dv.squeeze(2)


def _chunks(q: torch.Tensor, k: torch.Tensor) -> list[tuple[int, int]]:
    """Return (begin, size) of runs of queries whose scores fit; one under torch.compile."""
    queries = q.size(3)
    if torch.compiler.is_compiling():
        return [(0, queries)]
    most = max(1, _SCORES // max(1, q.size(0) * q.size(1) * q.size(2) * k.size(3)))
    return [(begin, min(most, queries - begin)) for begin in range(0, queries, most)]


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    begin: int,
    size: int,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return the masked scores of `size` queries, [B, K, H / K, size, T]."""
    scores = (q.narrow(3, begin, size) @ k.transpose(-1, -2)) * scale
    if mask is not None:
        if mask.size(2) > 1:
            mask = mask.narrow(2, begin, size)
        heads = mask[:, None] if mask.size(1) == 1 else mask.unflatten(1, (k.size(1), -1))
        scores = scores + heads
    if causal:
        places = torch.arange(begin, begin + size, device=q.device)
        later = torch.arange(k.size(3), device=q.device) > places[:, None]
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """Replace the -inf of a query without keys: exp(-inf - 0) is 0, and exp(-inf + inf) is not a number."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


FLASH: dict[str, Kernel] = {"cpu": FlashCpu(), "cuda": FlashCuda()}  # by device type
BLOCKWISE: Kernel = Blockwise()


def kernel_for(q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> Kernel:
    """Return torch's flash kernel where it can compute this."""
    flash = FLASH.get(q.device.type, BLOCKWISE)
    return BLOCKWISE if flash.refuses(q, v, mask) else flash


class Merged:
    """The output of all blocks so far, and each query's log-sum-exp; -inf for a query without keys."""

    def __init__(self, q: torch.Tensor, width: int) -> None:
        batch, heads, queries, _ = q.shape
        kind = accumulated(q.dtype)
        self.out = torch.zeros(batch, queries, heads, width, dtype=kind, device=q.device).transpose(1, 2)
        self.lse = torch.full((batch, heads, queries), -torch.inf, dtype=kind, device=q.device)

    def add(self, query: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a block's output, whose queries begin at `query`."""
        mine, sums = self.out.narrow(2, query, out.size(2)), self.lse.narrow(2, query, out.size(2))
        base = _finite(torch.maximum(sums, lse))
        old, new = torch.exp(sums - base), torch.exp(lse - base)
        total = old + new
        # not exp(lse - total): scores of -1e9 absorb a logarithm, and the weights would not sum to 1
        weight = torch.where(total > 0, new / total, 0.0)[..., None]
        mine.copy_(torch.lerp(mine, out.to(mine.dtype), weight))
        sums.copy_(base + torch.log(total))


def without_dead(
    out: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Correct queries for which the mask leaves no key: flash kernels return 0 as their log-sum-exp."""
    if mask is None:
        return out, lse
    dead = (mask == -torch.inf).all(-1)
    return out.masked_fill(dead[..., None], 0.0), lse.masked_fill(dead, -torch.inf)
