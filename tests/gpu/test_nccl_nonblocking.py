# SPDX-License-Identifier: Apache-2.0
"""The nccl transport over communicators that do not block: NCCL's calls return ncclInProgress.

Such are torch's with TORCH_NCCL_USE_COMM_NONBLOCKING=1, and all with NCCL_COMM_BLOCKING=0.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import Ranks, standin_ranks
from helpers import nccl_faults, nccl_ranks
from helpers.tables import EXCHANGES
from test_nccl import cells_of


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    yield from standin_ranks((2, 3), STANDIN_NCCL_PENDING_MS="2")


def test_all_ops(gpus: Ranks) -> None:
    """In many steps: each waits until NCCL has enqueued the one before."""
    cells = [cell for op in EXCHANGES for cell in cells_of(op, 3, 0)]
    gpus(3, nccl_ranks.check_cells, 4 * 2 * (1024 + 1024), cells)


@pytest.mark.parametrize("staging", [8192, 1 << 20])
def test_graph_replays(gpus: Ranks, staging: int) -> None:
    gpus(3, nccl_ranks.check_capture, staging)


def test_communicator_of_torch(gpus: Ranks) -> None:
    gpus(2, nccl_ranks.check_native)


def test_call_that_nccl_does_not_enqueue_times_out(gpus: Ranks) -> None:
    gpus(2, nccl_faults.check_not_enqueued)


def test_failed_connection_falls_back_on_all_ranks(gpus: Ranks) -> None:
    gpus(3, nccl_faults.check_no_meeting)
