# SPDX-License-Identifier: Apache-2.0
"""Functions of grids, whose rows lie on the ranks: exact against whole tensors, and none runs whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import Ranks
from helpers import view_cases
from helpers.view_cases import Inputs, compare, compiled

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
