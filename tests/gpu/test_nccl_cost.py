# SPDX-License-Identifier: Apache-2.0
"""What a call over nccl launches, sends and stages: benchmarks/cost.py --nccl; both ends cut alike."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import core, core_abi

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import nccl_cost

from spar import _C

MIB = 1 << 20
STAGING = 1 << 42  # the address of staging memory, behind the tensors; neither is touched


def test_at_most_4_steps_of_at_least_32_mib() -> None:
    assert _C.env("staging_max") == nccl_cost.CAP
    for op, world, size, cost in nccl_cost.rows():
        where = f"{op}, {world} ranks, {size} bytes: {cost}"
        assert cost.groups <= 4, where
        assert cost.groups == 1 or size / cost.groups >= 32 * MIB, where
        assert cost.kernels <= cost.groups + 1, where
        assert cost.messages == cost.groups * (world - 1), where
        assert cost.staging <= min(size, nccl_cost.CAP), where


@pytest.mark.parametrize("world", nccl_cost.WORLDS)
def test_no_cut_where_nothing_is_staged(world: int) -> None:
    cost = nccl_cost.cost("gather", world, 1 << 30)
    assert (cost.groups, cost.kernels, cost.staged, cost.staging) == (1, 1, 0, 0)


@pytest.mark.parametrize("cap", [MIB, 10 * MIB, 300 * MIB])
def test_cap_on_staging_memory(cap: int) -> None:
    for op, world in itertools.product(("heads out", "heads in"), (2, 8, 64)):
        cost = nccl_cost.cost(op, world, 200_000_000, cap)
        assert cost.staging <= cap, f"{op}, {world} ranks: {cost}"
        assert cost.staging > cap / 8 or cost.groups == 4, f"{op}, {world} ranks: {cost}"


def messages(plan: core.Plan, pulls: int, cap: int, scaled: int, address: int) -> list[list[Any]]:
    """Return each step's messages as (peer, bytes), and check the staging buffer's bounds."""
    library, steps = core.library(), []
    tensors = (core_abi.c_void_p * 1)(address)
    library.spar_schedule_steps.restype = core_abi.c_int64
    count = library.spar_schedule_steps(plan.handle, scaled, core_abi.c_int64(cap))
    side = nccl_cost.Schedule()
    begin = core_abi.c_int64(count)
    all_ = 0 if pulls else scaled
    assert not library.spar_schedule_begin(nccl_cost.byref(side), plan.handle, pulls, all_, begin, tensors)
    for step in range(count):
        staging = core_abi.c_void_p(STAGING)
        assert not library.spar_schedule_step(nccl_cost.byref(side), core_abi.c_int64(step), staging)
        found = [side.messages[i] for i in range(side.nmessages)]
        assert all(m.at + m.bytes <= STAGING + side.size for m in found if m.at >= STAGING)
        assert all(m.at % 16 == 0 for m in found)
        steps.append([(m.peer, m.bytes) for m in found])
    library.spar_schedule_free(nccl_cost.byref(side))
    return steps


@pytest.mark.parametrize("world", [2, 3, 5])
def test_both_ends_cut_alike(world: int) -> None:
    """Ranks' tensors differ in addresses and strides; each step's messages are those of the peers."""
    draw = random.Random(world)
    for turn in range(60):
        op = draw.choice(["all_to_all", "gather", "zigzag_gather"])
        extents = [draw.randrange(1, 40) * 2 * world, draw.randrange(1, 40), draw.randrange(1, 90)]
        item, cap = draw.choice([2, 4, 16]), 4096 * (world - 1) * draw.choice([1, 16, 4096])
        args = {"all_to_all": (1, 0, extents[0]), "gather": (0, extents[0])}.get(op, (0, 1, extents[0]))
        plans = []
        for rank in range(world):
            own = [extents[0] // world, *extents[1:]]
            spec = core.contiguous(own, args, item)
            if draw.random() < 0.5:  # rows are apart
                row = spec.strides[0] + draw.randrange(9)
                spec = spec._replace(strides=[row, *spec.strides[1:]])
            plans.append(core.Plan(core.request(op, world, rank, [spec], core.SIDE_PULL)))
        scaled, addresses = (
            draw.randrange(2),
            [16 * draw.randrange(1, 9) + draw.choice([0, 0, 4]) for _ in plans],
        )
        sent = [messages(p, 0, cap, scaled, a) for p, a in zip(plans, addresses, strict=True)]
        received = [messages(p, 1, cap, scaled, 1 << 20) for p in plans]
        assert len({len(steps) for steps in sent + received}) == 1, turn
        for a, b in itertools.permutations(range(world), 2):
            for out, into in zip(sent[a], received[b], strict=True):
                there = [size for peer, size in out if peer == b]
                assert there == [size for peer, size in into if peer == a], (turn, op, a, b)
