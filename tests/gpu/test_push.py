# SPDX-License-Identifier: Apache-2.0
"""The push transport without a GPU: all operations and injected faults, over stand-in libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import Ranks, standin_ranks
from helpers import nccl_faults, nccl_in_flight, nccl_ranks, push_direct, push_ranks
from helpers.push_ranks import over_push
from helpers.tables import EXCHANGES
from test_nccl import cells_of, large_cells, row_cells

from spar._transports import cuda

WORLDS = (2, 3, 4)
SLOT = 1 << 20


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    """Ranks that have loaded the stand-ins, for all tests of the module."""
    yield from standin_ranks(WORLDS)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("slot", [4096, SLOT])  # many rounds, or one
def test_all_ops(gpus: Ranks, world: int, slot: int) -> None:
    """Uneven shapes, all item sizes, strided inputs, factors."""
    cells = [cell for op in EXCHANGES for seed in range(6) for cell in cells_of(op, world, seed)]
    (reason,) = set(gpus(world, over_push, slot, push_ranks.check_cells, cells))
    assert reason == "all ranks on this host can write to each other's GPUs"


@pytest.mark.parametrize("world", WORLDS)
def test_indexed_rows(gpus: Ranks, world: int) -> None:
    gpus(world, over_push, SLOT, push_ranks.check_cells, row_cells(world))


@pytest.mark.parametrize("world", [2, 4])
def test_large_blocks(gpus: Ranks, world: int) -> None:
    gpus(world, over_push, SLOT, push_ranks.check_cells, large_cells(world))


def test_calls_on_two_streams_keep_their_order(gpus: Ranks) -> None:
    gpus(3, over_push, SLOT, nccl_ranks.check_streams)


def test_exchange_in_a_side_stream(gpus: Ranks) -> None:
    gpus(2, over_push, SLOT, nccl_in_flight.check_side_stream)


def test_a_captured_exchange_in_flight_is_not_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    """To query an event of a capture is an error, which would end attention's next exchange in a graph."""
    query = mock.Mock(side_effect=RuntimeError("an event last recorded in a capturing stream"))
    beside = cuda.Beside(torch.device("cpu"), ())
    beside._device, beside._event = nccl_ranks.DEVICE, mock.Mock(query=query)
    monkeypatch.setattr(cuda, "_capturing", lambda: True)
    assert not beside.is_over() and not query.called


@pytest.mark.parametrize("slot", [2048, 1 << 14, SLOT])  # many rounds, an image that comes in four, or one
def test_graph_replays_read_current_inputs(gpus: Ranks, slot: int) -> None:
    gpus(3, over_push, slot, nccl_ranks.check_capture, SLOT)


@pytest.mark.parametrize("world", [2, 3])
def test_outputs_in_the_slot(gpus: Ranks, world: int) -> None:
    gpus(world, over_push, SLOT, push_direct.check_outputs)


def test_lists_and_gradients_on_two_streams(gpus: Ranks) -> None:
    gpus(3, over_push, 4 * SLOT, push_direct.check_lists_and_gradients)


def test_output_that_cannot_be_allocated_in_the_pool(gpus: Ranks) -> None:
    gpus(2, over_push, SLOT, push_direct.check_full)


def test_outputs_outlive_their_group(gpus: Ranks) -> None:
    gpus(2, over_push, SLOT, push_direct.check_close)


def test_close_beside_a_capture(gpus: Ranks) -> None:
    gpus(2, over_push, SLOT, push_direct.check_close_in_capture)


def test_environment_that_changes_beside_the_driver(gpus: Ranks) -> None:
    gpus(2, push_ranks.check_environment)


def test_slots_grow(gpus: Ranks) -> None:
    gpus(2, over_push, SLOT, push_direct.check_growth)


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemMap"])
def test_slots_that_cannot_grow(gpus: Ranks, function: str) -> None:
    gpus(3, over_push, SLOT, push_direct.check_no_growth, function)


@pytest.mark.parametrize("kib", [16, 240])
def test_memory_is_freed_after_a_wait_that_ended_early(gpus: Ranks, kib: int) -> None:
    gpus(2, over_push, 4 * SLOT, push_direct.check_freed, kib)


@pytest.mark.parametrize("makes", ["none", "another"])
def test_growth_in_a_call_that_a_rank_does_not_make(gpus: Ranks, makes: str) -> None:
    gpus(3, over_push, SLOT, push_direct.check_growth_alone, makes)


