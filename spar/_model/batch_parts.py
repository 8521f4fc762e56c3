# SPDX-License-Identifier: Apache-2.0
"""Where the sequences of a batch lie: as a mask says, or a function of the user's, or as in all batches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from .._attention.spans import Spans
from ..sequence_layout import SequenceLayout
from .part import Parts, placement
from .places import forward_on
from .view import View

LayoutOf = Callable[[dict[str, Any]], SequenceLayout]
_MOST = 64  # layouts, whose functions are planned anew
_MOST_MASKS = 4  # whose functions are planned: a plan keeps its mask, which may be of a long sequence


class BatchParts:
    """The parts of the ranks for each batch.

    Attributes:
        usual: those of a batch that says nothing.
    """

    def __init__(self, usual: Parts, layout_of: LayoutOf | None) -> None:
        self.usual, self._layout_of = usual, layout_of
        self._made: dict[Any, Parts] = {}  # by layouts that the function returned
        self._masks = 0  # how many had parts made

    def __deepcopy__(self, memo: object) -> BatchParts:
        """Copies of a model share the function, as it may hold a process group."""
        return BatchParts(self.usual, self._layout_of)

    def of(self, batch: dict[str, Any]) -> Parts:
        """Return the parts of a batch. batch: a forward's arguments by their names.

        Raises:
            ValueError: labels are given with a mask of which the model's loss knows nothing, or a layout is
                not one of the model's group.
        """
        own = self.usual
        mask = next((x for x in batch.values() if isinstance(x, Spans) and x.layout is not None), None)
        if mask is not None and mask.layout is not None:
            if batch.get("labels") is not None:
                raise ValueError(
                    f"{forward_on(own)}: labels are given with the mask of a prefix tree, of whose places "
                    "the model's loss would be the mean; expected no labels: pass the logits and "
                    "tree.shard_labels() to spar.token_logprobs"
                )
            if mask.keys < own.world:
                raise ValueError(
                    f"{forward_on(own)}: the prefix tree has {mask.keys} tokens; expected at least "
                    f"{own.world}, one for each rank: merge more samples into a row"
                )
            self._check("the mask's layout is", mask.layout)
            layout, key = mask.layout, (self, own.method)
            # As long as the tree.
            made: Parts = mask.remember(key, lambda: self._parts(layout, mask))
            return made
        if self._layout_of is None:
            return own
        layout = self._layout_of(batch)
        self._check("the function layout= returned", layout)
        key_of = layout.kind, layout.numbers
        if key_of not in self._made:
            if len(self._made) >= _MOST:
                self._made.clear()
            self._made[key_of] = self._parts(layout, None)
        return self._made[key_of]

    def has_many_masks(self) -> bool:
        """Whether parts were made for many masks since this was so: what was planned is then dropped."""
        if self._masks <= _MOST_MASKS:
            return False
        self._masks = 0
        return True

    def _check(self, told: str, layout: Any) -> None:
        own = self.usual
        is_known = isinstance(layout, SequenceLayout) and layout.kind != "hybrid" and own.state is None
        if not is_known or layout.group is not own.group:
            raise ValueError(
                f"{forward_on(own)}: {told} {layout!r:.200}; expected a SequenceLayout of the model's group, "
                'none of ring x ulysses, and a method other than "hybrid"'
            )

    def _parts(self, layout: SequenceLayout, mask: Spans | None) -> Parts:
        # Documents are the model's concern: here a layout says where tokens are.
        own, placed = self.usual, placement(layout)
        self._masks += mask is not None
        return Parts(own.group, own.world, own.rank, own.method, None, placed, mask)


def check_read(view: View, model: nn.Module, batch: dict[str, Any]) -> None:
    """Refuse spans that a layer did not read: tokens would see others than they say, in silence."""
    spans = [name for name, x in batch.items() if isinstance(x, Spans)]
    if not spans:
        return
    read, parts, kind = view.spans_read, view.parts, type(model).__name__
    if not read.masks + read.along or read.along < read.layers:
        raise ValueError(
            f"{forward_on(parts)}: {spans[0]} is Spans, "
            f"which {'some' if read.masks else 'all'} layers of the {kind} ignore; expected none for it"
        )
    if not read.masks or parts.mask is None:
        return
    if batch.get("position_ids") is None:
        raise ValueError(
            "position_ids are not given with the mask of a prefix tree, so the model numbers tokens by "
            "their places; expected tree.position_ids, as in tree.batch()"
        )
    if not _takes_positions(frozenset(type(module) for module in model.modules())):
        raise ValueError(
            f"position_ids are those of a prefix tree, and no module of the {kind} takes any: it numbers "
            "tokens by their places; expected samples without a tree: spar.data.PackedSamples or padding"
        )


@functools.lru_cache(64)
def _takes_positions(kinds: frozenset[type]) -> bool:
    """Whether a module takes position_ids beside its mask; embeddings that do so alone may get none."""
    wanted = {"attention_mask", "position_ids"}
    forwards: list[Any] = [kind.forward for kind in kinds]  # type: ignore[attr-defined]
    return any(wanted <= inspect.signature(each).parameters.keys() for each in forwards)
