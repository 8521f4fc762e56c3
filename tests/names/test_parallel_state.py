# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's API in spar.parallel_state: names, rank arithmetic, groups, and layouts that do not fit."""

from __future__ import annotations

import inspect
import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers.processes import finish, start

from spar import parallel_state as ps
from spar.parallel_state import RankGenerator, generate_masked_orthogonal_rank_groups
from spar.parallel_state.rank_groups import sequence_rank_groups
from spar.topology import Topology

SIGNATURES = {
    "RankGenerator": "tp, sp, pp, cfg, dp, fs=1, order='tp-sp-pp-cfg-dp', rank_offset=0",
    "destroy_distributed_env": "",
    "destroy_distributed_environment": "",
    "destroy_model_parallel": "",
    "destroy_parallel_state": "",
    "generate_masked_orthogonal_rank_groups": "world_size, parallel_size, mask",
    "init_distributed_environment": (
        "world_size=-1, rank=-1, distributed_init_method='env://', local_rank=-1, backend=None"
    ),
    "init_dit_group": "dit_parallel_size, backend",
    "init_model_parallel_group": "group_ranks, local_rank, backend, parallel_mode, **kwargs",
    "init_parallel_state": (
        "data_parallel_size=1, fully_shard_parallel_size=1, tensor_parallel_size=1, ring_attention_size=1, "
        "ulysses_parallel_size=1, expert_parallel_size=1, expert_fully_shard_parallel_size=1, "
        "expert_data_parallel_size=1"
    ),
    "init_world_group": "ranks, local_rank, backend",
    "initialize_model_parallel": (
        "data_parallel_size=1, cfg_parallel_size=1, sequence_parallel_size=None, ulysses_degree=1, "
        "ring_degree=1, tensor_parallel_size=1, pipeline_parallel_size=1, fully_shard_degree=1, "
        "hsdp_replicate_size=1, enable_expert_parallel=False, backend=None"
    ),
    "set_seq_parallel_pg": (
        "sp_ulysses_degree, sp_ring_degree, rank, world_size, use_ulysses_low=True, sp_group_ranks=None"
    ),
    "set_sequence_parallel_group": "group",
    "take_over_mesh": "mesh",
    "GroupCoordinator": "group_ranks, local_rank, torch_distributed_backend",
    "PipelineGroupCoordinator": "group_ranks, local_rank, torch_distributed_backend",
    "SequenceParallelGroupCoordinator": "group_ranks, local_rank, torch_distributed_backend, **kwargs",
}
GETTERS = [
    "get_cfg_group",
    "get_classifier_free_guidance_rank",
    "get_classifier_free_guidance_world_size",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_dit_group",
    "get_dit_world_size",
    "get_dp_group",
    "get_fs_group",
    "get_fully_shard_rank",
    "get_fully_shard_world_size",
    "get_parallel_state",
    "get_pipeline_parallel_rank",
    "get_pipeline_parallel_world_size",
    "get_pp_group",
    "get_ring_parallel_rank",
    "get_ring_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "get_sp_group",
    "get_ulysses_parallel_rank",
    "get_ulysses_parallel_world_size",
    "get_world_group",
    "is_dp_last_group",
    "is_parallel_state_initialized",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "model_parallel_is_initialized",
]
NEED_A_GROUP = [  # AssertionError if not initialized
    name
    for name in GETTERS
    if not any(part in name for part in ("sequence", "ulysses", "ring_", "state", "_is_"))
]


def test_signatures() -> None:
    for name, expected in (SIGNATURES | dict.fromkeys(GETTERS, "")).items():
        parameters = inspect.signature(getattr(ps, name)).parameters.values()
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
        assert ", ".join(map(str, plain)) == expected, name
        assert inspect.getdoc(getattr(ps, name)), name
    others = {"HAS_FLASH_ATTN", "NAMES", "ParallelState", "Topology", "env_info", "logger"}
    assert set(ps.__all__) == set(SIGNATURES) | set(GETTERS) | others


