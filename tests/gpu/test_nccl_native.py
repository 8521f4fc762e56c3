# SPDX-License-Identifier: Apache-2.0
"""The nccl transport over torch's communicators, of both of torch's classes: pointers, limits, watchdogs.

The stand-ins end a process that torch's watchdog would end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Ranks, standin_ranks
from helpers import nccl_native


@pytest.fixture(scope="module", params=["0", "1"], ids=["ProcessGroupNCCL", "ProcessGroupNCCL2"])
def gpus(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Ranks of a torch with this class."""
    yield from standin_ranks((2, 3), TORCH_DIST_USE_NCCL2=request.param, STANDIN_DEVICES="3")


def test_public_property_is_preferred(gpus: Ranks) -> None:
    gpus(2, nccl_native.check_pointer)


def test_several_groups_have_communicators_of_torch(gpus: Ranks) -> None:
    gpus(3, nccl_native.check_several)


# ---- collectives that spar issues on torch's group ----


def test_limit_of_a_collective_on_a_device_leaves_the_process(gpus: Ranks, tmp_path: Path) -> None:
    gpus(2, nccl_native.check_limit, 600.0, str(tmp_path))


def test_torch_ends_the_process_after_the_groups_own_timeout(gpus: Ranks, tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="rank 0 of 2:\nthe process is gone"):
        gpus(2, nccl_native.check_limit, 2.0, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["raised"]  # spar's error came before


def test_announced_failure_leaves_the_process(gpus: Ranks) -> None:
    gpus(2, nccl_native.check_announced)


# ---- a communicator that torch creates in the first collective ----


@pytest.fixture
def lazy(gpus: Ranks) -> Ranks:
    """Ranks of a torch that creates it there; the newer class does in its constructor, before spar."""
    if gpus.environment["TORCH_DIST_USE_NCCL2"] == "1":
        pytest.skip("this class creates communicators in its constructor")
    return gpus


def test_limit_ends_the_creation_of_a_communicator(lazy: Ranks) -> None:
    lazy(2, nccl_native.check_late_peer)


def test_interrupt_ends_the_creation_of_a_communicator(lazy: Ranks) -> None:
    lazy(2, nccl_native.check_interrupt)


def test_error_of_the_first_collective_is_the_cause(gpus: Ranks) -> None:
    gpus(2, nccl_native.check_failed_issue)


# ---- errors of the communicator ----


def test_error_of_the_communicator_is_raised_without_torchs_handling(gpus: Ranks) -> None:
    gpus(2, nccl_native.check_error, "0")


def test_error_of_the_communicator_ends_the_process_of_the_newer_class(gpus: Ranks) -> None:
    if gpus.environment["TORCH_DIST_USE_NCCL2"] == "0":
        gpus(2, nccl_native.check_error, "3")  # torch polls only while it has collectives
    else:
        with pytest.raises(pytest.fail.Exception, match="the process is gone"):
            gpus(2, nccl_native.check_error, "3")


def test_threads_run_while_kernels_are_compiled(gpus: Ranks, tmp_path: Path) -> None:
    gpus(2, nccl_native.check_compilation, str(tmp_path))
