# SPDX-License-Identifier: Apache-2.0
"""What changes the scores of one attention, block by block: masks, spans, a bias, a cap."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._exchange.observers import is_fake
from .blocks import Block
from .kernels import kernel_for
from .kernels.kernel import BlockInputs, Kernel, Needs, accumulated
from .masks import added, causal_mask, joined, sliced
from .pairs import Function, of_pairs, without_repeats
from .spans import Spans


@dataclass(frozen=True)
class Scores:
    """How scores become those of one attention.

    Attributes:
        scale: of the products of queries and keys.
        softcap: c, if scores x become c tanh(x / c); 0: none.
        spans: which keys the queries of partial blocks attend to.
        bias: what is added to the scores.
        first_head: the number of the first head, for the bias.
        kernel: its name; None chooses one.
        varied: as in Needs.
        returns_lse: whether the log-sum-exp is a result, which may have a gradient.
    """

    scale: float
    softcap: float = 0.0
    spans: Spans | None = None
    bias: Function | None = None
    first_head: int = 0
    kernel: str | None = None
    varied: bool = False
    returns_lse: bool = False


class Blocks:
    """The blocks of one pass over q [B, H, S, D] and k and v [B, K, T, D], with their masks and kernels."""

    def __init__(self, scores: Scores, q: Tensor, v: Tensor, mask: Tensor | None) -> None:
        """mask: of the whole sequence, [B or 1, H or 1, S, T]."""
        self._scores, self._mask = scores, mask
        self._changed = mask is not None or scores.bias is not None
        self._q, self._v = q, v
        self._kernels: dict[Needs, Kernel] = {}
        # The newest mask of spans, by the ends that it is made of: windows have the same in all blocks.
        self._newest: tuple[Tensor, tuple[int, int], Tensor, bool] | None = None

    def of(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Kernel, BlockInputs]:
        """Return a block's kernel, and its parts of q, k and v with what is added to its scores."""
        masked = self._changed or block.partial
        softcap, varied = self._scores.softcap, self._scores.varied
        reads = block.window is not None, block.spans is not None
        needs = Needs(masked, softcap > 0, *reads, varied, block.parts is not None)
        kernel = self._kernels.get(needs)
        if kernel is None:
            kernel = kernel_for(self._scores.kernel, self._q, self._v, needs)
            self._kernels[needs] = kernel
        if block.sample >= 0:
            q, k, v = (x.narrow(0, block.sample, 1) for x in (q, k, v))
        q = q.narrow(2, block.query, block.queries)
        k, v = k.narrow(2, block.key, block.keys), v.narrow(2, block.key, block.keys)
        mask, has_empty = self._added(block, q) if masked else (None, False)
        causal = block.causal
        if mask is not None and causal:
            # A query may have no key left only by both together, which the kernel must see.
            mask, causal = joined(mask, causal_mask(block.queries, block.keys, 0, mask.device)), False
        scale = self._scores.scale
        return kernel, BlockInputs(
            q, k, v, causal, mask, scale, softcap, block.window, has_empty, block.spans, parts=block.parts
        )

    def _added(self, block: Block, q: Tensor) -> tuple[Tensor | None, bool]:
        """Return what masks, spans and bias add to a block's scores, and whether a query may have no key."""
        result, has_empty = None, self._changed
        if self._mask is not None:
            mask = sliced(self._mask, block.query_start, block.queries, block.key_start, block.keys)
            if block.sample >= 0 and mask.size(0) > 1:
                mask = mask.narrow(0, block.sample, 1)
            result = added(mask, q.dtype)
        if block.partial:
            spans, is_empty = self._of_spans(block, q)
            has_empty = has_empty or is_empty
            result = spans if result is None else result + spans
        if self._scores.bias is not None:
            bias = self._of_bias(self._scores.bias, block, q)
            result = bias if result is None else result + bias
        return result, has_empty

    def _of_spans(self, block: Block, q: Tensor) -> tuple[Tensor, bool]:
        """Return 0 where spans let a query attend to a key and -inf elsewhere; whether a query has no key."""
        spans = self._scores.spans
        assert spans is not None
        if is_fake(q):
            batch = 1 if block.sample >= 0 else spans.ends.size(0)
            return q.new_zeros(batch, spans.ends.size(1), block.queries, block.keys), True
        ends = spans.on_cpu.narrow(2, block.query_start, block.queries)
        if block.sample >= 0 and ends.size(0) > 1:
            ends = ends.narrow(0, block.sample, 1)
        # Empty intervals stay empty wherever they are.
        ends, size = ends - block.key_start, (block.queries, block.keys)
        if self._newest is not None and self._newest[1] == size and torch.equal(self._newest[0], ends):
            return self._newest[2:]
        first, end = ends.to(q.device).unflatten(3, (-1, 2))[..., None].unbind(-2)
        places = torch.arange(block.keys, dtype=torch.int32, device=q.device)
        allowed = ((places >= first) & (places < end)).any(3)
        mask = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill_(~allowed, -torch.inf)
        # Of the intervals alone, which are fewer than the keys.
        first, end = ends.unflatten(3, (-1, 2)).unbind(-1)
        is_empty = not bool((first.clamp(min=0) < end.clamp(max=block.keys)).any(3).all())
        self._newest = ends, size, mask, is_empty
        return mask, is_empty

    def _of_bias(self, bias: Function, block: Block, q: Tensor) -> Tensor:
        indices = [
            torch.arange(begin, begin + size, device=q.device)
            for begin, size in (
                (max(block.sample, 0), q.size(0)),
                (self._scores.first_head, q.size(1)),
                (block.query_start, block.queries),
                (block.key_start, block.keys),
            )
        ]
        with torch.enable_grad():
            value = of_pairs("attention: bias", bias, "floating", indices)
        if value.requires_grad:
            raise ValueError(
                "attention: bias returned a tensor that requires a gradient, as a learned bias (T5's) does, "
                'and has none here; pass it as an added mask with method="ulysses", or detach it'
            )
        # Not q's dtype: 16 bits round a bias of 100 by 0.25, and ALiBi has thousands.
        return without_repeats(value).to(accumulated(q.dtype))
