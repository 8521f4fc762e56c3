"""Cases of each kind of SequenceLayout, and of its methods."""

from __future__ import annotations

from collections.abc import Callable

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

Maker = Callable[[Setting, int], spar.SequenceLayout]  # of a total


def layout_cases() -> list[Case]:
    def own_size(s: Setting, total: int) -> int:
        return len(even(total, s)[s.rank])

    kinds: dict[str, tuple[Maker, Indexed, Total]] = {
        "even": (lambda s, total: spar.SequenceLayout.even(total, s.group), even, any_total),
        "zigzag": (lambda s, total: spar.SequenceLayout.zigzag(total, s.group), zigzag, any_total),
        "packed": (lambda s, total: spar.SequenceLayout.packed(DOCUMENTS, s.group), packed, documents),
        "joint": (lambda s, total: spar.SequenceLayout.joint(5, total - 5, s.group), _joint, any_total),
        "from_local": (
            lambda s, total: spar.SequenceLayout.from_local(own_size(s, total), s.group),
            even,
            any_total,
        ),
        "hybrid": (lambda s, total: spar.SequenceLayout.hybrid(total, s.state), hybrid, any_total),
    }
    found = []
    for kind, (layout, index, total) in kinds.items():
        found += [
            Case(f"SequenceLayout.{kind}", way, make) for way, make in _ways(layout, index, total).items()
        ]
    return found


def _joint(total: int, s: Setting) -> Index:
    text, image = torch.arange(total).split([5, total - 5])
    parts = zip(text.tensor_split(s.world), image.tensor_split(s.world), strict=True)
    return [torch.cat(part) for part in parts]


def _ways(layout: Maker, index: Indexed, total: Total) -> dict[str, Make]:
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
