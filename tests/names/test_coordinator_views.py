# SPDX-License-Identifier: Apache-2.0
"""Coordinators over existing groups: not registered with torch.distributed, or without CPU support."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from helpers.processes import finish, start
from helpers.reference import assert_same
from helpers.stateless import free_port
from test_coordinators import NESTED, check_dict, tensor, whole_dict

from spar import parallel_state as ps
from spar.parallel_state import GroupCoordinator
from spar.topology.groups_by_name import backends_of, device_type_of
from spar.utils import stateless_init_torch_distributed_process_group


def check_stateless_group(rank: int, folder: Path, port: int) -> None:
    """torch.distributed is not initialized and does not know the group."""
    init = stateless_init_torch_distributed_process_group
    ps.set_sequence_parallel_group(init("127.0.0.1", port, rank, 2, "gloo"))
    group = ps.get_sp_group()
    assert (group.ranks, group.rank, group.next_rank, group.world_size) == ([0, 1], rank, 1 - rank, 2)
    assert (group.ulysses_world_size, group.ring_world_size) == (2, 1)
    objs = [rank]
    assert group.broadcast_object_list(objs, 1) is objs
    assert (objs, group.broadcast_object(rank, 0)) == ([1], 0)
    got = group.broadcast_tensor_dict(whole_dict(0) if rank == 0 else None)
    check_dict(got, 0)
    x = torch.tensor([float(rank)])
    assert_same(group.all_gather(x), torch.tensor([0.0, 1.0]))
    at_0 = group.gather(x)
    assert at_0 is None if rank else at_0.tolist() == [0.0, 1.0]
    assert_same(group.broadcast(x.clone(), 1), torch.tensor([1.0]))
    assert_same(group.all_reduce(x), torch.tensor([1.0]))
    if rank == 0:
        group.send_object(NESTED, 1)
        group.send(tensor(0, 3))
        group.send_tensor_dict(whole_dict(0))
    else:
        assert group.recv_object(0) == NESTED
        assert_same(group.recv((3,), torch.float32), tensor(0, 3))
        check_dict(group.recv_tensor_dict(), 0)
    with pytest.raises(RuntimeError, match=r"torch.distributed does not know the cp group.*new_group"):
        ps.get_parallel_state().get_cp_device_mesh()
    group.barrier()
    ps.set_sequence_parallel_group(None)


def test_coordinator_over_stateless_group(tmp_path: Path) -> None:
    ranks = start(check_stateless_group, 2, tmp_path, free_port(), initialize=False)
    assert finish(ranks, 60) == [0] * 2


class FakeGroup:
    """The interface of a ProcessGroup of 2 ranks with the given backends."""

    def __init__(self, **backends: str) -> None:
        self.backends = backends
        self._device_types = [torch.device(kind) for kind in backends]

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: self.backends[device.type])

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def test_devices_follow_the_groups_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backends per device type decide, not the name of one of them."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    cases: list[tuple[Any, str, str]] = [
        (FakeGroup(cpu="gloo"), "cpu", "cpu"),
        (FakeGroup(cuda="gloo", cpu="gloo"), "cpu", "cpu"),  # init_process_group("gloo")
        (FakeGroup(cuda="nccl", cpu="gloo"), "cuda:1", "cpu"),  # init_process_group(), "undefined"
        (FakeGroup(cuda="nccl"), "cuda:1", "cuda:1"),
        (FakeGroup(cpu="gloo", xpu="xccl"), "xpu:1", "cpu"),
    ]
    for group, device, host in cases:
        view = GroupCoordinator.over(group, 3)
        assert (view.device, view._host_device) == (torch.device(device), torch.device(host))
        assert device_type_of(group) == torch.device(device).type
    # groups without private attributes: through torch.distributed's public API
    config = {"config": "cpu:gloo,cuda:nccl"}
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config["config"])
    unknown: Any = SimpleNamespace()
    assert backends_of(unknown) == {"cpu": "gloo", "cuda": "nccl"}
    assert device_type_of(unknown) == "cuda"
    assert device_type_of(None) == "cpu", "no WORLD"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert device_type_of(cast(Any, FakeGroup(cpu="fake", cuda="fake"))) == "cpu", "without a GPU"
    assert device_type_of(cast(Any, FakeGroup(cuda="nccl"))) == "cuda"


class Staged(GroupCoordinator):
    """Its groups reject tensors that `_stage` did not copy, like groups without CPU support."""

    def _set_groups(self, *args: Any) -> None:
        super()._set_groups(*args)
        self.moved: list[torch.Tensor] = []

    def _stage(self, tensor: torch.Tensor) -> torch.Tensor:
        self.moved.append(tensor.detach().clone())
        return self.moved[-1]

    def _group_for(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        staged = {one.untyped_storage().data_ptr() for one in self.moved}
        assert tensor.untyped_storage().data_ptr() in staged
        return super()._group_for(tensor)


def check_staged(rank: int, folder: Path) -> None:
    group = Staged([[0, 1]], rank, "gloo")
    x = tensor(rank, 2, 3)
    both = torch.cat([tensor(0, 2, 3), tensor(1, 2, 3)])
    assert_same(group.all_gather(x), both)
    at_1 = group.gather(x, 1, 0)
    assert at_1 is None if rank == 0 else torch.equal(at_1, both)
    assert_same(group.broadcast(x, 1), tensor(1, 2, 3))
    assert_same(group.all_reduce(x), 2 * tensor(1, 2, 3))
    if rank == 0:
        group.send(tensor(0, 4))
        group.send_tensor_dict(whole_dict(0))
    else:
        assert_same(group.recv((4,), torch.float32), tensor(0, 4))
        check_dict(group.recv_tensor_dict(), 0)
    check_dict(group.broadcast_tensor_dict(whole_dict(0) if rank == 0 else None), 0)
    group.barrier()


def test_cpu_tensors_are_staged_for_groups_without_cpu_support(tmp_path: Path) -> None:
    assert finish(start(check_staged, 2, tmp_path), 60) == [0] * 2
