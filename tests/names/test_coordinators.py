# SPDX-License-Identifier: Apache-2.0
"""Coordinators over groups of 1 to 3 non-consecutive ranks out of 4 processes."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.processes import await_report, finish, report, start
from helpers.reference import assert_same
from helpers.traffic import exchanges

from spar.parallel_state import (
    GroupCoordinator,
    PipelineGroupCoordinator,
    SequenceParallelGroupCoordinator,
    set_seq_parallel_pg,
)
from spar.parallel_state.transfer import Outbox

pytestmark = pytest.mark.spread

DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn]


def tensor(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = 1
    for extent in shape:
        count *= extent
    return (torch.arange(count) * 3 + rank).remainder(7).reshape(shape).to(dtype)


def check_ranks(rank: int, folder: Path) -> None:
    group = GroupCoordinator([[0, 2, 3], [1]], 5, "gloo")
    alone = rank == 1
    ranks = [1] if alone else [0, 2, 3]
    place = ranks.index(rank)
    assert (group.rank, group.ranks, group.world_size, group.rank_in_group) == (
        rank,
        ranks,
        len(ranks),
        place,
    )
    assert (group.local_rank, group.device) == (5, torch.device("cpu"))
    assert (group.first_rank, group.last_rank) == (ranks[0], ranks[-1])
    assert (group.is_first_rank, group.is_last_rank) == (place == 0, rank == ranks[-1])
    after, before = (place + 1) % len(ranks), (place - 1) % len(ranks)
    assert (group.group_next_rank, group.group_prev_rank) == (after, before)
    assert (group.next_rank, group.prev_rank) == (ranks[after], ranks[before])
    backwards = GroupCoordinator([[3, 1, 0, 2]], rank, "gloo")
    assert backwards.ranks == [3, 1, 0, 2], "ranks keep the order of the list"
    assert backwards.rank_in_group == [3, 1, 0, 2].index(rank)
    order = backwards.all_gather(torch.tensor([rank]))
    assert isinstance(order, torch.Tensor)
    assert order.tolist() == [3, 1, 0, 2]
    for groups, text in (
        ([[0, 1], [1, 2, 3]], "each at most once"),
        ([[0, 1], [2, 4]], "expected ranks 0 to 3"),
        ([[0, 1, 2, 3], []], "no empty group"),
    ):
        with pytest.raises(ValueError) as caught:
            GroupCoordinator(groups, rank, "gloo")
        assert text in str(caught.value)
        assert str(groups) in str(caught.value)
    if rank == 3:
        with pytest.raises(ValueError, match=r"group_ranks is \[\[2, 0\]\]; .* this process's rank, 3"):
            GroupCoordinator([[2, 0]], rank, "gloo")
    elif rank == 1:
        with pytest.raises(ValueError, match="this process's rank, 1"):
            GroupCoordinator([[2, 0]], rank, "gloo")
    else:
        GroupCoordinator([[2, 0]], rank, "gloo").barrier()
    device_group = group.device_group
    group.barrier()
    group.destroy()
    assert device_group not in dist.distributed_c10d._world.pg_map
    with pytest.raises(RuntimeError, match="was destroyed"):
        _ = group.group
    with pytest.raises(RuntimeError, match="was destroyed"):
        group.barrier()  # not over the whole world
    over = GroupCoordinator.over(backwards.group, 0)
    over.destroy()  # keeps the group, which it does not own
    backwards.barrier()


def test_group_coordinator_ranks(tmp_path: Path) -> None:
    assert finish(start(check_ranks, 4, tmp_path), 60) == [0] * 4


def check_collectives(rank: int, folder: Path) -> None:
    group = GroupCoordinator([[0, 2, 3], [1]], rank, "gloo")
    ranks, place = group.ranks, group.rank_in_group
    x = tensor(rank, 2, 3)
    y = group.all_reduce(x)
    assert y is x
    assert_same(x, torch.stack([tensor(r, 2, 3) for r in ranks]).sum(0))
    assert_same(
        group.all_reduce(tensor(rank, 2), op=dist.ReduceOp.MAX),
        torch.stack([tensor(r, 2) for r in ranks]).amax(0),
    )
    for dtype in DTYPES:
        for dim in (0, 1, -1):
            shapes = [[2, 3], [2, 3], [2, 3], [2, 3]]
            for uneven in (False, True):
                if uneven:
                    for r in ranks:
                        shapes[r][dim] = (r * 2) % 5  # rank 0's is empty
                before = exchanges()
                own = tensor(rank, *shapes[rank], dtype=dtype)
                parts = [tensor(r, *shapes[r], dtype=dtype) for r in ranks]
                expected = torch.cat([p.float() if p.is_floating_point() else p for p in parts], dim).to(
                    dtype
                )
                got: Any = group.all_gather(own, dim)
                assert_same(got, expected)
                assert exchanges() == before + 2 * (len(ranks) > 1), (
                    "spar exchanges the sizes, then the tensors"
                )
                for one, part in zip(group.all_gather(own, dim, separate_tensors=True), parts, strict=True):
                    assert_same(one, part)
                if dtype != torch.float8_e4m3fn:  # torch.cat does not support it
                    for dst in range(len(ranks)):
                        at_dst = group.gather(own, dst, dim)
                        if place == dst:
                            assert at_dst is not None
                            assert_same(at_dst, expected)
                        else:
                            assert at_dst is None
        for src in range(len(ranks)):
            mine = tensor(rank, 3, 2, dtype=dtype)
            assert group.broadcast(mine, src) is mine
            assert_same(mine, tensor(ranks[src], 3, 2, dtype=dtype))
        strided = tensor(rank, 2, 3, dtype=dtype).t()
        group.broadcast(strided, 0)
        assert_same(strided, tensor(ranks[0], 2, 3, dtype=dtype).t())
    leaf = torch.ones(2, requires_grad=True)
    gathered = group.all_gather(leaf)
    assert isinstance(gathered, torch.Tensor)
    assert gathered.requires_grad == (len(ranks) == 1), "no gradient, except in a group of one"
    for call, text in (
        (lambda: group.all_gather(x, 2), "dim is 2; expected -2 to 1"),
        (lambda: group.gather(x, 7), "dst is 7; expected 0 to"),
        (lambda: group.broadcast(x, -1), "src is -1"),
        (lambda: group.send_object(0, place), f"dst is {place}; expected another rank than this one"),
        (lambda: group.recv(torch.Size([1]), torch.int64, place), f"src is {place}"),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert text in str(caught.value)
        assert f"rank {place} of {len(ranks)}" in str(caught.value)


def test_group_coordinator_collectives(tmp_path: Path) -> None:
    assert finish(start(check_collectives, 4, tmp_path), 90) == [0] * 4


NESTED: dict[str, Any] = {"a%b": 1, "c": {"d": {}, "e": {"f": [2, "g"]}}, "h": None}


def whole_dict(rank: int) -> dict[str, Any]:
    tensors = {str(dtype): tensor(rank, 2, 3, dtype=dtype) for dtype in DTYPES}
    tensors["strided"] = tensor(rank, 4, 3).t()
    tensors["conjugate"] = tensor(rank, 3, dtype=torch.complex64).conj()
    tensors["empty"] = torch.empty(0, 3)
    tensors["one"] = torch.tensor(float(rank))
    return {**NESTED, "from": rank, "tensors": tensors}


def check_dict(got: dict[str, Any] | None, rank: int) -> None:
    assert got is not None
    expected = whole_dict(rank)
    assert list(got) == list(expected)
    assert {k: v for k, v in got.items() if k != "tensors"} == {
        k: v for k, v in expected.items() if k != "tensors"
    }
    assert list(got["tensors"]) == list(expected["tensors"])
    for name, value in expected["tensors"].items():
        assert_same(got["tensors"][name], value.resolve_conj().contiguous(), name)


def check_objects_and_dicts(rank: int, folder: Path) -> None:
    group = GroupCoordinator([[0, 2, 3], [1]], rank, "gloo")
    ranks, place = group.ranks, group.rank_in_group
    alone = len(ranks) == 1
    for src in range(len(ranks)):
        obj = group.broadcast_object({"from": rank}, src)
        assert obj == {"from": ranks[src]}
        objs = [rank, "x" * rank]
        assert group.broadcast_object_list(objs, src) is objs
        assert objs == [ranks[src], "x" * ranks[src]]
        sends = place == src
        check_dict(group.broadcast_tensor_dict(whole_dict(rank) if sends or alone else None, src), ranks[src])
    with pytest.raises(TypeError, match="tensor_dict is a list; expected a dict"):
        group.isend_tensor_dict([], 1 - min(place, 1)) if not alone else group._check_dict([])  # type: ignore[arg-type]
    if alone:
        assert group.send_tensor_dict(NESTED) is NESTED
        assert group.recv_tensor_dict() is None
        with pytest.raises(ValueError, match="expected another rank than this one"):
            group.send(torch.ones(1))
        return
    group.barrier()
    last = len(ranks) - 1
    if place == 0:  # from the first rank to the last, and back
        group.send_object(NESTED, last)
        assert group.recv_object(last) == "thanks"
        group.send(tensor(rank, 5, 2, dtype=torch.bfloat16), last)
        group.send(torch.ones(0, 2), last)
        group.send_tensor_dict(whole_dict(rank), last)
    elif place == last:
        assert group.recv_object(0) == NESTED
        group.send_object("thanks", 0)
        assert_same(group.recv((5, 2), torch.bfloat16, 0), tensor(ranks[0], 5, 2, dtype=torch.bfloat16))
        assert group.recv(torch.Size([0, 2]), torch.float32, 0).shape == (0, 2)
        check_dict(group.recv_tensor_dict(0), ranks[0])
    # all ranks send to the next at once
    handles = group.isend_tensor_dict(whole_dict(rank))
    got, receives, postprocess = group.irecv_tensor_dict()
    assert postprocess == []
    for one in receives + handles:
        one.wait()
        assert one.is_completed()
    check_dict(got, group.prev_rank)
    for step in range(50):  # discarded handles: tensors live until they are sent
        group.isend_tensor_dict({"x": torch.full((1000,), float(step))})
    for step in range(50):
        received = group.recv_tensor_dict()
        assert received is not None
        assert_same(received["x"], torch.full((1000,), float(step)))
    group.barrier()


def test_group_coordinator_objects_and_dicts(tmp_path: Path) -> None:
    assert finish(start(check_objects_and_dicts, 4, tmp_path), 60) == [0] * 4


def check_discarded_handles(rank: int, folder: Path) -> None:
    """Tensors live until they are sent, and no longer, even if the caller keeps a handle."""
    group = PipelineGroupCoordinator([[0, 1]], rank, "gloo")
    alive: list[weakref.ref[Any]] = []

    def send(step: int) -> None:
        values = np.full(500, step, dtype=np.int64)
        alive.append(weakref.ref(values))
        group.pipeline_isend(torch.from_numpy(values))

    def count_alive() -> int:
        return sum(ref() is not None for ref in alive)

    def eventually(condition: Callable[[], bool]) -> bool:
        end = time.monotonic() + 20
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)
        return condition()

    held = None
    if rank == 0:
        for step in range(100):
            send(step)
        held = group.pipeline_isend(torch.ones(3), "held")
        gc.collect()
        assert count_alive() == 100, "no tensor was received yet"
    group.barrier()
    if rank == 0:
        for step in range(100, 3000):
            send(step)
    else:
        for step in range(3000):
            assert group.pipeline_recv()[::499].tolist() == [step, step]
        assert_same(group.pipeline_recv(name="held"), torch.ones(3))
    group.barrier()
    if held is not None:
        assert eventually(lambda: count_alive() <= Outbox.MAX_KEPT), count_alive()
        held.wait()  # the thread may wait for it first
        held.wait()
        assert held.is_completed()
        assert eventually(lambda: threading.active_count() == 1), "the thread ended"
    group.barrier()
    if rank == 0:
        for step in range(100):  # never received: they do not block exit
            send(step)
        report(folder, rank, "")
    else:
        await_report(folder, 0)


def test_sends_outlive_discarded_handles(tmp_path: Path) -> None:
    assert finish(start(check_discarded_handles, 2, tmp_path), 60) == [0] * 2


def check_stages(rank: int, folder: Path, world: int) -> None:
    group = PipelineGroupCoordinator([list(range(world))], rank, "gloo")
    assert len(group.device_groups) == (2 if world == 2 else 0)
    before = group.prev_rank

    def value(stage: int, step: int) -> torch.Tensor:
        return torch.full((2, 3), stage + 10.0 * step, dtype=torch.bfloat16)

    for step in range(3):  # all stages send before any receives, under names, out of order
        sent = [
            group.pipeline_isend(value(rank, step)),
            group.pipeline_isend(torch.arange(rank + 4), "text", 1),
            group.pipeline_isend(value(rank, step + 100), segment_idx=7),
        ]
        for name, idx in (("latent", 7), ("text", 1), ("latent", -1)):
            group.add_pipeline_recv_task(idx, name)
        for _ in range(3):
            group.recv_next()
        latent = group.get_pipeline_recv_data()
        assert_same(group.get_pipeline_recv_data(1, "text"), torch.arange(before + 4))
        assert_same(group.get_pipeline_recv_data(7, "latent"), value(before, step + 100))
        assert_same(latent, value(before, step), "not overwritten by a later tensor")
        for work in sent:
            work.wait()
    with pytest.raises(ValueError, match="add_pipeline_recv_task before recv_next"):
        group.recv_next()
    with pytest.raises(ValueError, match=r"\('latent', -1\); expected one of \[\]"):
        group.get_pipeline_recv_data()
    with pytest.raises(
        ValueError, match=r"expected torch.bfloat16 of shape \[2, 3\] as before, or reset_buffer"
    ):
        group.pipeline_isend(torch.zeros(3, 2, dtype=torch.bfloat16))
    group.barrier()
    group.reset_buffer()
    for shape in ((0, 2), (4,)):
        if rank == 0:
            group.pipeline_send(torch.ones(shape), f"{shape}")
        elif rank == 1:
            assert_same(group.pipeline_recv(name=f"{shape}"), torch.ones(shape))
    group.send_tensor_dict({"x": torch.tensor([rank])}) if rank == 0 else None
    if rank == 1:
        assert group.recv_tensor_dict() == {"x": torch.tensor([0])}
    group.barrier()
    groups = [g for g in group._groups() if g is not None]
    group.destroy()
    assert not set(groups) & set(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize("world", [2, 3])
def test_pipeline_group_coordinator(tmp_path: Path, world: int) -> None:
    assert finish(start(check_stages, world, tmp_path, world), 60) == [0] * world


def check_one_stage(rank: int, folder: Path) -> None:
    group = PipelineGroupCoordinator([[0]], rank, "gloo")
    for call in (lambda: group.pipeline_isend(torch.ones(1)), lambda: group.pipeline_recv()):
        with pytest.raises(ValueError, match=r"the (next|previous) stage is 0; expected another rank"):
            call()


def test_pipeline_with_one_stage_rejects_transfers(tmp_path: Path) -> None:
    assert finish(start(check_one_stage, 1, tmp_path), 60) == [0]


def check_levels(rank: int, folder: Path) -> None:
    ulysses, ring = set_seq_parallel_pg(2, 2, rank, 4)
    group = SequenceParallelGroupCoordinator(
        [[0, 1, 2, 3]], rank, "gloo", ulysses_group=ulysses, ring_group=ring
    )
    assert (group.ulysses_group, group.ring_group) == (ulysses, ring)
    assert (group.ulysses_world_size, group.ulysses_rank) == (2, rank % 2)
    assert (group.ring_world_size, group.ring_rank) == (2, rank // 2)
    assert (group.world_size, group.rank_in_group) == (4, rank)
    with pytest.raises(TypeError, match="unknown arguments"):
        SequenceParallelGroupCoordinator(
            [[0, 1, 2, 3]], 0, "gloo", ulysses_group=ulysses, ring_group=ring, ring=ring
        )
    with pytest.raises(RuntimeError, match="ulysses_group is missing"):
        SequenceParallelGroupCoordinator([[0, 1, 2, 3]], 0, "gloo", ring_group=ring)
    group.barrier()  # a rank must not exit while others still connect to it


def test_sequence_parallel_group_coordinator(tmp_path: Path) -> None:
    assert finish(start(check_levels, 4, tmp_path), 60) == [0] * 4
