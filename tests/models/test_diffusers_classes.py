# SPDX-License-Identifier: Apache-2.0
"""Each transformer class of diffusers, sharded: outputs and gradients are those of one process."""

from __future__ import annotations

import pytest
from conftest import Ranks
from helpers.diffusion_check import CASES, Outcome, check_classes, classes

PRELOAD = ["diffusers.models.transformers"]
BATCHES = [list(CASES)[at::6] for at in range(6)]

pytestmark = [pytest.mark.one_transport, pytest.mark.long]


def test_each_class_has_a_case() -> None:
    """A class that a later version of diffusers adds needs one."""
    assert {name.split()[0] for name in CASES} == classes()


def wrong(outcomes: list[Outcome]) -> list[Outcome]:
    return [each for each in outcomes if each.verdict != "right"]


@pytest.mark.parametrize("batch", range(len(BATCHES)))
def test_classes_are_exact_and_sharded(ranks: Ranks, batch: int) -> None:
    found = ranks(2, check_classes, BATCHES[batch])
    for outcomes in found:
        assert not wrong(outcomes)
    for each in found[0]:  # rank 0 has the longer part
        assert each.share < CASES[each.name].share, each


@pytest.mark.parametrize("batch", range(0, len(BATCHES), 2))
def test_every_second_class_is_exact_on_three_ranks(ranks: Ranks, batch: int) -> None:
    for outcomes in ranks(3, check_classes, BATCHES[batch]):
        assert not wrong(outcomes)
