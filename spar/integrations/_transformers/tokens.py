# SPDX-License-Identifier: Apache-2.0
"""A rank's tokens for functions that mix them: each document alone, wherever it lies on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._exchange.pieces import fragments
from ..._group.registry import place_of
from ...ops.by_heads import by_heads
from ...ops.convolution import can_correct, convolve
from ...sequence_layout import SequenceLayout, numbers_of

Lengths = tuple[tuple[int, ...], ...]


class Tokens(NamedTuple):
    """How a batch lies on the ranks.

    Attributes:
        layout: of the sequence.
        documents: the lengths of the documents in each sample; one entry if they are the same in all samples.
            None: there are none, or the layout has them.
    """

    layout: SequenceLayout
    documents: Lengths | None = None

    @property
    def are_one_sequence(self) -> bool:
        """Whether one process would compute the same: a rank has all tokens, and there are no documents."""
        return self.layout.group.size() == 1 and self.layout.kind != "packed" and self.documents is None

    def by_heads(
        self,
        fn: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        parameters: Sequence[Tensor | None] = (),
        seq_dim: int = 1,
        head_dim: int = 2,
    ) -> Tensor:
        """Call `spar.by_heads` with a function of one document of tensors [B, ...]."""

        def apart(*arguments: Any) -> Tensor:
            whole, others = arguments[: len(tensors)], arguments[len(tensors) :]
            samples = []
            for rows, lengths in self._samples(len(whole[0])):
                documents = [
                    fn(*[x[rows].narrow(seq_dim, end - length, length) for x in whole], *others)
                    for end, length in zip(accumulate(lengths), lengths, strict=True)
                ]
                samples.append(torch.cat(documents, seq_dim))
            return torch.cat(samples)

        function = fn if self.documents is None else apart
        result: Tensor = by_heads(
            function, tensors, self.layout, parameters=parameters, seq_dim=seq_dim, head_dim=head_dim
        )
        return result

    def convolve(
        self, fn: Callable[[Tensor], Tensor], x: Tensor, before: int, keeps_result: bool = False
    ) -> Tensor:
        """Apply a causal function of `before` tokens and one more to [B, C, S_local].

        keeps_result: whether fn's backward needs its result.
        """
        if before == 0:
            return fn(x)
        if x.size(2) == 0:
            # Of one token of zeros, so that parameters and the exchange have their gradients.
            wide = torch.cat([self.layout.halo(x, before, 2), x.new_zeros(x.size(0), x.size(1), 1)], 2)
            return fn(wide).narrow(2, 0, 0)
        if can_correct(x) and (self.documents is None or len(self.documents) == 1):
            lengths = None if self.documents is None else self.documents[0]
            return convolve(fn, x, self.layout, lengths, before, 2, keeps_result)
        wide = self.layout.halo(x, before, 2)
        if self.documents is None:
            return self.layout.drop_halo(fn(wide), before, 2)
        place = place_of(self.layout.group)
        samples = []
        for rows, lengths in self._samples(len(x)):
            parts, results, at = [], [], 0
            own = wide[rows]
            for fragment in fragments(numbers_of(self.layout, 0), lengths, place.world, place.rank):
                # Of the tokens before it, those of another document are zeros.
                context = min(before, fragment.start - fragment.low)
                zeros = own.new_zeros(own.size(0), own.size(1), before - context)
                first = fragment.at + (fragment.run + 1) * before - context
                parts += [zeros, own.narrow(2, first, context + fragment.size)]
                results.append((at + before, fragment.size))
                at += before + fragment.size
            y = fn(torch.cat(parts, 2))
            samples.append(torch.cat([y.narrow(2, *result) for result in results], 2))
        return torch.cat(samples)

    def _samples(self, count: int) -> Iterator[tuple[slice, tuple[int, ...]]]:
        documents = self.documents or ()
        if len(documents) == 1:
            yield slice(None), documents[0]
        else:
            for row, lengths in zip(range(count), documents, strict=True):
                yield slice(row, row + 1), lengths
