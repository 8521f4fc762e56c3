# SPDX-License-Identifier: Apache-2.0
"""The operations that are timed: spar's functions, and the usual formulations, for each size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import spar

from ..printing import KIB
from . import formulations as usual

SMALLEST = 2 * KIB


@dataclass(frozen=True)
class Operation:
    """spar's function of the inputs and the formulation's; both return a tensor, or a list of them.

    other: spar in another way, for comparison, which is timed, too; `other_name` says which.
    """

    name: str
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    written: int  # bytes that one rank must write, forward; for a sum those of its input
    written_back: int  # the same, backward
    other: Callable[..., Any] | None = None
    other_name: str = ""


def operations(size: int) -> list[Operation]:
    """Return the operations on bf16 tensors of which each rank's part has about `size` bytes."""
    world, rank, small = dist.get_world_size(), dist.get_rank(), size == SMALLEST
    heads = -(-(8 if small else 24) // world) * world  # the references need a multiple
    tokens = max(1, round(size / (heads * 256)))
    query, *keys_and_values = (torch.randn(1, tokens, heads, 128).to(torch.bfloat16) for _ in range(3))
    width = 256 if small else 3072
    # divisible into two chunks, and into sequences, on each rank
    rows = max(4, round(size / (2 * width)) // 4 * 4)
    whole = torch.randn(rows * world, width, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    local = whole[rank * rows : (rank + 1) * rows].clone()
    lengths = [rows // 4 * world] * 4
    table, layout = spar.cal_split_sizes_multi(lengths, world), spar.SequenceLayout.zigzag(len(whole))
    # every fourth row, other ones on each of four ranks
    wanted = spar.SequenceLayout.even(len(whole), dist.group.WORLD).rows(
        torch.arange(rank % 4, len(whole), 4)
    )

    def exchanged(x: Any) -> Any:
        return spar.all_to_all(x, None, 2, 1)

    # the inputs of each kind, and the bytes written forward and backward
    exchange = (query,), query.nbytes, query.nbytes
    three = (query, *keys_and_values), 3 * query.nbytes, 3 * query.nbytes
    split = (whole,), local.nbytes, whole.nbytes
    gather = (local,), whole.nbytes, local.nbytes
    concat = (local,), whole.nbytes, whole.nbytes
    summed = (local + rank,), local.nbytes, local.nbytes
    return [
        Operation("all_to_all", exchanged, usual.all_to_all, *exchange),
        Operation(
            "Q, K, V at once",
            lambda *x: exchanged(x),
            lambda *x: list(map(usual.all_to_all, x)),
            *three,
            lambda *x: list(map(exchanged, x)),
            "three exchanges",
        ),
        Operation("split", lambda x: spar.split_forward_gather_backward(x, None, 0), usual.split, *split),
        # compare with the one before: the cost of a fused scale
        Operation(
            "unscaled split",
            lambda x: spar.split_forward_gather_backward(x, None, 0, grad_scale=None),
            usual.unscaled_split,
            *split,
        ),
        Operation(
            "zigzag split",
            lambda x: spar.load_balanced_split_forward_gather_backward(x, None),
            usual.zigzag_split,
            *split,
        ),
        Operation(
            "packed split",
            lambda x: spar.packed_data_split_forward_gather_backward(x, None, lengths),
            lambda x: usual.packed_split(x, lengths),
            *split,
        ),
        Operation("gather", lambda x: spar.gather_forward_split_backward(x, None, 0), usual.gather, *gather),
        Operation(
            "zigzag gather",
            lambda x: spar.load_balanced_gather_forward_split_backward(x, None),
            usual.zigzag_gather,
            *gather,
        ),
        Operation(
            "packed gather",
            lambda x: spar.packed_data_gather_forward_split_backward(x, table, None),
            lambda x: usual.packed_gather(x, lengths),
            *gather,
        ),
        Operation("all_gather", spar.all_gather, usual.all_gather, *concat),
        Operation(
            "zigzag all_gather",
            lambda x: spar.all_gather(x, layout=layout),
            usual.zigzag_all_gather,
            *concat,
            spar.all_gather,
            "plain",
        ),
        Operation(
            "indexed rows",
            wanted.gather,
            usual.indexed_rows,
            (local,),
            local.nbytes // 4 * world,
            local.nbytes // 4 * world,
        ),
        Operation("reduce_scatter", spar.reduce_scatter, usual.reduce_scatter, *summed),
    ]