def test_death_of_a_peer_before_slots_grow(gpus: Ranks, tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"rank 0 of 3:\nthe process is gone"):
        gpus(3, over_push, SLOT, push_direct.check_growth_death, str(tmp_path))
    raised = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert raised == {"1": "died before the end of call 1", "2": "died before the end of call 1"}


@pytest.mark.parametrize("what", ["words", "signals"])
def test_slots_that_cannot_be_written_to_fall_back(gpus: Ranks, what: str) -> None:
    gpus(3, over_push, SLOT, push_direct.check_broken, what)
    gpus.stop()  # these processes remember it


def test_later_groups_do_not_try_again(gpus: Ranks) -> None:
    gpus(3, over_push, SLOT, push_direct.check_remembered)
    gpus.stop()


def test_absent_rank_times_out(gpus: Ranks) -> None:
    gpus(3, over_push, SLOT, nccl_faults.check_absent)


def test_death_of_a_peer_is_detected_early(gpus: Ranks, tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"rank 0 of 3:\nthe process is gone"):
        gpus(3, over_push, SLOT, nccl_faults.check_death, str(tmp_path), "before it")
    assert {path.name: float(path.read_text()) < 2.0 for path in tmp_path.iterdir()} == {
        "1": True,
        "2": True,
    }


@pytest.mark.parametrize("late", [0, 2])
def test_mismatch_is_reported_on_all_ranks(gpus: Ranks, late: int) -> None:
    gpus(3, over_push, SLOT, nccl_faults.check_disagreement, late)


def test_normal_exit_of_a_peer_is_no_error(gpus: Ranks) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"^rank 2 of 3:\nthe process is gone") as caught:
        gpus(3, over_push, SLOT, nccl_faults.check_end)
    assert "rank 1" not in str(caught.value)


CHECKS: tuple[tuple[int, Callable[..., None]], ...] = (
    (3, nccl_faults.check_gathered_sizes),
    (2, nccl_faults.check_unchecked),
    (3, nccl_faults.check_failures),
    (3, nccl_faults.check_own_failure),
    (3, nccl_faults.check_interrupt),
    (2, nccl_faults.check_far_ahead),
    (2, nccl_ranks.check_collected),
    (3, push_ranks.check_closed),
    (2, push_ranks.check_closed_without_threads),
    (3, push_ranks.check_absent_replay),
    (3, push_ranks.check_warning),
    (3, push_ranks.check_other_terms),
    (3, push_ranks.check_silent_rank),
)


@pytest.mark.parametrize(("world", "check"), CHECKS, ids=[check.__name__ for _, check in CHECKS])
def test_reports_between_ranks(gpus: Ranks, world: int, check: Callable[..., None]) -> None:
    gpus(world, over_push, SLOT, check)


@pytest.mark.parametrize(
    "function", ["cuMemAddressReserve", "cuMemCreate", "cuMemImportFromShareableHandle", "cuMemSetAccess"]
)
def test_failure_in_set_up_falls_back_on_all_ranks(gpus: Ranks, function: str) -> None:
    gpus(3, over_push, SLOT, push_ranks.check_fall_back, function)


def test_kernels_of_a_set_up_that_failed_may_still_run(gpus: Ranks) -> None:
    gpus(2, over_push, SLOT, push_ranks.check_late_kernels)


@pytest.mark.parametrize("raises", [False, True])
def test_pools_that_raise_when_they_allocate_are_not_used(
    monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    """As torch 2.8 and 2.9 do with expandable segments: outputs are images then, on this rank alone."""
    calls: list[tuple[str, int, tuple[int, int]]] = []

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> None:
        if raises:
            raise RuntimeError("MemPool doesn't currently support expandable_segments.")

    names = {
        "begin": "_cuda_beginAllocateCurrentThreadToPool",
        "end": "_cuda_endAllocateToPool",
        "release": "_cuda_releasePool",
    }
    monkeypatch.setattr(cuda, "_cuda", True)
    monkeypatch.setattr(cuda, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "_segments", mock.Mock())
    monkeypatch.setattr(cuda, "empty", empty)
    for what, name in names.items():
        note = lambda index, pool, what=what: calls.append((what, index, pool))  # noqa: E731
        monkeypatch.setattr(torch._C, name, note, raising=False)
    monkeypatch.setattr(torch.cuda, "MemPool", mock.Mock(return_value=mock.Mock(id=(3, 0))))
    pool = cuda.pooled_empty(torch.device("cuda", 1))
    assert (pool is None) == raises
    assert calls == [(what, 1, (3, 0)) for what in names]  # once, and balanced
    if pool is not None:
        pool.begin()
        assert calls.pop() == ("begin", 1, (3, 0))
