# SPDX-License-Identifier: Apache-2.0
"""The sequences that one forward has sharded, recognized by how many of its tokens a rank holds."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from ..._group.registry import place_of
from ...sequence_layout import SequenceLayout

_STREAM = "hidden_states"  # the end of the names of features, as against their positions and masks
TEXT = "encoder_hidden_states"


class Sequences:
    """The lengths of the sequences of one forward, by the names of the arguments that are sharded.

    A rank recognizes a tensor's layout by its number of tokens: those of a sequence, or of two that are
    joined. Which of two comes first does not matter: without a causal mask, attention does not depend on the
    order of tokens.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = place_of(group).rank
        self.totals: dict[str, int] = {}
        self._candidates: list[tuple[SequenceLayout, tuple[int, ...]]] | None = None  # with their sizes
        self._ambiguous = False

    def add(self, name: str, total: int) -> SequenceLayout:
        """Note a sequence that is to be sharded; return its layout."""
        if self.totals.get(name) != total:
            self.totals[name] = total
            self._candidates = None
        return SequenceLayout.even(total, self.group)

    @property
    def text(self) -> bool:
        """Whether the text is sharded; else every rank has the whole."""
        return any(name.endswith(TEXT) for name in self.totals)

    def empty(self) -> list[str]:
        """Return the names of the sequences of which this rank has no token."""
        return [
            name
            for name, total in self.totals.items()
            if SequenceLayout.even(total, self.group).sizes[self.rank] == 0
        ]

    def layout_of(self, size: int) -> SequenceLayout | None:
        """Return the layout of which this rank holds so many tokens; None if there is none.

        Collective if a rank would hold equally many tokens by two of the layouts, which all ranks know.
        """
        if self._candidates is None:
            self._candidates = [(layout, layout.sizes) for layout in self._layouts()]
            self._ambiguous = _collide({sizes for _, sizes in self._candidates})
        if self._ambiguous:
            rank_sizes = SequenceLayout.from_local(size, self.group).sizes
            fitting = [layout for layout, sizes in self._candidates if sizes == rank_sizes]
        else:
            fitting = [layout for layout, sizes in self._candidates if sizes[self.rank] == size]
        return fitting[0] if fitting else None

    def _layouts(self) -> list[SequenceLayout]:
        streams = [total for name, total in self.totals.items() if name.endswith(_STREAM)]
        totals = {total for total in self.totals.values() if total not in streams}
        streams += sorted(totals)  # positions and masks of a stream, or a stream of another name
        single = [SequenceLayout.even(total, self.group) for total in streams]
        return single + [SequenceLayout.joint(a, b, self.group) for a, b in combinations(streams, 2)]

    def __str__(self) -> str:
        entries = [f"{name}: {total}" for name, total in self.totals.items()]
        return ", ".join(entries) or "none"


def _collide(sizes: set[tuple[int, ...]]) -> bool:
    """Whether a rank holds equally many tokens by two of these, which differ on another rank."""
    return any(len(set(of_rank)) < len(sizes) for of_rank in zip(*sizes, strict=True))
