# SPDX-License-Identifier: Apache-2.0
"""The operations that are timed: spar's functions, and the usual formulations, for each size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import spar

from ..printing import KIB
from . import formulations

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


def each(function: Callable[[Tensor], Tensor]) -> Callable[..., list[Tensor]]:
    """Call the function for one input after another."""
    return lambda *inputs: [function(x) for x in inputs]


def operations(size: int) -> list[Operation]:
    """Return the operations on bf16 tensors of which each rank's part has about `size` bytes."""
    return [*_heads(size), *_sequences(size), *_transposes(size)]


def _heads(size: int) -> list[Operation]:
    world = dist.get_world_size()
    heads = -(-(8 if size == SMALLEST else 24) // world) * world  # the references need a multiple
    tokens = max(1, round(size / (heads * 256)))
    qkv = tuple(torch.randn(1, tokens, heads, 128).to(torch.bfloat16) for _ in range(3))
    query, total = qkv[0], 3 * qkv[0].nbytes

    def exchanged(x: Any) -> Any:
        return spar.all_to_all(x, None, 2, 1)

    return [
        Operation("all_to_all", exchanged, formulations.all_to_all, (query,), query.nbytes, query.nbytes),
        Operation(
            "Q, K, V at once",
            lambda *inputs: exchanged(inputs),
            each(formulations.all_to_all),
            qkv,
            total,
            total,
            each(exchanged),
            "three exchanges",
        ),
    ]


def _rows(size: int) -> tuple[Tensor, Tensor]:
    """Return a tensor that all ranks have, and this rank's part of it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    width = 256 if size == SMALLEST else 3072
    # divisible into two chunks, and into sequences, on each rank
    rows = max(4, round(size / (2 * width)) // 4 * 4)
    whole = torch.randn(rows * world, width, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    return whole, whole[rank * rows : (rank + 1) * rows].clone()


def _sequences(size: int) -> list[Operation]:
    world = dist.get_world_size()
    whole, own = _rows(size)
    part, total = own.nbytes, whole.nbytes
    lengths = [len(own) // 4 * world] * 4
    table = spar.cal_split_sizes_multi(lengths, world)
    split: Sequence[tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        ("split", lambda x: spar.split_forward_gather_backward(x, None, 0), formulations.split),
        (  # compare with the one before: the cost of a fused scale
            "unscaled split",
            lambda x: spar.split_forward_gather_backward(x, None, 0, grad_scale=None),
            formulations.unscaled_split,
        ),
        (
            "zigzag split",
            lambda x: spar.load_balanced_split_forward_gather_backward(x, None),
            formulations.zigzag_split,
        ),
        (
            "packed split",
            lambda x: spar.packed_data_split_forward_gather_backward(x, None, lengths),
            lambda x: formulations.packed_split(x, lengths),
        ),
    ]
    gather: Sequence[tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        ("gather", lambda x: spar.gather_forward_split_backward(x, None, 0), formulations.gather),
        (
            "zigzag gather",
            lambda x: spar.load_balanced_gather_forward_split_backward(x, None),
            formulations.zigzag_gather,
        ),
        (
            "packed gather",
            lambda x: spar.packed_data_gather_forward_split_backward(x, table, None),
            lambda x: formulations.packed_gather(x, lengths),
        ),
    ]
    return [Operation(name, ours, theirs, (whole,), part, total) for name, ours, theirs in split] + [
        Operation(name, ours, theirs, (own,), total, part) for name, ours, theirs in gather
    ]


def _transposes(size: int) -> list[Operation]:
    whole, own = _rows(size)
    layout = spar.SequenceLayout.zigzag(len(whole))
    summand = own + dist.get_rank()
    return [
        Operation("all_gather", spar.all_gather, formulations.all_gather, (own,), whole.nbytes, whole.nbytes),
        Operation(
            "zigzag all_gather",
            lambda x: spar.all_gather(x, layout=layout),
            formulations.zigzag_all_gather,
            (own,),
            whole.nbytes,
            whole.nbytes,
            spar.all_gather,
            "plain",
        ),
        Operation(
            "reduce_scatter",
            spar.reduce_scatter,
            formulations.reduce_scatter,
            (summand,),
            summand.nbytes,
            summand.nbytes,
        ),
    ]