def test_module_attributes() -> None:
    assert isinstance(ps.logger, logging.Logger)
    assert ps.HAS_FLASH_ATTN is ps.env_info["has_flash_attn"]
    assert isinstance(ps.HAS_FLASH_ATTN, bool)


# ---- ranks ----


def test_generate_masked_orthogonal_rank_groups() -> None:
    groups = generate_masked_orthogonal_rank_groups
    assert groups(8, [2, 2, 2], [False, False, True]) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups(24, [2, 3, 4], [False, True, False])[::7] == [[0, 2, 4], [19, 21, 23]]
    assert groups(8, [2, 2, 2], [True, False, True])[1] == [2, 3, 6, 7]
    with pytest.raises(ValueError, match=r"parallel_size is \[2, 3\]; expected a product of 8"):
        groups(8, [2, 3], [True, False])
    with pytest.raises(ValueError, match="one entry for each of the sizes"):
        groups(8, [2, 4], [True])


def test_rank_generator_with_sixteen_ranks() -> None:
    """dp, cfg, sp and pp have size 2."""
    ranks = RankGenerator(tp=1, sp=2, pp=2, cfg=2, dp=2)
    pairs = {"dp": 8, "cfg": 4, "pp": 2, "sp": 1}
    for token, apart in pairs.items():
        starts = [r for r in range(16) if r // apart % 2 == 0]
        assert ranks.get_ranks(token) == [[r, r + apart] for r in starts], token
    assert ranks.get_ranks("sp")[:4] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ranks.get_ranks("dp")[:4] == [[0, 8], [1, 9], [2, 10], [3, 11]]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (2, 3, 1, 2, 2), (3, 1, 2, 1, 5)])
@pytest.mark.parametrize("order", ["tp-sp-pp-cfg-dp", "dp-pp-sp-cfg-tp"])
def test_rank_generator_matches_coordinates(sizes: tuple[int, ...], order: str) -> None:
    """Ranks share a group iff all coordinates outside the token are equal; each rank is in one group."""
    names = ("tp", "sp", "pp", "cfg", "dp")
    ranks = RankGenerator(*sizes, order=order, rank_offset=5)
    size = dict(zip(names, sizes, strict=True))
    where: dict[int, dict[str, int]] = {}
    for rank in range(ranks.world_size):
        rest, place = rank, {}
        for name in order.split("-"):
            rest, place[name] = divmod(rest, size[name])
        where[rank] = place
    for count in (1, 2, 4):
        for token in itertools.permutations(names, count):
            expected: dict[tuple[int, ...], list[int]] = {}
            for rank, place in where.items():
                expected.setdefault(tuple(place[n] for n in names if n not in token), []).append(rank + 5)
            assert ranks.get_ranks("-".join(token)) == list(expected.values())


