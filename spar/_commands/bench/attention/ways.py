# SPDX-License-Identifier: Apache-2.0
"""The ways to attend that are compared, as functions of q, k and v [1, S, H, D]; all causal.

The usual formulations are over torch.distributed alone. kernels.py replaces the kernel in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import spar

from ...._attention.kernels.aten import FlashCpu
from ...._attention.kernels.kernel import BlockInputs
from .. import formulations

WHOLE, ULYSSES, GATHER, RING = "one process", "ulysses", "gather", "ring"
USUAL_ULYSSES, USUAL_GATHER, USUAL_RING = "usual ulysses", "usual gather", "usual ring"
USUAL = {ULYSSES: USUAL_ULYSSES, GATHER: USUAL_GATHER, RING: USUAL_RING}  # the code that each replaces


class Way(NamedTuple):
    """`own`: the tokens of the whole sequence that this rank passes."""

    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    positions: Tensor


def ways(tokens: int) -> dict[str, Way]:
    """Return the ways that can compute this number of tokens."""
    zigzag, even = spar.SequenceLayout.zigzag(tokens), spar.SequenceLayout.even(tokens)
    world, index = dist.get_world_size(), zigzag.index()
    by_name = {
        name: Way(partial(spar.attention, layout=zigzag, causal=True, method=name), index)
        for name in (ULYSSES, GATHER, RING)
    }
    if tokens % world == 0:
        by_name[USUAL_ULYSSES] = Way(usual_ulysses, even.index())
    by_name[USUAL_GATHER] = Way(partial(usual_gather, layout=zigzag), index)
    if tokens % (2 * world) == 0:
        by_name[USUAL_RING] = Way(usual_ring, index)
    return {WHOLE: Way(whole, torch.arange(tokens)), **by_name}


def _attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Call torch's kernel, which has heads before tokens."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return sdpa(q, k, v, enable_gqa=q.size(1) != k.size(1), **options).transpose(1, 2)


sdpa = F.scaled_dot_product_attention  # kernels.py replaces it


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _attend(q, k, v, is_causal=True)


# ---- the usual formulations ----


def usual_ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Permute and exchange Q, K and V one after another. Fewer key heads than ranks are repeated."""
    world = dist.get_world_size()
    if k.size(2) < world:
        k, v = (x.repeat_interleave(world // x.size(2), 2) for x in (k, v))
    y = _attend(*[formulations.all_to_all(x) for x in (q, k, v)], is_causal=True)
    out: Tensor = formulations.all_to_all_back(y)
    return out


def usual_gather(q: Tensor, k: Tensor, v: Tensor, layout: spar.SequenceLayout) -> Tensor:
    """Pad the chunks of K and V to one size, gather them, put them in order, attend with each chunk of q."""
    world, rank, total = dist.get_world_size(), dist.get_rank(), layout.total
    sizes = spar.cal_split_sizes(total, 2 * world)
    k, v = (formulations.padded_gather(x[0], sizes)[None] for x in (k, v))
    outs = []
    for chunk, part in zip(
        (rank, 2 * world - 1 - rank), q.split(formulations.own_sizes(sizes), 1), strict=True
    ):
        end, size = sum(sizes[: chunk + 1]), sizes[chunk]
        mask = torch.ones(size, end, dtype=torch.bool).tril(end - size)
        outs.append(_attend(part, k[:, :end], v[:, :end], attn_mask=mask))
    return torch.cat(outs, 1)


flash = FlashCpu()  # kernels.py replaces it


def _half(x: Tensor, last: bool) -> Tensor:
    return x.chunk(2, 2)[last]


def _pass_on(tensors: list[Tensor]) -> tuple[list[Tensor], list[dist.Work]]:
    """Send to the next rank, and receive from the one before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(x) for x in tensors]
    sends = [dist.P2POp(dist.isend, x, (rank + 1) % world) for x in tensors]
    receives = [dist.P2POp(dist.irecv, x, (rank - 1) % world) for x in received]
    return received, dist.batch_isend_irecv([*sends, *receives])


def _arrived(passed: tuple[list[Tensor], list[dist.Work]]) -> list[Tensor]:
    for work in passed[1]:
        work.wait()
    return passed[0]


class _UsualRing(torch.autograd.Function):
    """K and V go round by batch_isend_irecv. Tensors are [1, H, S, D], each rank's two chunks of a zigzag."""

    @staticmethod
    def blocks(q: Tensor, k: Tensor, v: Tensor, step: int) -> tuple[BlockInputs, bool, bool]:
        """Return a step's block, and whether it has the last half of the queries, the first of the keys."""
        early = 0 < step <= dist.get_rank()
        late = step > dist.get_rank()
        if early:
            k, v = _half(k, False), _half(v, False)
        q = _half(q, True) if late else q
        return BlockInputs(q, k, v, step == 0, None, q.size(3) ** -0.5), late, early

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys_and_values, world = [k, v], dist.get_world_size()
        for step in range(world):
            passed = _pass_on(keys_and_values) if step + 1 < world else None
            block, late, _ = _UsualRing.blocks(q, keys_and_values[0], keys_and_values[1], step)
            part, sums = flash.forward(block)
            if step == 0:
                out, lse = part.float(), sums
            else:
                mine, old = (_half(out, True), _half(lse, True)) if late else (out, lse)
                new = old - F.logsigmoid(old - sums)
                mine.copy_(torch.exp(old - new)[..., None] * mine + torch.exp(sums - new)[..., None] * part)
                old.copy_(new)
            if passed is not None:
                keys_and_values = _arrived(passed)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        keys_and_values, world = [k, v], dist.get_world_size()
        dq = torch.zeros_like(q, dtype=torch.float32)
        coming: tuple[list[Tensor], list[dist.Work]] | None = None
        for step in range(world):
            passed = _pass_on(keys_and_values) if step + 1 < world else None
            block, late, early = _UsualRing.blocks(q, keys_and_values[0], keys_and_values[1], step)
            of = [_half(x, True) if late else x for x in (grads[0], out, lse)]
            parts = flash.backward(block, of[0], of[1], of[2])
            (_half(dq, True) if late else dq).add_(parts[0])
            sums = (
                [torch.zeros_like(x, dtype=torch.float32) for x in keys_and_values]
                if coming is None
                else _arrived(coming)
            )
            for whole, part in zip(sums, parts[1:], strict=True):
                (_half(whole, False) if early else whole).add_(part)
            coming = _pass_on(sums)
            if passed is not None:
                keys_and_values = _arrived(passed)
        dk, dv = _arrived(coming)  # type: ignore[arg-type]
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def usual_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Merge blocks by their log-sum-exp in torch; the kernels of blocks are spar's calls of torch's."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out: Tensor = _UsualRing.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2)
