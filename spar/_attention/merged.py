"""Blocks of keys merged by the log-sum-exp of each query."""

from __future__ import annotations

import torch

from .kernels.kernel import BlockInputs, Kernel, accumulated, finite


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
        base = finite(torch.maximum(sums, lse))
        old, new = torch.exp(sums - base), torch.exp(lse - base)
        total = old + new
        # not exp(lse - total): scores of -1e9 absorb a logarithm, and the weights would not sum to 1
        weight = torch.where(total > 0, new / total, 0.0)[..., None]
        mine.copy_(torch.lerp(mine, out.to(mine.dtype), weight))
        sums.copy_(base + torch.log(total))


def forward_of(kernel: Kernel, inputs: BlockInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a kernel; for queries to which the mask leaves no key, flash kernels return 0 as log-sum-exp."""
    out, lse = kernel.forward(inputs)
    if inputs.mask is None:
        return out, lse
    dead = (inputs.mask == -torch.inf).all(-1)
    return out.masked_fill(dead[..., None], 0.0), lse.masked_fill(dead, -torch.inf)
