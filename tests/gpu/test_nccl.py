# SPDX-License-Identifier: Apache-2.0
"""The nccl transport without a GPU: all operations and injected faults, over stand-in libraries."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks, standin_ranks
from helpers import cases, nccl_faults, nccl_in_flight, nccl_ranks, standins
from helpers.nccl_ranks import Cell
from helpers.reference import in_runs, zigzag
from helpers.tables import EXCHANGES, Cut, by_rule

import spar
from spar import _C
from spar._exchange.layouts import by_receiver, by_sizes, pair, rotated, swapped

SPAR = Path(_C.__file__).parent
WORLDS = (2, 3, 4)
SCALED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


@pytest.fixture(scope="module", autouse=True)
def remove_shared_files() -> Iterator[None]:
    yield
    standins.sweep()


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    """Ranks that have loaded the stand-ins, for all tests of the module."""
    yield from standin_ranks(WORLDS)


ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def cells_of(op: str, world: int, seed: int) -> list[Cell]:
    """Random arguments: one call with any item size and layout, and one with a dtype and a factor."""
    part, draw = cases.seeded_case(op, world, seed).parts[0], random.Random(f"{op} {world} {seed}")
    args, cells = tuple(part.move.args), []
    if part.item in ITEMS:
        inputs, outputs = (
            [part.laid_out(x).view(ITEMS[part.item]).squeeze(-1) for x in cut.parts(part.whole(), world)]
            for cut in (part.move.before, part.move.after)
        )
        cells.append((op, args, inputs, outputs, 1.0, False))
    whole = torch.randn(*part.shape, dtype=torch.float64, generator=torch.manual_seed(seed))
    whole = whole.to(draw.choice(SCALED))
    factor, divide = draw.choice([(3.0, True), (0.3, False), (float(world), True)])
    outputs = [x / factor if divide else x * factor for x in part.move.after.parts(whole, world)]
    cells.append((op, args, list(part.move.before.parts(whole, world)), outputs, factor, divide))
    return cells


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("chunk", [256, 4096])
def test_all_ops(gpus: Ranks, world: int, chunk: int) -> None:
    """Uneven shapes, all item sizes, strided inputs; many steps, or few."""
    cells = [cell for op in EXCHANGES for seed in range(6) for cell in cells_of(op, world, seed)]
    (reason,) = set(gpus(world, nccl_ranks.check_cells, 4 * (world - 1) * (chunk + 1024), cells))
    assert f"{world} ranks" in reason


def large_cells(world: int) -> list[Cell]:
    """Blocks long enough to be messages of their own: sent in place where they are contiguous."""
    total = 64 * world + 3
    ways = {
        "gather": ((0, total), Cut(0, in_runs(by_rule(total, world))), Cut()),
        "all_to_all": (
            (1, 0, total),
            Cut(0, in_runs(by_rule(total, world))),
            Cut(1, in_runs(by_rule(19, world))),
        ),
        "zigzag_gather": ((0, 1, 128 * world), Cut(0, zigzag(128 * world, world, 1)), Cut()),
    }
    cells: list[Cell] = []
    for op, (args, before, after) in ways.items():
        extent = args[-1]
        whole = torch.randn(extent, 19, 101, generator=torch.manual_seed(7))
        inputs, outputs = before.parts(whole, world), after.parts(whole, world)
        cells.append((op, args, list(inputs), list(outputs), 1.0, False))
        strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
        cells.append((op, args, strided, [x / world for x in outputs], float(world), True))
        views = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in inputs]
        cells.append((op, args, views, list(outputs), 1.0, False))
    return cells


def row_cells(world: int) -> list[Cell]:
    """The exchanges of `Rows`: any number for each pair of ranks, and whole shards of the next ranks."""
    draw = random.Random(world)
    sizes = [draw.randint(0, 5) * (r != owner) for r in range(world) for owner in range(world)]
    blocks = [torch.randn(2, size, 3) for size in sizes]
    sent = [torch.cat(blocks[owner::world], 1) for owner in range(world)]
    received = [torch.cat(blocks[r * world : (r + 1) * world], 1) for r in range(world)]
    args = by_receiver(1, world, sizes)
    cells: list[Cell] = [("exchange", args, sent, received, 1.0, False)]
    cells.append(("exchange", swapped(args), received, sent, 1.0, False))
    held = [3, 0, 4, 2][:world]
    shards = [torch.randn(size, 3) for size in held]
    for k in range(1, world):
        turn = pair(by_sizes(0, held), rotated(0, held, world - k))
        cells.append(("exchange", turn, shards, shards[k:] + shards[:k], 1.0, False))
    return cells


@pytest.mark.parametrize("world", WORLDS)
def test_indexed_rows(gpus: Ranks, world: int) -> None:
    gpus(world, nccl_ranks.check_cells, 4 * (world - 1) * 2048, row_cells(world))


@pytest.mark.parametrize("world", [2, 4])
def test_large_blocks(gpus: Ranks, world: int) -> None:
    gpus(world, nccl_ranks.check_cells, 4 * (world - 1) * 81 * 256, large_cells(world))


def test_large_own_part_is_copied_beside_the_wire(gpus: Ranks) -> None:
    gpus(3, nccl_ranks.check_own_beside)


def test_equal_parts_are_gathered_by_nccl_across_hosts(gpus: Ranks) -> None:
    gpus(4, nccl_ranks.check_all_gather)


def test_calls_between_hosts_have_no_collective(gpus: Ranks) -> None:
    gpus(4, nccl_ranks.check_hosts)


def test_closed_groups_keep_no_channel(gpus: Ranks) -> None:
    gpus(2, nccl_ranks.check_collected)


def test_calls_on_two_streams_keep_their_order(gpus: Ranks) -> None:
    gpus(3, nccl_ranks.check_streams)


def test_exchange_in_a_side_stream(gpus: Ranks) -> None:
    gpus(2, nccl_in_flight.check_side_stream)


@pytest.mark.parametrize("staging", [8192, 1 << 20])  # with a side stream, and without
def test_graph_replays_read_current_inputs(gpus: Ranks, staging: int) -> None:
    gpus(3, nccl_ranks.check_capture, staging)


def test_capture_before_setup_is_rejected(gpus: Ranks) -> None:
    gpus(2, nccl_ranks.check_uncapturable)


def test_torch_communicator_is_used_and_not_destroyed(gpus: Ranks) -> None:
    gpus(2, nccl_ranks.check_native)


def test_check_1_compares_before_anything_is_sent(gpus: Ranks) -> None:
    gpus(3, nccl_ranks.check_check)


def test_absent_rank_times_out(gpus: Ranks) -> None:
    gpus(3, nccl_faults.check_absent)


def test_wait_returns_when_calls_have_ended(gpus: Ranks) -> None:
    gpus(2, nccl_faults.check_wait)


@pytest.mark.parametrize("function", ["Send", "Recv", "GroupStart", "GroupEnd"])
def test_synchronous_nccl_errors(gpus: Ranks, function: str) -> None:
    gpus(2, nccl_faults.check_error_at_once, function)


def test_asynchronous_nccl_errors(gpus: Ranks) -> None:
    gpus(3, nccl_faults.check_error_later)


@pytest.mark.parametrize(
    ("variable", "fault", "why"),
    [
        ("STANDIN_NCCL_FAIL", "GetUniqueId:1", "ncclGetUniqueId: system error: the stand-in has no id"),
        ("SPAR_STAGING_MAX", "1000", "SPAR_STAGING_MAX is 1000; 2 ranks need at least 4096"),
    ],
)
def test_setup_failure_falls_back_on_all_ranks(gpus: Ranks, variable: str, fault: str, why: str) -> None:
    gpus(2, nccl_faults.check_refused, variable, fault, why)


@pytest.mark.parametrize("world", [2, 3])
def test_failed_connection_falls_back_on_all_ranks(gpus: Ranks, world: int) -> None:
    gpus(world, nccl_faults.check_no_meeting)


def test_failure_before_setup_reaches_peers(gpus: Ranks) -> None:
    gpus(3, nccl_faults.check_failure_before_set_up)


def test_failure_during_setup_reaches_peers(gpus: Ranks) -> None:
    gpus(3, nccl_faults.check_failure_in_set_up)


@pytest.mark.parametrize("when", ["before it", "in it"])
def test_death_of_a_peer_is_detected_early(gpus: Ranks, tmp_path: Path, when: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"rank 0 of 3:\nthe process is gone"):
        gpus(3, nccl_faults.check_death, str(tmp_path), when)
    assert {path.name: float(path.read_text()) < 2.0 for path in tmp_path.iterdir()} == {
        "1": True,
        "2": True,
    }


def test_normal_exit_of_a_peer_is_no_error(gpus: Ranks) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"^rank 2 of 3:\nthe process is gone") as caught:
        gpus(3, nccl_faults.check_end)
    assert "rank 1" not in str(caught.value)


# ---- reports between ranks of one host ----


@pytest.mark.parametrize("late", [0, 2])
def test_mismatch_is_reported_on_all_ranks(gpus: Ranks, late: int) -> None:
    gpus(3, nccl_faults.check_disagreement, late)


def test_mismatch_carries_gathered_sizes(gpus: Ranks) -> None:
    gpus(3, nccl_faults.check_gathered_sizes)


def test_check_0_does_not_compare_calls(gpus: Ranks) -> None:
    gpus(2, nccl_faults.check_unchecked)


def test_failed_calls_of_one_rank_and_of_all(gpus: Ranks) -> None:
    gpus(3, nccl_faults.check_failures)


def test_failure_before_the_call_reaches_peers(gpus: Ranks) -> None:
    gpus(3, nccl_faults.check_own_failure)


def test_interrupt_reaches_peers(gpus: Ranks) -> None:
    gpus(3, nccl_faults.check_interrupt)


def test_overwritten_ring_entries_are_not_compared(gpus: Ranks) -> None:
    gpus(2, nccl_faults.check_far_ahead)


def test_call_on_a_group_that_a_peer_closed(gpus: Ranks) -> None:
    gpus(3, nccl_faults.check_closed)


# ---- missing and outdated libraries ----

CHOOSE = "from spar import _C; print(_C.choose(_C.peer_info() * 2, 'cuda', ()))"


@pytest.mark.parametrize(
    ("missing", "version", "why"),
    [
        ("libcuda.so.1", "", "no libcuda: libcuda.so.1: cannot open"),
        ("libnccl.so.2", "", "no libnccl: libnccl.so.2: cannot open"),
        ("", "22005", "libnccl is NCCL 2.20.5; expected 2.21.5 or newer"),
        ("", "22105", "all 2 ranks have CUDA and NCCL"),
    ],
)
def test_missing_library_is_a_reason(tmp_path: Path, missing: str, version: str, why: str) -> None:
    for path in standins.built().glob("*.so.*"):
        if path.name != missing:
            (tmp_path / path.name).symlink_to(path)
    environment = standins.environment(tmp_path, STANDIN_NCCL_VERSION=version or "22907")
    # a module of that name, because the package's __init__ imports torch
    code = "import sys, types; sys.modules['spar'] = spar = types.ModuleType('spar'); "
    code += f"spar.__path__ = [{str(SPAR)!r}]; "
    done = subprocess.run(
        [sys.executable, "-c", code + CHOOSE], env=environment, capture_output=True, text=True, check=True
    )
    assert why in done.stdout
    assert done.stdout.startswith("('nccl'" if version == "22105" else "('torch'")


def check_reason(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Without a GPU, before a group's first exchange."""
    os.environ.pop("SPAR_TRANSPORT")
    fresh = dist.new_group(list(range(7)))
    rejected = dict(spar.transport(fresh, "cuda").rejected)
    assert re.match(rf"rank {rank}: no libcuda: libcuda.so.1: ", rejected["nccl"]), rejected
    assert spar.transport(fresh, "cuda").name is None
    dist.barrier(fresh)  # no rank may close connections that gloo is still making
    dist.destroy_process_group(fresh)


def test_transport_reports_rejections_before_setup(pool: Ranks) -> None:
    pool.transport = "torch"
    pool(7, check_reason)