def test_rank_generator_attributes_and_errors() -> None:
    ranks = RankGenerator(2, 1, 1, 1, 4, fs=4, order="DP-tp", rank_offset=8)
    assert ranks.order == "dp-tp-sp-pp-cfg"
    assert ranks.ordered_size == [4, 2, 1, 1, 1]
    assert (ranks.world_size, ranks.ep, ranks.rank_offset, ranks.fs) == (8, 8, 8, 4)
    assert ranks.name_to_size == {"tp": 2, "sp": 1, "pp": 1, "cfg": 1, "dp": 4, "fs": 4}
    assert ranks.get_mask("tp-sp-dp", "dp-tp") == [True, False, True]
    assert ranks.get_ranks("fs", independent_ranks=True) == [[8, 9, 10, 11], [12, 13, 14, 15]]
    with pytest.raises(RuntimeError, match="order is 'tp-dp' without pp, whose size is 2"):
        RankGenerator(1, 1, 2, 1, 1, order="tp-dp")
    for call, text in (
        (lambda: RankGenerator(1, 1, 0, 1, 1), "pp is 0; expected at least 1"),
        (lambda: RankGenerator(1, 1, 1, 1, 1, order="tp-cp"), "order is 'tp-cp'"),
        (lambda: RankGenerator(1, 1, 1, 1, 1, order="tp-tp"), "order is 'tp-tp'"),
        (lambda: ranks.get_ranks("fs"), "token is 'fs'"),
        (lambda: ranks.get_ranks("ep", True), "token is 'ep'; expected dims of tp, sp"),
        (
            lambda: RankGenerator(1, 6, 1, 1, 1, fs=4).get_ranks("fs", True),
            "fs is 4; expected a divisor of 6, the ranks of tp 1 x sp 6 x pp 1 x cfg 1 x dp 1",
        ),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert text in str(caught.value)


def test_sequence_rank_groups() -> None:
    low = sequence_rank_groups(2, 3, 12, True, None)
    assert low[0] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert low[1] == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    high = sequence_rank_groups(2, 3, 12, False, None)
    assert high[0] == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]
    assert high[1] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    given = sequence_rank_groups(2, 2, 8, True, [[0, 2, 4, 6], [1, 3, 5, 7]])
    assert given == ([[0, 2], [4, 6], [1, 3], [5, 7]], [[0, 4], [2, 6], [1, 5], [3, 7]])
    with pytest.raises(AssertionError, match="world_size is 6; expected a multiple of 4, ulysses 2 x ring 2"):
        sequence_rank_groups(2, 2, 6, True, None)
    for groups in ([[0, 1, 2, 3]], [[0, 1, 2], [3, 4, 5, 6, 7]]):
        with pytest.raises(ValueError, match=r"Invalid sp_group_ranks: .*expected 2 groups of 4 ranks"):
            sequence_rank_groups(2, 2, 8, True, groups)


# ---- without groups ----


