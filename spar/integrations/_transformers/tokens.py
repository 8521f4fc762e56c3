# SPDX-License-Identifier: Apache-2.0
"""A rank's tokens for functions that mix them: each document alone, wherever it lies on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._exchange.gather_plan import fragments
from ..._group.registry import place_of
from ...ops.by_heads import by_heads
from ...ops.by_state import Recurrence, pass_states
from ...ops.columns import with_one_gradient
from ...ops.convolution import can_correct, convolve
from ...ops.fragments import Lengths, fragments_of
from ...sequence_layout import SequenceLayout, numbers_of

SCAN_CHOICES = ("heads", "state", "bytes")  # of `shard`


class Tokens(NamedTuple):
    """How a batch lies on the ranks.

    Attributes:
        layout: of the sequence.
        documents: the lengths of the documents in each sample; one entry if they are the same in all samples.
            None: there are none, or the layout has them.
        scan: "heads", "state" or "bytes", as in `shard`; None: by heads where each rank has one.
    """

    layout: SequenceLayout
    documents: Lengths | None = None
    scan: str | None = None

    @property
    def are_one_sequence(self) -> bool:
        """Whether one process would compute the same: a rank has all tokens, and there are no documents."""
        return self.layout.group.size() == 1 and not self.layout.is_packed and self.documents is None

    def by_heads(
        self,
        fn: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        parameters: Sequence[Tensor | None] = (),
        seq_dim: int = 1,
        head_dim: int = 2,
    ) -> Tensor:
        """Call `spar.by_heads` with a function of one document of tensors [B, ...].

        tensors: of which those that are views of one are so by the model's code, where no hook can be.
        """

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
        tensors = with_one_gradient(tensors, self.layout.group)
        result: Tensor = by_heads(
            function, tensors, self.layout, parameters=parameters, seq_dim=seq_dim, head_dim=head_dim
        )
        return result

    def passes_states(self, tensors: Sequence[Tensor], items: int) -> bool:
        """Whether a recurrence passes states between ranks; else these exchange tokens for heads.

        The rule, where the caller of `shard` chose neither:

        - By state with fewer heads than ranks: by heads some ranks would have none, and wait.
        - By state if bytes count ("bytes": the ranks are on several hosts), and states are less than half of
          the bytes of tokens: by state a delta rule takes up to twice the arithmetic.
        - Else by heads.

        All ranks decide alike: they have the same layout, documents, widths and dtypes.

        tensors: `[B, S_local, H, ...]`, which would be exchanged for heads; the result is like the first.
        items: of a state and its transition, for one sample.
        """
        world = self.layout.group.size()
        if self.scan in ("heads", "state") or world == 1:
            return self.scan == "state"
        if tensors[0].size(2) < world:
            return True
        return self.scan == "bytes" and 2 * self._bytes_by_state(tensors, items) < self._bytes_by_heads(
            tensors
        )

    def _bytes_by_heads(self, tensors: Sequence[Tensor]) -> int:
        """Return what all ranks send for one sample, times P / (P - 1)."""
        widths = [x.element_size() * x.shape[2:].numel() for x in (*tensors, tensors[0])]
        return self.layout.total * sum(widths)

    def _bytes_by_state(self, tensors: Sequence[Tensor], items: int) -> int:
        """Return what all ranks send for one sample, in the mean over the samples, times P / (P - 1)."""
        world, samples = self.layout.group.size(), len(self.documents or (None,))
        size = 8 if tensors[0].dtype == torch.float64 else 4
        sent = sum(fragments_of(self.layout, world, 0, self.documents)[1].sizes)
        return sent * items * size * world // samples

    def by_state(self, recurrence: Recurrence, tensors: Sequence[Tensor]) -> Tensor:
        """Call `spar.by_state` with a recurrence of one document of tensors [B, S_local, ...]."""
        return pass_states(recurrence, tensors, self.layout, self.documents)

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


class Carried:
    """A mask that also has the layout, for layers to which a model passes no arguments but their mask.

    Such are those of Mamba 1 and 2, Falcon-Mamba, Jamba and Zamba, and attention of Nemotron and StableLM.
    The mask reaches them in any case, also when gradient checkpointing calls a layer once more during
    backward. A hook, or attention_forward, takes it apart there. To transformers it looks like a prepared
    mask, so that a model that would make one of its shard (BioGPT) does not.
    """

    ndim = 4

    def __init__(
        self,
        mask: Any,
        tokens: Tokens,
        method: str | None = None,
        shape: tuple[int, int, int, int] | None = None,
    ) -> None:
        self.mask = mask
        self.tokens = tokens
        self.method = method
        self.shape = shape
