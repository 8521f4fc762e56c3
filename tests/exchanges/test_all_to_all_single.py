# SPDX-License-Identifier: Apache-2.0
"""all_to_all_single: free counts for each pair of ranks, beside torch.distributed's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.reference import assert_same, cells

import spar

Group = dist.ProcessGroup


def theirs(x: torch.Tensor, counts: list[list[int]], rank: int, group: Group) -> torch.Tensor:
    sizes = [row[rank] for row in counts]
    received = x.new_empty(sum(sizes), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), sizes, counts[rank], group)
    return received


def check_counts(rank: int, world: int, group: Group) -> None:
    draw = random.Random(world)
    for dtype in (torch.float32, torch.int64, torch.bfloat16) * 4:
        most = draw.choice([0, 3, 9])
        counts = [[draw.randint(0, most) * draw.randint(0, 1) for _ in range(world)] for _ in range(world)]
        x = cells((sum(counts[rank]), 3), dtype, rank)
        expected = theirs(x, counts, rank, group)
        given = draw.choice([counts, torch.tensor(counts), [torch.tensor(row) for row in counts]])
        assert_same(spar.all_to_all_single(x, given, group), expected)
        assert_same(spar.all_to_all_single(x.T, given, group, -1), expected.T)
        if dtype.is_floating_point:
            leaf, upper = x.clone().requires_grad_(), cells(expected.shape, dtype, world + rank)
            y = spar.all_to_all_single(leaf, given, group)
            (grad,) = torch.autograd.grad(y, leaf, upper, create_graph=True)
            back = [list(column) for column in zip(*counts, strict=True)]
            assert_same(grad.detach(), theirs(upper, back, rank, group))
    # Each rank's own counts, which is what torch.distributed takes.
    own = torch.tensor(counts[rank])
    table = spar.all_gather(own[None], group)
    assert_same(spar.all_to_all_single(x, table, group), expected)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_counts_beside_torch(ranks: Ranks, world: int) -> None:
    ranks(world, check_counts)


def check_errors(rank: int, world: int, group: Group) -> None:
    x = torch.ones(5, 2)
    bad: list[tuple[Any, type[Exception], str]] = [
        ([[2, 3]], ValueError, r"split_sizes is \[\[2, 3\]\]; expected 2 rows"),
        (None, ValueError, "split_sizes is None; expected 2 rows"),
        ([[2, 3], None], ValueError, r"split_sizes\[1\] is \[\]; expected 2 sizes, one for each rank"),
        ([[2, 3], [5]], ValueError, r"split_sizes\[1\] is \[5\]; expected 2 sizes"),
        ([[2, 3], [6, -1]], ValueError, r"split_sizes\[1\] is \[6, -1\]; expected ints of at least 0"),
        ([[2, 3.0], [5, 0]], ValueError, r"split_sizes\[0\] is \[2, 3.0\]; expected ints"),
        (torch.ones(2, 2), TypeError, r"split_sizes\[0\] is a tensor of torch.float32"),
        ([[2, 2], [2, 2]], ValueError, f"whose row {rank} sums to 4; expected 5, the size of dim 0"),
    ]
    for given, kind, text in bad:
        with pytest.raises(kind, match=f"all_to_all_single on rank {rank} of 2: .*{text}"):
            spar.all_to_all_single(x, given, group)
    with pytest.raises(spar.MismatchError, match="calls differ between"):
        spar.all_to_all_single(x, [[2, 3], [4, 1] if rank else [3, 2]], group)
    with pytest.raises(spar.MismatchError if rank else ValueError, match="sums to 4"):
        spar.all_to_all_single(x, [[2, 3 - (rank == 0)], [4, 1]], group)
    assert spar.all_to_all_single(x, [[0, 5], [5, 0]], group).sum() == 10
    meta = spar.all_to_all_single(x.to("meta"), [[1, 4], [1, 4]], group)
    assert meta.is_meta and meta.shape == ((2, 8)[rank], 2)


@pytest.mark.one_transport
def test_wrong_or_unequal_counts_raise(ranks: Ranks) -> None:
    ranks(2, check_errors)
