# SPDX-License-Identifier: Apache-2.0
"""A rank's tokens for functions that mix them: each document alone, wherever it lies on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._exchange.layouts import pieces
from ..._group.registry import place_of
from ...ops.by_heads import by_heads
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

    def convolve(self, fn: Callable[[Tensor], Tensor], x: Tensor, before: int) -> Tensor:
        """Apply a causal function of `before` tokens and one more to [B, C, S_local]."""
        wide = self.layout.halo(x, before, 2)
        if self.documents is None:
            return self.layout.drop_halo(fn(wide), before, 2)
        samples = []
        for rows, lengths in self._samples(len(x)):
            parts, results, at = [], [], 0
            own = wide[rows]
            for first, missing, size in self._fragments(lengths, before):
                zeros = own.new_zeros(own.size(0), own.size(1), missing)
                parts += [zeros, own.narrow(2, first, before - missing + size)]
                results.append((at + before, size))
                at += before + size
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

    def _fragments(self, lengths: tuple[int, ...], before: int) -> Iterator[tuple[int, int, int]]:
        """Return each part of a document in a run of this rank's tokens.

        It begins, with the tokens of its document before it, at a place of the result of `halo`; so many of
        `before` tokens are missing there, as its document begins later; and the part has so many tokens.
        """
        place, at = place_of(self.layout.group), 0
        for run in pieces(numbers_of(self.layout, 0), place.world, place.rank):
            if run.size == 0:
                continue
            for end, length in zip(accumulate(lengths), lengths, strict=True):
                first, last = max(end - length, run.start), min(end, run.start + run.size)
                if first < last:
                    context = max(end - length, first - before)
                    yield at + before + context - run.start, before - (first - context), last - first
            at += before + run.size
