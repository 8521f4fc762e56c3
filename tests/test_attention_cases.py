# SPDX-License-Identifier: Apache-2.0
"""spar.attention with random masks, spans, windows, sinks and caps against one process in float64."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from conftest import Ranks
from helpers.attention_cases import LIMITS, error_of_rank, make_case, whole

pytestmark = pytest.mark.one_transport
CASES = 40


def check_cases(rank: int, world: int, group: dist.ProcessGroup, begin: int, count: int) -> None:
    for seed in range(begin, begin + count):
        case = make_case(seed, world)
        error = error_of_rank(case, group, whole(case))
        method = case.keywords["method"]
        assert error < LIMITS[case.dtype], (seed, method, case.parts, case.dtype, case.tile, error)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_attentions_match_one_process(ranks: Ranks, world: int) -> None:
    ranks(world, check_cases, 1000 * world, CASES)
