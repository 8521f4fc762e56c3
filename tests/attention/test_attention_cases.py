# SPDX-License-Identifier: Apache-2.0
"""spar.attention with random masks, spans, windows, sinks and caps against one process in float64."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from conftest import Ranks
from helpers.attention_cases import LIMITS, error_of_rank, make_case, whole
from helpers.orders import ORDERS
from helpers.processes import finish, start

pytestmark = pytest.mark.one_transport
CASES = int(os.environ.get("SOAK_ATTENTIONS", "40"))
BEGIN = int(os.environ.get("SOAK_SEED", "0"))


def check_cases(rank: int, world: int, group: dist.ProcessGroup, begin: int, count: int) -> None:
    check_with(world, group, None, begin, count)


def check_with(world: int, group: dist.ProcessGroup, state: Any, begin: int, count: int) -> None:
    for seed in range(begin, begin + count):
        case = make_case(seed, world, state is not None)
        what = seed, case.keywords["method"], case.parts, case.dtype, case.tile
        try:
            error = error_of_rank(case, group, whole(case), state)
        except BaseException as failure:
            raise AssertionError(what) from failure
        assert error < LIMITS[case.dtype], (*what, error)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_attentions_match_one_process(ranks: Ranks, world: int) -> None:
    ranks(world, check_cases, BEGIN + 1000 * world, CASES, timeout=60 + CASES)


def check_hybrid(rank: int, folder: Path, order: str) -> None:
    state = ORDERS[order][0]()
    group = state.get_group("cp")
    assert group is not None
    check_with(4, group, state, BEGIN + 5000, CASES)
    dist.barrier()


@pytest.mark.parametrize("order", ["init_parallel_state", "mesh of ring x ulysses"])
def test_random_attentions_in_hybrid_layouts(tmp_path: Path, order: str) -> None:
    assert finish(start(check_hybrid, 4, tmp_path, order), 100 + CASES) == [0] * 4
