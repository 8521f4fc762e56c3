# SPDX-License-Identifier: Apache-2.0
"""Cases of each kind of SequenceLayout, and of its methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

import spar

from ..shards import (
    DOCUMENTS,
    Index,
    Indexed,
    Make,
    Total,
    add,
    any_total,
    documents,
    even,
    exact_gather,
    gather,
    hybrid,
    packed,
    split,
    zigzag,
)
from ..trial import NO_GRADIENT, Case, Setting, Trial


class Layout(NamedTuple):
    """A maker of SequenceLayout: the layout of a total, where each rank's tokens lie, and a total."""

    make: Callable[[Setting, int], spar.SequenceLayout]
    places: Indexed
    total: Total = any_total


def _own_size(s: Setting, total: int) -> int:
    return len(even(total, s)[s.rank])


def _joint(total: int, s: Setting) -> Index:
    text, image = torch.arange(total).split([5, total - 5])
    parts = zip(text.tensor_split(s.world), image.tensor_split(s.world), strict=True)
    return [torch.cat(part) for part in parts]


LAYOUTS = {
    "even": Layout(lambda s, total: spar.SequenceLayout.even(total, s.group), even),
    "zigzag": Layout(lambda s, total: spar.SequenceLayout.zigzag(total, s.group), zigzag),
    "packed": Layout(lambda s, total: spar.SequenceLayout.packed(DOCUMENTS, s.group), packed, documents),
    "joint": Layout(lambda s, total: spar.SequenceLayout.joint(5, total - 5, s.group), _joint),
    "from_local": Layout(lambda s, total: spar.SequenceLayout.from_local(_own_size(s, total), s.group), even),
    "hybrid": Layout(lambda s, total: spar.SequenceLayout.hybrid(total, s.state), hybrid),
}


def layout_cases() -> list[Case]:
    return [
        Case(f"SequenceLayout.{name}", way, make)
        for name, layout in LAYOUTS.items()
        for way, make in _ways(*layout).items()
    ]


def _ways(
    layout: Callable[[Setting, int], spar.SequenceLayout], index: Indexed, total: Total
) -> dict[str, Make]:
    """Return what each method of a layout must do."""

    def places(s: Setting) -> Trial:
        size = total(s.world)
        return Trial(
            [[]] * s.world,
            lambda: [layout(s, size).index().clone()],
            lambda inputs: [[i] for i in index(size, s)],
            NO_GRADIENT,
        )

    return {
        "index": places,
        "shard": split(lambda s, size, x: layout(s, size).shard(x, 1, None), index, total, scaled=False),
        "gather": gather(lambda s, size, x: layout(s, size).gather(x, 1, None), index, total, scaled=False),
        "all_gather": exact_gather(lambda s, size, x: layout(s, size).all_gather(x, 1), index, total),
        "reduce_scatter": add(lambda s, size, x: layout(s, size).reduce_scatter(x, 1), index, total),
    }
