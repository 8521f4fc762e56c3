# SPDX-License-Identifier: Apache-2.0
"""The choice between push and nccl by time, over stand-in libraries: what is timed, and what is taken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import Ranks, standin_ranks
from helpers import trial_ranks


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    """Ranks that have loaded the stand-ins, for all tests of the module."""
    yield from standin_ranks((3,))


TIMES = {
    "push is faster": ({"push": 1.0, "nccl": 2.0}, "push"),
    "nccl is faster": ({"push": 2.0, "nccl": 1.0}, "nccl"),
    "equal": ({"push": 1.0, "nccl": 1.0}, "push"),
    "nccl is faster by less than the margin": ({"push": 1.0, "nccl": 0.95}, "push"),
    "ranks differ": ({"push": (1.0, 3.0, 1.0), "nccl": (2.0, 2.0, 2.0)}, "nccl"),
}


@pytest.mark.parametrize("case", TIMES)
def test_faster_one_serves(gpus: Ranks, case: str) -> None:
    gpus(3, trial_ranks.check_times, *TIMES[case])


@pytest.mark.parametrize("check", ["", "1"])
def test_nccl_is_timed_over_a_slow_link(gpus: Ranks, check: str) -> None:
    assert len(set(gpus(3, trial_ranks.check_true_times, check))) == 1


def test_nccl_is_not_timed_where_that_needs_a_communicator(gpus: Ranks) -> None:
    gpus(3, trial_ranks.check_fast_link)


def test_short_calls_show_no_slow_link(gpus: Ranks) -> None:
    gpus(3, trial_ranks.check_short_calls)


@pytest.mark.parametrize("setting", ["push", "^nccl"])
def test_settings_decide_without_time(gpus: Ranks, setting: str) -> None:
    gpus(3, trial_ranks.check_forced, setting)


@pytest.mark.parametrize("how", ["set-up", "calls", "stall"])
def test_push_stays_where_nccl_fails(gpus: Ranks, how: str) -> None:
    gpus(3, trial_ranks.check_no_nccl, how)


def test_nccl_serves_where_push_fails(gpus: Ranks) -> None:
    gpus(3, trial_ranks.check_push_fails)


def test_rank_without_memory_keeps_push(gpus: Ranks) -> None:
    gpus(3, trial_ranks.check_no_memory)


def test_interrupt_breaks_the_group_on_all_ranks(gpus: Ranks) -> None:
    gpus(3, trial_ranks.check_interrupt)
    gpus.stop()  # as is their process group
