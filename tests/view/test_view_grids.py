# SPDX-License-Identifier: Apache-2.0
"""Functions of grids, whose rows lie on the ranks: exact against whole tensors, and none runs whole."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import view_cases
from helpers.averages import averaged
from helpers.view_cases import Inputs, compare, compiled
from torch import Tensor, nn

import spar
from spar._model.part import Parts
from spar._model.view import View

pytestmark = [pytest.mark.one_transport]


def check_grids(rank: int, world: int, group: dist.ProcessGroup) -> None:
    failures = []
    lines = Path(view_cases.__file__).with_name("grid_expressions.txt").read_text().splitlines()
    for line in lines:
        result = line if "out =" in line else f"out = {line}"
        function = compiled(f"z = x.view(2, 12, 2, 3).permute(0, 3, 1, 2); {result}")
        view = View(Parts(group, world, rank), strict=True)
        view.blocks = 1
        try:
            problem = compare(group, function, ("tokens", "tokens"), Inputs(3), view=view)
        except RuntimeError as error:
            problem = str(error)
        failures += [f"{line}: {problem}"] if problem else []
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_functions_of_grids_are_exact_on_parts(ranks: Ranks, world: int) -> None:
    """On 7 ranks some have no row of a result."""
    ranks(world, check_grids)


class Levels(nn.Module):
    """Levels of an image, of which the coarsest has a quarter of the rows, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(2, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)])
        self.qkv = nn.Linear(4, 12)
        self.up = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        for down in self.down:
            x = down(x).relu()
        q, k, v = self.qkv(x.flatten(2).mT).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v).mT.view_as(x)
        x = nn.functional.interpolate(self.up[0](x), scale_factor=2)
        return nn.functional.pixel_shuffle(self.up[1](x), 2)


def check_dims(rank: int, world: int, group: dist.ProcessGroup) -> None:
    for height, width in ((20, 44), (6, 64), (64, 5), (3, 50), (24, 24)):
        torch.manual_seed(0)
        model = Levels().double()
        whole, x = copy.deepcopy(model), torch.randn(1, 2, height, width, dtype=torch.float64)
        report = spar.parallelize(model, group, blocks=[""], strict=True)
        expected, found = whole(x), model(x)
        for out in (expected, found):
            out.square().mean().backward()
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
        own = averaged([p.grad for p in model.parameters() if p.grad is not None], group)
        torch.testing.assert_close(own, [p.grad for p in whole.parameters()], atol=1e-12, rtol=1e-10)
        assert report.share < 1.25 / world, (height, width, report)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_images_are_divided_by_their_longer_side_where_the_rows_are_few(ranks: Ranks, world: int) -> None:
    ranks(world, check_dims)


def check_lines(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Of sounds [N, C, L], where [B, S, D] would be sequences."""
    torch.manual_seed(0)
    layers = nn.Conv1d(3, 4, 7, 4, 3), nn.ELU(), nn.BatchNorm1d(4), nn.ConvTranspose1d(4, 3, 8, 4, 2)
    model = nn.Sequential(*layers).double()
    whole, x = copy.deepcopy(model), torch.randn(2, 3, 50, dtype=torch.float64)
    report = spar.parallelize(model, group, blocks=[""], strict=True)
    torch.testing.assert_close(model(x), whole(x), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(model.state_dict(), whole.state_dict())
    assert report.share < 1.1 / world


def test_lines_are_divided_along_their_length(ranks: Ranks) -> None:
    ranks(3, check_lines)
