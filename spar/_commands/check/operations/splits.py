"""Cases of the splits and gathers with MindSpeed-MM's names, and of those around them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import spar

from ..shards import (
    DOCUMENTS,
    Call,
    documents,
    even,
    gather,
    hybrid,
    multiple,
    packed,
    packed_hybrid,
    split,
    zigzag,
)
from ..trial import OWN, Case, Setting, Tensors, Trial, numbers


def split_cases() -> list[Case]:
    def in_topology(function: Callable[..., Tensor]) -> Call:
        def call(s: Setting, total: int, x: Tensor) -> Tensor:
            with s.topology:
                return function(x, total)

        return call

    def own_sizes(total: int, s: Setting) -> list[int]:
        return [len(i) for i in even(total, s)]

    def unpadded(s: Setting) -> Trial:
        each, padding = 4, 2
        parts = [[numbers(2, each, 3, seed=rank)] for rank in range(s.world)]

        def reference(inputs: list[Tensors]) -> list[Tensors]:
            return [[torch.cat([own[0] for own in inputs], 1)[:, : each * s.world - padding]]] * s.world

        return Trial(
            parts,
            lambda x: spar.gather_forward_split_backward_and_unpad(x, s.group, 1, padding, 1),
            reference,
            OWN,
        )

    def reordered(s: Setting) -> Trial:
        total = multiple(s.world)
        order = torch.cat(zigzag(total, s)).argsort()
        x = numbers(2, total, 3)
        return Trial(
            [[x]] * s.world,
            lambda x: spar.reorder_output(x, s.rank, s.world, s.group, 1),
            lambda inputs: [[own[0].index_select(1, order)] for own in inputs],
            OWN,
        )

    lengths = list(DOCUMENTS)
    return [
        Case(
            "split_forward_gather_backward",
            "uneven",
            split(lambda s, total, x: spar.split_forward_gather_backward(x, s.group, 1), even),
        ),
        Case(
            "gather_forward_split_backward",
            "uneven",
            gather(
                lambda s, total, x: spar.gather_forward_split_backward(x, s.group, 1, own_sizes(total, s)),
                even,
            ),
        ),
        Case(
            "load_balanced_split_forward_gather_backward",
            "zigzag",
            split(
                lambda s, total, x: spar.load_balanced_split_forward_gather_backward(x, s.group, 1),
                zigzag,
                multiple,
            ),
        ),
        Case(
            "load_balanced_gather_forward_split_backward",
            "zigzag",
            gather(
                lambda s, total, x: spar.load_balanced_gather_forward_split_backward(x, s.group, 1),
                zigzag,
                multiple,
            ),
        ),
        Case(
            "packed_data_split_forward_gather_backward",
            "uneven",
            split(
                lambda s, total, x: spar.packed_data_split_forward_gather_backward(x, s.group, lengths, 1),
                packed,
                documents,
            ),
        ),
        Case(
            "packed_data_gather_forward_split_backward",
            "uneven",
            gather(
                lambda s, total, x: spar.packed_data_gather_forward_split_backward(
                    x, spar.cal_split_sizes_multi(lengths, s.world), s.group, 1
                ),
                packed,
                documents,
            ),
        ),
        Case(
            "split_forward_gather_backward_with_cp",
            "ring x ulysses",
            split(
                in_topology(lambda x, total: spar.split_forward_gather_backward_with_cp(x, 1)),
                hybrid,
                multiple,
            ),
        ),
        Case(
            "gather_forward_split_backward_with_cp",
            "ring x ulysses",
            gather(
                in_topology(lambda x, total: spar.gather_forward_split_backward_with_cp(x, 1, total)),
                hybrid,
                multiple,
            ),
        ),
        Case(
            "packed_data_split_forward_gather_backward_with_cp",
            "ring x ulysses",
            split(
                in_topology(
                    lambda x, total: spar.packed_data_split_forward_gather_backward_with_cp(x, 1, lengths)
                ),
                packed_hybrid,
                documents,
            ),
        ),
        Case(
            "packed_data_gather_forward_split_backward_with_cp",
            "ring x ulysses",
            gather(
                in_topology(
                    lambda x, total: spar.packed_data_gather_forward_split_backward_with_cp(x, 1, lengths)
                ),
                packed_hybrid,
                documents,
            ),
        ),
        Case("gather_forward_split_backward_and_unpad", "", unpadded),
        Case("reorder_output", "", reordered),
    ]
