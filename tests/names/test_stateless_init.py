# SPDX-License-Identifier: Apache-2.0
"""stateless_init_torch_distributed_process_group: spar's operations over groups without global state."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS
from helpers.processes import await_report, finish, report, start
from helpers.reference import assert_same, cells
from helpers.stateless import free_port, is_free

import spar
from spar import utils


def make(rank: int, world: int, port: int, host: str = "127.0.0.1") -> dist.ProcessGroup:
    return utils.stateless_init_torch_distributed_process_group(host, port, rank, world, "gloo")


destroy = utils.stateless_destroy_torch_distributed_process_group


def check_operations(rank: int, folder: Path, host: str, ports: list[int], transport: str) -> None:
    world = 3
    known = set(dist.distributed_c10d._world.pg_map)
    group = make(rank, world, ports[0], host)
    other = make(2 - rank, world, ports[1], host)
    for one, place in ((group, rank), (other, 2 - rank)):
        assert (one.rank(), one.size()) == (place, world)
        x = torch.full((3,), float(place))
        dist.all_reduce(x, group=one)
        assert x.tolist() == [3.0] * 3
        x = torch.full((3,), place)
        one.broadcast(x, 1).wait()
        assert x.tolist() == [1] * 3
        one.barrier().wait()
        check_spar(one, place, world, transport)
    assert set(dist.distributed_c10d._world.pg_map) == known, "not registered with torch.distributed"
    if rank == 0:
        assert not is_free(host, ports[0])
    destroy(group)
    if rank == 0:
        assert is_free(host, ports[0]), "even while references to the group remain"
    assert group.size() == world
    with pytest.raises(ValueError, match="or was destroyed before"):
        destroy(group)
    check_spar(other, 2 - rank, world, transport)  # the other group is not affected
    destroy(other)


def check_spar(group: dist.ProcessGroup, rank: int, world: int, transport: str) -> None:
    whole = cells((5, 7, 2), torch.float32)
    rows, columns = (spar.cal_split_sizes(n, world) for n in (5, 7))
    x = whole.split(rows)[rank].clone().requires_grad_()
    y = spar.all_to_all(x, group, scatter_dim=1, gather_dim=0, gather_size=5)
    assert_same(y.detach(), whole.split(columns, 1)[rank])
    y.backward(y.detach())
    assert_same(x.grad, x.detach())
    x.grad = None
    z = spar.gather_forward_split_backward(x, group, 0, rows)
    assert_same(z.detach(), whole)
    z.backward(whole)
    assert_same(x.grad, x.detach() * world)
    assert spar.transport(group).name == transport


@pytest.mark.parametrize("initialize", [False, True], ids=["alone", "beside WORLD"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_spar_over_stateless_groups(tmp_path: Path, transport: str, initialize: bool) -> None:
    host = "127.0.0.1" if initialize else "::1"
    ports = [free_port(host), free_port(host)]
    settings: dict[str, Any] = {"initialize": initialize, "SPAR_TRANSPORT": transport, "SPAR_TIMEOUT": "30"}
    assert finish(start(check_operations, 3, tmp_path, host, ports, transport, **settings), 90) == [0] * 3


def check_immediate_destroy(rank: int, folder: Path, port: int) -> None:
    """Rank 0 may destroy its group without waiting: all ranks are connected when the group is made."""
    group = make(rank, 3, port)
    if rank == 0:
        destroy(group)
        assert is_free("127.0.0.1", port)
        report(folder, rank, "")
        return
    await_report(folder, 0)
    x = torch.full((2,), rank)
    if rank == 1:
        group.send([x], 2, 0).wait()
    else:
        group.recv([x], 1, 0).wait()
    assert x.tolist() == [1, 1], "the other ranks do not need the store"
    destroy(group)


def test_rank_0_may_destroy_its_group_at_once(tmp_path: Path) -> None:
    assert finish(start(check_immediate_destroy, 3, tmp_path, free_port(), initialize=False), 60) == [0] * 3


def test_port_is_freed_with_the_last_reference() -> None:
    port = free_port()
    group = make(0, 1, port)
    assert not is_free("127.0.0.1", port)
    assert spar.gather_forward_split_backward(torch.ones(2), group, 0).tolist() == [1, 1]
    del group
    assert is_free("127.0.0.1", port)


def test_group_name_shows_host_and_port() -> None:
    port = free_port()
    group = make(0, 1, port)
    assert group.group_name == f"stateless 127.0.0.1:{port}"
    destroy(group)


def test_stateless_init_rejects() -> None:
    init = utils.stateless_init_torch_distributed_process_group
    with pytest.raises(ValueError, match=r"on rank 0: backend is 'mpi'; expected 'gloo' or 'nccl'"):
        init("127.0.0.1", free_port(), 0, 1, "mpi")
    with pytest.raises(ValueError, match="rank is 3; expected 0 to 1"):
        init("127.0.0.1", free_port(), 3, 2, "gloo")
    if not dist.is_nccl_available():
        with pytest.raises(ValueError, match="this build of torch has 'gloo'"):
            init("127.0.0.1", free_port(), 0, 1, "nccl")
    with pytest.raises(ValueError, match="is not a group of stateless_init"):
        destroy(dist.ProcessGroup(dist.HashStore(), 0, 1))


def test_init_gloo_process_group() -> None:
    store = dist.PrefixStore("one", dist.HashStore())
    limit = timedelta(seconds=5)
    group = utils.init_gloo_process_group(dist.Backend("gloo"), store, 0, 1, limit)
    assert group._get_backend(torch.device("cpu")).options._timeout == limit
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [1, 1]
    with pytest.raises(ValueError, match="backend is 'nccl'; expected 'gloo'"):
        utils.init_gloo_process_group(dist.Backend("nccl"), store, 0, 1, limit)
    with pytest.raises(ValueError, match="rank is 1; expected 0 to 0"):
        utils.init_gloo_process_group(dist.Backend("gloo"), store, 1, 1, limit)


class NcclOverGloo(dist.ProcessGroupGloo):
    """A stand-in for ProcessGroupNCCL that checks the calls only."""

    class Options:
        _timeout = timedelta(0)

    given: ClassVar[list[timedelta]] = []

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        super().__init__(store, rank, size, options._timeout)
        self.given.append(options._timeout)


def test_nccl_is_registered_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclOverGloo, raising=False)
    monkeypatch.setattr(utils.process_group, "default_pg_nccl_timeout", timedelta(minutes=10))
    group = utils.stateless_init_torch_distributed_process_group("127.0.0.1", 0, 0, 1, "nccl")
    assert NcclOverGloo.given == [timedelta(minutes=10)]
    assert isinstance(group._get_backend(torch.device("cuda")), dist.ProcessGroupGloo)
    assert group._device_types == [torch.device("cuda")]
    with pytest.raises(RuntimeError):
        group._get_backend(torch.device("cpu"))
    destroy(group)