def test_getters_without_groups() -> None:
    for name in ("sequence", "ulysses", "ring"):
        assert getattr(ps, f"get_{name}_parallel_world_size")() == 1
        assert getattr(ps, f"get_{name}_parallel_rank")() == 0
    assert ps.get_sequence_parallel_group() is None
    assert not ps.model_parallel_is_initialized()
    assert len(NEED_A_GROUP) == 19, NEED_A_GROUP
    for name in NEED_A_GROUP:
        with pytest.raises(AssertionError, match="is not initialized; call init"):
            getattr(ps, name)()
    ps.destroy_model_parallel()  # nothing to destroy
    ps.destroy_distributed_env()


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (
            {"sequence_parallel_size": 4, "ulysses_degree": 2},
            ValueError,
            "sequence_parallel_size is 4; expected 2, ring_degree 1 * ulysses_degree 2",
        ),
        ({"cfg_parallel_size": 0}, ValueError, "cfg_parallel_size is 0; expected at least 1"),
        ({"ring_degree": 6, "fully_shard_degree": 4}, ValueError, "fs is 4; expected a divisor of 6"),
        ({}, RuntimeError, "call init_distributed_environment first"),
    ],
)
def test_initialize_model_parallel_rejects(
    arguments: dict[str, int], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        ps.initialize_model_parallel(**arguments)  # type: ignore[arg-type]
    assert text in str(caught.value)
    assert not ps.model_parallel_is_initialized()


# ---- with groups ----


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    assert group is not None
    return dist.get_process_group_ranks(group)


def check_initialize_model_parallel(rank: int, folder: Path) -> None:
    ps.init_distributed_environment(local_rank=rank)
    world = ps.get_world_group()
    ps.init_distributed_environment()  # idempotent
    assert ps.get_world_group() is world
    assert (world.ranks, world.rank_in_group, world.local_rank) == ([0, 1, 2, 3], rank, rank)
    too_small = "tp 1 x sp 2 x pp 2 x cfg 1 x dp 2 (fs 1) is 8 ranks; the world has 4"
    with pytest.raises(RuntimeError) as caught:
        ps.initialize_model_parallel(ulysses_degree=2, pipeline_parallel_size=2, data_parallel_size=2)
    assert too_small in str(caught.value)
    for sizes, text in (  # a larger world is rejected too
        (
            {"ulysses_degree": 2},
            "sp 2 x pp 1 x cfg 1 x dp 1 (fs 1) is 2 ranks; the world has 4; pass data_parallel",
        ),
        ({"ring_degree": 2}, "the world has 4; pass data_parallel_size=2 to"),
        ({"fully_shard_degree": 2}, "the world has 4; pass hsdp_replicate_size=2 to"),
        ({"ulysses_degree": 3}, "sp 3 x pp 1 x cfg 1 x dp 1 (fs 1) is 3 ranks; the world has 4"),
    ):
        with pytest.raises(RuntimeError) as caught:
            ps.initialize_model_parallel(**sizes)
        assert text in str(caught.value)
    assert "to use all ranks" not in str(caught.value)
    assert not ps.model_parallel_is_initialized()

    ps.initialize_model_parallel(
        pipeline_parallel_size=2, ulysses_degree=2, fully_shard_degree=4, enable_expert_parallel=True
    )
    assert ps.model_parallel_is_initialized()
    low, high = rank % 2, rank // 2
    expected: dict[str, list[int]] = {
        "sp": [2 * high, 2 * high + 1],
        "pp": [low, low + 2],
        "dp": [rank],
        "cfg": [rank],
        "fs": [0, 1, 2, 3],
        "world": [0, 1, 2, 3],
    }
    for name, ranks in expected.items():
        group = getattr(ps, f"get_{name}_group")()
        assert (group.ranks, group.world_size) == (ranks, len(ranks)), name
        assert ranks_of(group.device_group) == ranks_of(group.cpu_group) == ranks
        assert group.rank_in_group == ranks.index(rank)
        assert dist.get_backend(group.cpu_group) == "gloo"
    places = {
        "sequence_parallel": (2, low),
        "ulysses_parallel": (2, low),
        "ring_parallel": (1, 0),
        "pipeline_parallel": (2, high),
        "data_parallel": (1, 0),
        "classifier_free_guidance": (1, 0),
        "fully_shard": (4, rank),
    }
    for name, (size, place) in places.items():
        assert getattr(ps, f"get_{name}_world_size")() == size, name
        assert getattr(ps, f"get_{name}_rank")() == place, name
    assert (ps.is_pipeline_first_stage(), ps.is_pipeline_last_stage()) == (high == 0, high == 1)
    assert ps.is_dp_last_group() == (rank == 3)
    assert ps.get_dit_world_size() == 4
    assert ranks_of(ps.get_dit_group()) == [0, 1, 2, 3]
    assert type(ps.get_pp_group()) is ps.PipelineGroupCoordinator
    assert type(ps.get_sp_group()) is ps.SequenceParallelGroupCoordinator
    state = ps.get_parallel_state()  # the same groups in MindSpeed-MM's API
    assert ranks_of(state.get_ep_group()) == [2 * high, 2 * high + 1]
    assert ranks_of(state.get_cp_group()) == [2 * high, 2 * high + 1]
    mesh = state.get_cp_device_mesh()
    assert mesh is not None and mesh.get_group() is ps.get_sp_group().device_group
    assert state.get_rank("fsdp") == rank

    with pytest.raises(AssertionError, match=r"groups \['cfg', 'dp', .* already initialized; call destroy"):
        ps.initialize_model_parallel(data_parallel_size=4)
    group = ps.get_sp_group().device_group
    world.barrier()  # peers may still be connecting
    ps.destroy_model_parallel()
    assert group not in dist.distributed_c10d._world.pg_map
    assert not ps.model_parallel_is_initialized()
    assert ps.get_sequence_parallel_group() is None
    assert ps.get_world_group() is world

    ps.initialize_model_parallel(fully_shard_degree=2, hsdp_replicate_size=2)  # standalone HSDP
    assert ps.get_dp_group().ranks == [0, 1, 2, 3]
    assert ps.get_fs_group().ranks == [2 * high, 2 * high + 1]
    assert ps.get_sequence_parallel_world_size() == 1
    assert ps.get_dit_world_size() == 4
    with Topology():
        assert ps.get_world_group() is world, "shared by all topologies"
    world.barrier()
    ps.destroy_distributed_env()
    assert not dist.is_initialized()
    with pytest.raises(AssertionError, match="world"):
        ps.get_world_group()
    (folder / f"{rank}.ended").touch()


def test_initialize_model_parallel(tmp_path: Path) -> None:
    assert finish(start(check_initialize_model_parallel, 4, tmp_path), 90) == [0] * 4


def check_set_seq_parallel_pg(rank: int, folder: Path) -> None:
    """set_seq_parallel_pg over given groups and over consecutive ranks, and layouts that do not fit."""
    ulysses, ring = ps.set_seq_parallel_pg(2, 2, rank, 4)
    assert (ranks_of(ulysses), ranks_of(ring)) == (
        [rank // 2 * 2, rank // 2 * 2 + 1],
        [rank % 2, rank % 2 + 2],
    )
    ulysses, ring = ps.set_seq_parallel_pg(2, 2, rank, 4, use_ulysses_low=False)
    assert (ranks_of(ring), ranks_of(ulysses)) == (
        [rank // 2 * 2, rank // 2 * 2 + 1],
        [rank % 2, rank % 2 + 2],
    )
    ulysses, ring = ps.set_seq_parallel_pg(1, 2, rank, 4, sp_group_ranks=[[0, 2], [3, 1]])
    assert ranks_of(ulysses) == [rank]
    assert ranks_of(ring) == ([0, 2] if rank % 2 == 0 else [3, 1]), "ranks keep the order of the list"
    assert ring.rank() == (rank // 2 if rank % 2 == 0 else {3: 0, 1: 1}[rank])
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"world_size": 3}, AssertionError, "expected a multiple of 2"),
        ({"sp_group_ranks": [[0, 1]]}, ValueError, "expected 2 groups of 2 ranks"),
        ({"sp_group_ranks": [[0, 1], [1, 2]]}, ValueError, "with the ranks 0 to 3"),
        ({"sp_group_ranks": [[0, 1], [2, 4]]}, ValueError, "with the ranks 0 to 3"),
        ({"rank": (rank + 1) % 4}, ValueError, f"expected this process's rank, {rank}"),
    ]
    for changed, kind, text in bad:
        with pytest.raises(kind) as caught:
            ps.set_seq_parallel_pg(
                **{"sp_ulysses_degree": 2, "sp_ring_degree": 1, "rank": rank, "world_size": 4} | changed
            )
        assert text in str(caught.value)
    with pytest.raises(AssertionError, match="parallel_mode is 'magic'; expected one of data, pipeline"):
        ps.init_model_parallel_group([[0, 1, 2, 3]], rank, "gloo", "magic")
    with pytest.raises(RuntimeError, match="ring_group is missing"):
        ps.init_model_parallel_group([[0, 1, 2, 3]], rank, "gloo", "sequence", ulysses_group=ulysses)
    dist.barrier()


def test_set_seq_parallel_pg(tmp_path: Path) -> None:
    assert finish(start(check_set_seq_parallel_pg, 4, tmp_path), 60) == [0] * 4


def check_init_distributed_environment(rank: int, folder: Path) -> None:
    """init_distributed_environment initializes torch.distributed itself."""
    dist.destroy_process_group()
    method = f"file://{folder}/again"
    ps.init_distributed_environment(2, rank, method)
    assert (dist.get_world_size(), dist.get_rank()) == (2, rank)
    assert ps.get_world_group().local_rank == rank, "defaults to the rank without env://"
    ps.initialize_model_parallel(ring_degree=2, backend="cpu:gloo")
    sp = ps.get_sp_group()
    for group in (sp.device_group, sp.ulysses_group, sp.ring_group, ps.get_dp_group().device_group):
        assert dist.get_backend_config(group) == "cpu:gloo", "all groups use the given backend"
    assert ps.get_ring_parallel_world_size() == 2
    assert ps.get_ring_parallel_rank() == rank
    ps.get_world_group().barrier()
    ps.destroy_distributed_environment()
    assert not dist.is_initialized()
    assert ps.get_sequence_parallel_world_size() == 1, "no group is left"


def test_init_distributed_environment(tmp_path: Path) -> None:
    assert finish(start(check_init_distributed_environment, 2, tmp_path), 60) == [0] * 2
