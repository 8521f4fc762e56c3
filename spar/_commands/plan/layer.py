# SPDX-License-Identifier: Apache-2.0
"""The attention layer that is planned, and how its sequence can lie on the ranks."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..._attention.spans import Spans
from ...sequence_layout import SequenceLayout
from ...topology.groups_by_name import ParallelState

# Whose tokens attend to their own document without a mask.
OF_DOCUMENTS = "packed", "balanced"
HYBRID = "hybrid"


@dataclass(frozen=True)
class Layer:
    """What is planned.

    Attributes:
        heads, key_heads, width: of the attention.
        value_width: of a head's values.
        tokens: of the whole sequence, all documents together.
        ranks: that share it.
        layers: of the model.
        dtype: of activations.
        batch: sequences of a step on the same ranks.
        hidden: width of the hidden states between layers.
        ring, ulysses: the ranks of a hybrid layout; 1 and 1 if there is none.
        window: how many of the newest keys a query attends to; None: all.
        documents: lengths; empty if the sequence is one.
        causal: whether a query attends to no key behind it.
    """

    heads: int
    key_heads: int
    width: int
    value_width: int
    tokens: int
    ranks: int
    layers: int
    dtype: torch.dtype
    batch: int
    hidden: int
    ring: int
    ulysses: int
    window: int | None
    documents: tuple[int, ...]
    causal: bool

    @property
    def sides(self) -> tuple[int, int] | None:
        """`window` of `spar.attention`."""
        if self.window is None:
            return None
        return self.window - 1, 0 if self.causal else self.window - 1

    @property
    def kinds(self) -> tuple[str, ...]:
        """The layouts of one group that this sequence can have."""
        return ("even", "zigzag", *OF_DOCUMENTS) if self.documents else ("even", "zigzag")

    def mask(self, kind: str) -> Spans | None:
        """Return the mask that keeps documents apart where the layout does not."""
        return _apart(self.documents) if self.documents and kind not in OF_DOCUMENTS else None


# One object for all ranks and layouts: it remembers the blocks that follow from it.
@functools.lru_cache(1)
def _apart(documents: tuple[int, ...]) -> Spans:
    lengths = torch.tensor(documents, device="cpu")
    return Spans.documents(torch.arange(len(documents), device="cpu").repeat_interleave(lengths))


@dataclass(frozen=True)
class Placed:
    """A layout as one rank has it, over process groups that have no backend and exchange nothing.

    Attributes:
        layout: of the whole sequence.
        group: of all ranks, to which the layout refers only by its id.
        ulysses, ring: the groups of a hybrid layout, else None.
    """

    layout: SequenceLayout
    group: dist.ProcessGroup
    ulysses: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None


def placed(layer: Layer, kind: str, rank: int) -> Placed:
    """Lay the sequence out for a rank; ring ranks are neighbours, as in groups of `init_parallel_state`."""
    # Not in torch's stubs: without a store.
    make_group: Any = dist.ProcessGroup
    group = make_group(rank, layer.ranks)
    if kind == HYBRID:
        ulysses = make_group(rank // layer.ring, layer.ulysses)
        ring = make_group(rank % layer.ring, layer.ring)
        groups = {"cp": group, "ulysses": ulysses, "ring": ring}
        state = ParallelState(groups=groups, cp_neighbours="ring")
        return Placed(SequenceLayout.hybrid(layer.tokens, state), group, ulysses, ring)
    makers = {
        "even": lambda: SequenceLayout.even(layer.tokens, group),
        "zigzag": lambda: SequenceLayout.zigzag(layer.tokens, group),
        "packed": lambda: SequenceLayout.packed(layer.documents, group),
        "balanced": lambda: SequenceLayout.balanced(layer.documents, group),
    }
    return Placed(makers[kind](), group)


def drawn_documents(tokens: int, mean: int) -> tuple[int, ...]:
    """Return lengths that sum to `tokens`, exponentially distributed around `mean`, the same each time."""
    draw, lengths, left = random.Random(0), [], tokens
    while left > 0:
        lengths.append(min(left, 1 + int(draw.expovariate(1 / mean))))
        left -= lengths[-1]
    return tuple(lengths)
