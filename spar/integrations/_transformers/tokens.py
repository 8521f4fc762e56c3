# SPDX-License-Identifier: Apache-2.0
"""A rank's tokens for functions that mix them: by heads, by state, or with the tokens before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._attention.prefix_tree import SpansOfTree, Tree
from ..._model.nested import tensors_in
from ..._model.part import Part, has_part, mark, part_of
from ..._model.rules.products import shared
from ..._model.stand_ins import computing
from ..._model.view import View, without_view
from ...groups import init
from ...ops.convolution import can_correct, convolve, convolve_tree
from ...ops.fragments import fragments_of
from ...ops.tree_fragments import fragments_of_tree
from ...ops.unused import on_rows
from ...sequence_layout import SequenceLayout
from ...sizes import share

ALONE = "use_cache=False, and no documents beside a tree"


class Tokens(NamedTuple):
    """Parts of one sequence.

    Attributes:
        layout: of the sequence.
        tree: of which they are places, if the caller passed its mask.
    """

    view: View
    part: Part
    layout: SequenceLayout
    tree: Tree | None = None

    @property
    def world(self) -> int:
        return self.part.parts.world

    def run(self, name: str, items: int, function: Callable[..., Tensor], *tensors: Any) -> Tensor:
        """Call a function of this rank's tensors, and return its result as the same part.

        items: the multiply-adds for each token.
        """
        work = shared(items * self.part.whole, self.part)
        with computing(self.view, name, tensors_in(tensors), work):
            return mark(function(*tensors), self.part)

    def passes_states(self, tensors: Sequence[Tensor], items: int) -> bool:
        """Whether a recurrence passes states between ranks; else these exchange tokens for heads.

        - By state with fewer heads than ranks: by heads some ranks would have none, and wait.
        - By state if ranks are on several hosts, and states are less than half of the bytes of tokens: by
          state a delta rule takes up to twice the arithmetic.
        - Else by heads.

        All ranks decide alike: they have the same layout, widths and dtypes.

        tensors: `[B, S_local, H, ...]`, which would be exchanged for heads; the result is like the first.
        items: of a state and its transition, for one sample.
        """
        if tensors[0].size(2) < self.world:
            return True
        is_far = len(hosts_of(self.layout.group, tensors[0].device)) > 1
        return is_far and 2 * self._bytes_by_state(tensors, items) < self._bytes_by_heads(tensors)

    def _bytes_by_heads(self, tensors: Sequence[Tensor]) -> int:
        """Return what all ranks send for one sample, times P / (P - 1)."""
        widths = [x.element_size() * x.shape[2:].numel() for x in (*tensors, tensors[0])]
        return self.layout.total * sum(widths)

    def _bytes_by_state(self, tensors: Sequence[Tensor], items: int) -> int:
        """Return what all ranks send for one sample, times P / (P - 1)."""
        size = 8 if tensors[0].dtype == torch.float64 else 4
        succession = fragments_of(self.layout, self.world, 0)[1]
        if self.tree is not None:
            succession = fragments_of_tree(self.tree, self.world, 0)[1]
        return sum(succession.sizes) * items * size * self.world

    def refuse_tree(self, name: str, expected: str = "the samples as a padded batch, without a tree") -> None:
        """Raise for a function whose state nobody can pass on. expected: what the caller is to do."""
        if self.tree is not None:
            raise ValueError(
                f"{name} runs along a sequence from its first token on, so a branch of the prefix tree would "
                f"continue another one; expected {expected}"
            )

    def all_heads(self, state: Tensor, heads: int) -> Tensor:
        """Return the state of all heads, of which each rank has its own in dim 1 after `by_heads`."""
        sizes = tuple([share(heads, self.world, rank) for rank in range(self.world)])
        return SequenceLayout("local", sizes, self.layout.group).gather(state, 1, backward="sum")

    def convolve(self, fn: Callable[[Tensor], Tensor], x: Tensor, before: int, keeps_result: bool) -> Tensor:
        """Apply a causal function of `before` tokens and one more to [B, C, S_local].

        keeps_result: whether fn's backward needs its result.
        """
        if before == 0:
            return fn(x)
        if self.tree is not None:
            return convolve_tree(fn, x, self.tree, before)
        if x.size(2) == 0:
            return on_rows(fn, self.layout.halo(x, before, 2), 2)
        if can_correct(x):
            return convolve(fn, x, self.layout, before, keeps_result)
        return self.layout.drop_halo(fn(self.layout.halo(x, before, 2)), before, 2)


def tokens_of(view: View, dim: int, tensors: Sequence[Tensor], *others: Any) -> Tokens | None:
    """Return the tokens of tensors that are parts of one sequence, in this dim; None if not all are.

    others: further arguments, which are to be whole.
    """
    part = part_of(tensors[0])
    if part is None or part.dim != dim or not part.is_sequence or has_part(others):
        return None
    if any(part_of(x) is not part for x in tensors):
        return None
    mask = part.parts.mask
    if not isinstance(mask, SpansOfTree) or part.lengths != (mask.tree.layout.total,):
        return Tokens(view, part, view.parts.layout(part.lengths))
    view.spans_read.along += 1
    return Tokens(view, part, mask.tree.layout, mask.tree)


def has_documents(options: dict[str, Any]) -> bool:
    """Whether a kernel is to keep packed documents apart, of the whole sequence."""
    return any(options.get(name) is not None for name in ("cu_seqlens", "seq_idx"))


def hosts_of(group: Any, device: torch.device) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host. Collective before the group's first exchange."""
    with without_view():
        return init(group, device).hosts
