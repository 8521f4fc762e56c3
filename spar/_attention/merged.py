# SPDX-License-Identifier: Apache-2.0
"""What blocks add up to: outputs merged by the log-sum-exp of each query, and sums of gradients.

The memory of a first block that covers all is taken, and converted to the dtype of the sums by a second one.
Otherwise memory is filled first, always so under torch.compile: the block that comes first is not known there
without guards on sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .kernels.kernel import accumulated


class Sum:
    """The sum of blocks' gradients of a tensor [B, H, S, D], along dim 2, in the dtype of the sums.

    It is as long as one block while that has in it all that was added.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._begin = 0
        self._sum: Tensor | None = None

    def add(self, begin: int, part: Tensor, sample: int = -1) -> None:
        """Add a block's part [B, H, T, D], a new tensor, whose first item is item `begin` of the sum.

        sample: the only one, [1, H, T, D], that the block has; -1: it has all.
        """
        if sample >= 0:
            self._begin, self._sum = 0, self.total(self._dtype)
            self._sum[sample : sample + 1].narrow(2, begin, part.shape[2]).add_(part)
            return
        if self._sum is None and not is_dynamo_compiling():
            self._begin, self._sum = begin, part
            return
        if self._sum is None:
            self._sum = self.total(self._dtype)
        elif not is_dynamo_compiling():
            self._sum = self._sum.to(self._dtype)
            before, behind = self._begin - begin, begin + part.shape[2] - self._begin - self._sum.shape[2]
            if before >= 0 <= behind and before + behind > 0:
                # The part covers the sum, which is added to it.
                begin, self._begin = self._begin, begin
                part, self._sum = self._sum, part.to(self._dtype)
            elif before > 0 or behind > 0:
                # Each begins or ends where the other is not.
                self._begin, self._sum = 0, self.total(self._dtype)
        self._sum.narrow(2, begin - self._begin, part.shape[2]).add_(part)

    def total(self, dtype: torch.dtype) -> Tensor:
        """Return the whole sum [B, H, S, D] in a dtype; 0 where nothing was added."""
        if self._sum is not None and (is_dynamo_compiling() or self._sum.shape[2] == self._like.shape[2]):
            return self._sum.to(dtype)
        whole = torch.zeros_like(self._like, dtype=dtype)
        if self._sum is not None:
            whole.narrow(2, self._begin, self._sum.shape[2]).copy_(self._sum)
        return whole


class Merged:
    """The output [B, H, S, E] of all blocks so far, and each query's log-sum-exp [B, H, S].

    The log-sum-exp of a query without keys is -inf.
    """

    def __init__(self, q: Tensor, width: int) -> None:
        self._q, self._width = q, width
        self._merged: tuple[Tensor, Tensor] | None = None
        self._end = 0  # of the queries that have had a block

    def add(self, query: int, out: Tensor, lse: Tensor, sample: int = -1) -> None:
        """Merge a block's output [B, H, T, E] and log-sum-exp, new tensors; its first query is `query`.

        sample: as of `Sum.add`.
        """
        size = out.shape[2]
        first = self._merged is None and not is_dynamo_compiling()
        if first and sample < 0 and size == self._q.shape[2]:
            self._merged, self._end = (out, lse), size
            return
        merged, sums = self._merged or self.total()
        self._merged = merged, sums = merged.to(sums.dtype), sums
        merged, sums = merged.narrow(2, query, size), sums.narrow(2, query, size)
        if sample >= 0:
            merged, sums = merged.narrow(0, sample, 1), sums.narrow(0, sample, 1)
        if not is_dynamo_compiling():
            # Of windows, most queries have one block.
            is_only, self._end = sample < 0 and query >= self._end, max(self._end, query + size)
            if is_only:
                merged.copy_(out)
                sums.copy_(lse)
                return
        # Not exp(lse - logaddexp(..)): scores of -1e9 absorb a logarithm, and weights would not sum to 1.
        # Both are -inf for a query without keys so far, whose weight is then not a number.
        weight = torch.sub(lse, sums).sigmoid_().nan_to_num_(0.0)
        merged.lerp_(out.to(merged.dtype), weight[..., None])
        sums.copy_(torch.logaddexp(sums, lse))

    def total(self) -> tuple[Tensor, Tensor]:
        """Return the output, 0 for a query without keys, and the log-sum-exp.

        The output is in the dtype of the sums, or in that of the only block.
        """
        if self._merged is not None:
            return self._merged
        batch, heads, queries, _ = self._q.shape
        dtype = accumulated(self._q.dtype)
        out = self._q.new_zeros(batch, queries, heads, self._width, dtype=dtype).transpose(1, 2)
        return out, self._q.new_full((batch, heads, queries), -torch.inf, dtype=dtype)
