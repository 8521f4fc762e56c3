# SPDX-License-Identifier: Apache-2.0
"""take_over_mesh: dims of a DeviceMesh, the order of its ranks, gathers in one exchange or in two."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from helpers.processes import finish, start
from helpers.reference import assert_same, cells, owned, packed, zigzag
from helpers.traffic import exchanges
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import spar
from spar import parallel_state as ps
from spar.groups import process_group
from spar.topology import Topology, sequence_group
from spar.topology.groups_by_name import _cp_neighbours


def check_take_over_mesh(rank: int, folder: Path) -> None:
    low, high = rank % 2, rank // 2
    whole, owners = cells((16, 3), torch.float32), zigzag(16, 2, 2)
    for dims, steps in ((("ulysses", "ring"), 1), (("ring", "ulysses"), 2)):
        with Topology():
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=dims)
            state = ps.take_over_mesh(mesh)
            assert state.get_ring_group() is mesh.get_group("ring")
            assert ps.get_sp_group().ulysses_group is mesh.get_group("ulysses")
            ulysses, ring = (high, low) if dims[0] == "ulysses" else (low, high)
            part = spar.split_forward_gather_backward_with_cp(whole, 0)
            assert_same(part, owned(whole, owners, 0, ulysses * 2 + ring))
            before = exchanges()
            assert_same(spar.gather_forward_split_backward_with_cp(part, 0, 16), whole)
            assert exchanges() == before + steps
            with pytest.raises(RuntimeError, match="destroy_parallel_state"):
                ps.take_over_mesh(mesh)
    for name in ("cp", "sp"):
        with Topology():
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(name, "tp"))
            state = ps.take_over_mesh(mesh)
            assert process_group(None, "test") is mesh.get_group(name) is state.get_cp_group()
            assert state.get_tp_group() is mesh.get_group("tp")
            assert (ps.get_ulysses_parallel_rank(), ps.get_ring_parallel_world_size()) == (high, 1)
    with Topology():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "sp"))
        assert ps.take_over_mesh(mesh).get_fsdp_group() is mesh.get_group("fsdp")
    with Topology():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ring"))
        ps.take_over_mesh(mesh)
        assert process_group(None, "test") is mesh.get_group("ring")
        assert (ps.get_ring_parallel_rank(), ps.get_ulysses_parallel_world_size()) == (low, 1)
    with Topology():
        for names in (("dp", "tp"), ("cp", "ring"), ("cp", "sp")):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            with pytest.raises(ValueError, match=r"with the dims \(.*expected .ring. and .ulysses."):
                ps.take_over_mesh(mesh)
    # permuted ranks: torch sorts the ranks of each group, and spar decides by its groups
    for order, steps in (([[3, 2], [1, 0]], 1), ([[2, 0], [3, 1]], 2), ([[0, 3], [1, 2]], 0)):
        with Topology():
            mesh = DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=("ulysses", "ring"))
            if not steps:
                with pytest.raises(
                    ValueError, match=r"the rings \[\[0, 3\], \[1, 2\]\] and the ulysses groups"
                ):
                    ps.take_over_mesh(mesh)
                continue
            ps.take_over_mesh(mesh)
            place = ps.get_ulysses_parallel_rank() * 2 + ps.get_ring_parallel_rank()
            for split, total in ((owners, 16), (packed([7, 3], 2, 2), 10)):
                lengths = {"seq_lens": [7, 3]} if total == 10 else {}
                cut, join = (getattr(spar, f"{'packed_data_' if lengths else ''}{name}") for name in CP)
                part = cut(whole[:total], 0, **lengths)
                assert_same(part, owned(whole[:total], split, 0, place))
                before = exchanges()
                assert_same(join(part, 0, **(lengths or {"gather_size": total})), whole[:total])
                assert exchanges() == before + steps
    assert sequence_group() is None
    dist.barrier()


CP = ("split_forward_gather_backward_with_cp", "gather_forward_split_backward_with_cp")


def test_neighbours_in_cp_are_decided_from_the_whole_mesh() -> None:
    """All ranks agree on cp's order, whatever their own groups are."""

    def decide(ranks: list[Any], dims: str = "ulysses ring") -> str | None:
        return _cp_neighbours(
            cast(Any, SimpleNamespace(mesh=torch.tensor(ranks), mesh_dim_names=dims.split()))
        )

    assert decide([[0, 1], [2, 3]]) == "ring"
    assert decide([[3, 2], [1, 0]]) == "ring"
    assert decide([[0, 2], [1, 3]]) == "ulysses"
    assert decide([[0, 2], [1, 3]], "ring ulysses") == "ring"
    assert decide([[0, 1, 2], [3, 4, 5]], "ring ulysses") == "ulysses"
    # the ring of ranks 0 and 1 is contiguous in cp, the other rings are not
    assert decide([[0, 1], [2, 4], [3, 5]]) is None
    assert decide([[[0, 1], [2, 3]], [[4, 6], [5, 7]]], "dp ulysses ring") is None
    assert decide([[[0, 1], [2, 3]], [[6, 7], [4, 5]]], "dp ulysses ring") == "ring"
    for ranks in ([[0, 1], [3, 2]], [[0, 3], [1, 2]], [[0, 1, 2], [5, 4, 3]]):
        with pytest.raises(ValueError, match="expected rings whose n-th ranks form a ulysses group"):
            decide(ranks)


def test_take_over_mesh(tmp_path: Path) -> None:
    assert finish(start(check_take_over_mesh, 4, tmp_path), 60) == [0] * 4
