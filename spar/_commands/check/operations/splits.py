# SPDX-License-Identifier: Apache-2.0
"""Cases of the splits and gathers with MindSpeed-MM's names, and of those around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import spar

from .. import shards
from ..trial import OWN, Case, Setting, Tensors, Trial, numbers

LENGTHS = list(shards.DOCUMENTS)


def _sizes(s: Setting, total: int) -> list[int]:
    return [len(part) for part in shards.even(total, s)]


def _table(s: Setting) -> Tensor:
    return spar.cal_split_sizes_multi(LENGTHS, s.world)


Arguments = Callable[[Setting, int], Sequence[object]]
Shards = tuple[str, shards.Indexed, shards.Total]  # their name, where the elements lie, and a total
UNEVEN: Shards = ("uneven", shards.even, shards.any_total)
ZIGZAG: Shards = ("zigzag", shards.zigzag, shards.multiple)
PACKED: Shards = ("uneven", shards.packed, shards.documents)
HYBRID: Shards = ("ring x ulysses", shards.hybrid, shards.multiple)
PACKED_HYBRID: Shards = ("ring x ulysses", shards.packed_hybrid, shards.documents)
# the shards of each operation, and what it takes after the tensor
OPERATIONS: dict[str, tuple[Shards, Arguments]] = {
    "split_forward_gather_backward": (UNEVEN, lambda s, total: (s.group, 1)),
    "gather_forward_split_backward": (UNEVEN, lambda s, total: (s.group, 1, _sizes(s, total))),
    "load_balanced_split_forward_gather_backward": (ZIGZAG, lambda s, total: (s.group, 1)),
    "load_balanced_gather_forward_split_backward": (ZIGZAG, lambda s, total: (s.group, 1)),
    "packed_data_split_forward_gather_backward": (PACKED, lambda s, total: (s.group, LENGTHS, 1)),
    "packed_data_gather_forward_split_backward": (PACKED, lambda s, total: (_table(s), s.group, 1)),
    "split_forward_gather_backward_with_cp": (HYBRID, lambda s, total: (1,)),
    "gather_forward_split_backward_with_cp": (HYBRID, lambda s, total: (1, total)),
    "packed_data_split_forward_gather_backward_with_cp": (PACKED_HYBRID, lambda s, total: (1, LENGTHS)),
    "packed_data_gather_forward_split_backward_with_cp": (PACKED_HYBRID, lambda s, total: (1, LENGTHS)),
}


def _case(name: str, variant: str, index: shards.Indexed, total: shards.Total, arguments: Arguments) -> Case:
    def call(s: Setting, size: int, x: Tensor) -> Tensor:
        with s.topology:  # it has the groups of ring x ulysses
            y: Tensor = getattr(spar, name)(x, *arguments(s, size))
            return y

    make = shards.split if "split_forward" in name else shards.gather
    return Case(name, variant, make(call, index, total))


def split_cases() -> list[Case]:
    def unpadded(s: Setting) -> Trial:
        size, padding = 4, 2
        parts = [[numbers(2, size, 3, seed=rank)] for rank in range(s.world)]

        def reference(inputs: list[Tensors]) -> list[Tensors]:
            whole = torch.cat([own[0] for own in inputs], 1)
            return [[whole[:, : size * s.world - padding]]] * s.world

        return Trial(
            parts,
            lambda x: spar.gather_forward_split_backward_and_unpad(x, s.group, 1, padding, 1),
            reference,
            OWN,
        )

    def reordered(s: Setting) -> Trial:
        total = shards.multiple(s.world)
        order = torch.cat(shards.zigzag(total, s)).argsort()
        x = numbers(2, total, 3)
        return Trial(
            [[x]] * s.world,
            lambda x: spar.reorder_output(x, s.rank, s.world, s.group, 1),
            lambda inputs: [[own[0].index_select(1, order)] for own in inputs],
            OWN,
        )

    return [
        *(_case(name, *held, arguments) for name, (held, arguments) in OPERATIONS.items()),
        Case("gather_forward_split_backward_and_unpad", "", unpadded),
        Case("reorder_output", "", reordered),
    ]
