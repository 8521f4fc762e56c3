# SPDX-License-Identifier: Apache-2.0
"""Pair tensors [B, N, N, C], sharded by rows: no function runs whole, and no rank receives one whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.traffic import sent
from helpers.view_cases import Inputs, compare, compiled, functions, viewed
from torch import Tensor

from spar._group.registry import place_of
from spar._model.part import Parts, part_of
from spar._model.view import View

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
TAKEN_WHOLE = "biic"  # a diagonal of rows and columns


def check_strict(rank: int, world: int, group: Group) -> None:
    place = place_of(group)
    lines = [line for line in functions() if "x[:, :, None]" in line and TAKEN_WHOLE not in line]
    assert len(lines) > 6
    for line in lines:
        view = View(Parts(group, place.world, place.rank), strict=True)
        view.blocks = 1
        problem = compare(group, compiled(line), ("tokens", "tokens"), Inputs(3), view=view)
        assert problem is None, f"{line}: {problem}"


@pytest.mark.parametrize("world", [2, 4])
def test_functions_of_pairs_run_on_parts(ranks: Ranks, world: int) -> None:
    ranks(world, check_strict)


def pairs(x: Tensor) -> Tensor:
    return x[:, :, None] * x[:, None]


# By name: the function of z [2, 12, 12, 6], and what a rank may receive, in units of its share of z.
RECEIVED: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "outgoing": (lambda z: torch.einsum("bikd,bjkd->bijd", z, z + 1), 3.0),
    "incoming": (lambda z: torch.einsum("bkid,bkjd->bijd", z, z + 1), 3.0),
    "matrices": (lambda z: (z.permute(0, 3, 1, 2) @ z.permute(0, 3, 2, 1)).permute(0, 2, 3, 1), 3.0),
    "transposed": (lambda z: z.transpose(1, 2), 1.0),
    "added to its transpose": (lambda z: z + z.transpose(1, 2), 1.0),
    "a row": (lambda z: z * z[:, :1], 1.0),
    "an element": (lambda z: z * z[:, -1, 3, None, None], 0.1),
}


def check_received(rank: int, world: int, group: Group) -> None:
    def run(view: View, x: Tensor) -> None:
        z = pairs(x)
        own = z.numel() * z.element_size()
        for name, (function, most) in RECEIVED.items():
            before = sent()
            out = function(z)
            total = torch.tensor([sent() - before], dtype=torch.int64)
            dist.all_reduce(total, group=group)
            assert int(total) / world <= most * own, name
            assert part_of(out) is view.parts.part(1, (12,)), name

    viewed(group, run)


def test_a_rank_receives_shares_of_pairs(ranks: Ranks) -> None:
    ranks(4, check_received)
