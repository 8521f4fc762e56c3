"""Which ranks share what, in the spellings of three documents. docs/topology.md has them in one table.

They read and write one topology (`spar.topology`): the current one.
"""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import groups as _groups
from .checks import check_int, check_type
from .coordinators import GroupCoordinator, SequenceParallelGroupCoordinator
from .groups import Group
from .model_parallel import (
    HAS_FLASH_ATTN,
    destroy_distributed_env,
    destroy_distributed_environment,
    destroy_model_parallel,
    env_info,
    init_distributed_environment,
    init_dit_group,
    init_model_parallel_group,
    init_world_group,
    initialize_model_parallel,
    logger,
    model_parallel_is_initialized,
    set_seq_parallel_pg,
)
from .pipeline import PipelineGroupCoordinator
from .placement import (
    get_cfg_group,
    get_classifier_free_guidance_rank,
    get_classifier_free_guidance_world_size,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_dit_group,
    get_dit_world_size,
    get_dp_group,
    get_fs_group,
    get_fully_shard_rank,
    get_fully_shard_world_size,
    get_pipeline_parallel_rank,
    get_pipeline_parallel_world_size,
    get_pp_group,
    get_ring_parallel_rank,
    get_ring_parallel_world_size,
    get_sequence_parallel_rank,
    get_sequence_parallel_world_size,
    get_sp_group,
    get_ulysses_parallel_rank,
    get_ulysses_parallel_world_size,
    get_world_group,
    is_dp_last_group,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
)
from .ranks import RankGenerator, generate_masked_orthogonal_rank_groups
from .state import EXPERT_MESH, MESH, NAMES, ParallelState, check_fit, make_meshes, state_of
from .topology import Topology, current, sequence_group

__all__ = [
    "HAS_FLASH_ATTN",
    "NAMES",
    "GroupCoordinator",
    "ParallelState",
    "PipelineGroupCoordinator",
    "RankGenerator",
    "SequenceParallelGroupCoordinator",
    "Topology",
    "destroy_distributed_env",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "destroy_parallel_state",
    "env_info",
    "generate_masked_orthogonal_rank_groups",
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
    "init_distributed_environment",
    "init_dit_group",
    "init_model_parallel_group",
    "init_parallel_state",
    "init_world_group",
    "initialize_model_parallel",
    "is_dp_last_group",
    "is_parallel_state_initialized",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "logger",
    "model_parallel_is_initialized",
    "set_seq_parallel_pg",
    "set_sequence_parallel_group",
    "take_over_mesh",
]

_warned = False

# ---- one sequence group: seed 001 ----


def set_sequence_parallel_group(group: Group) -> None:
    """Makes a group the current topology's sequence group. Source: seed 001.

    A sequence group that `initialize_model_parallel` made goes before it. To those who ask for ring and
    ulysses it is a ulysses group.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, (mesh, dim), a group's name; None takes it back.

    Raises:
        ValueError: no group of this rank; a DeviceMesh of more dims.
    """
    topology = current()
    topology.given = None if group is None else _groups.process_group(group)
    topology.refresh()


def get_sequence_parallel_group() -> dist.ProcessGroup | None:
    """The current topology's sequence group, whoever made it; None where there is none. Source: seed 001."""
    return sequence_group()


# ---- meshes: seed 003 ----


def _divided(what: str, size: int, by: str, parts: int) -> int:
    if size % parts:
        raise ValueError(f"init_parallel_state: {what} is {size}; expected a multiple of {parts}, {by}")
    return size // parts


def _check_no_state(what: str) -> None:
    if current().mesh_state is not None:
        raise RuntimeError(f"{what}: there is a parallel state; destroy_parallel_state() ends it")


def _set_state(state: ParallelState | None) -> None:
    topology = current()
    topology.mesh_state = state
    topology.refresh()


def init_parallel_state(
    data_parallel_size: int = 1,
    fully_shard_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    ring_attention_size: int = 1,
    ulysses_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    expert_fully_shard_parallel_size: int = 1,
    expert_data_parallel_size: int = 1,
) -> ParallelState:
    """Makes the groups of the current topology's state. Collective. Source: seed 003.

    The mesh is dp_replicate x dp_shard x ulysses x ring x tp, in this order of ranks, where dp_shard =
    fully_shard_parallel_size / (ring * ulysses), at least 1, and dp_replicate = data_parallel_size /
    dp_shard. The experts' mesh, edp x efsdp x ep, covers the same ranks; it is made where one of its sizes is
    not 1, and edp takes what the other two leave where it is not given.

    Args:
        data_parallel_size: copies of the data, sharded ones too.
        fully_shard_parallel_size: ranks that share one copy of the parameters, context parallel ones too.
        tensor_parallel_size, ring_attention_size, ulysses_parallel_size: ranks of these groups.
        expert_parallel_size, expert_fully_shard_parallel_size, expert_data_parallel_size: of the experts'.

    Raises:
        ValueError: a size below 1, sizes that do not divide, a product that is not the world's size.
        TypeError: a size that is not an int.
        RuntimeError: there is a state already; see `destroy_parallel_state`.
    """
    given = [check_int("init_parallel_state", name, size, 1) for name, size in locals().items()]
    data, fully_shard, tensor, ring, ulysses, *of_experts = given
    _check_no_state("init_parallel_state")
    shard = 1
    if fully_shard > 1:
        by = "ring_attention_size * ulysses_parallel_size"
        shard = _divided("fully_shard_parallel_size", fully_shard, by, ring * ulysses)
    replicate = _divided("data_parallel_size", data, "the ranks of dp_shard", shard)
    sizes = (replicate, shard, ulysses, ring, tensor)
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    check_fit(MESH, sizes, world)
    experts = (of_experts[2], of_experts[1], of_experts[0])
    if experts != (1, 1, 1):
        if experts[0] == 1:
            experts = (max(1, world // (experts[1] * experts[2])), *experts[1:])
        check_fit(EXPERT_MESH, experts, world)
    state = ParallelState(make_meshes(sizes, experts) if world > 1 else None, ring_by_ring=True)
    _set_state(state)
    return state


def take_over_mesh(mesh: DeviceMesh) -> ParallelState:
    """Makes a DeviceMesh the current topology's state. Collective where it has ring and ulysses.

    Args:
        mesh: with dims named "ring" and "ulysses" (or one of them), or one of "cp" and "sp", which is then a
            ulysses group. Other names of the parallel state (NAMES), as "tp", are taken over, too; any others
            stay the mesh's own.

    Raises:
        ValueError: no such dim, or several that say the same; with both a ring and ulysses an order of ranks
            that does not make them levels of one sequence.
        RuntimeError: there is a state already; see `destroy_parallel_state`.
    """
    check_type("take_over_mesh", "mesh", mesh, DeviceMesh, "a DeviceMesh")
    _check_no_state("take_over_mesh")
    state = state_of(mesh)
    _set_state(state)
    return state


def is_parallel_state_initialized() -> bool:
    """Whether the current topology has a state, whichever spelling made it. Source: seed 003."""
    return current().state is not None


def get_parallel_state() -> ParallelState:
    """The state; without one, and with one warning, that of a single process. Source: seed 003.

    Where other spellings made the groups it shows those: their sequence group is cp, the names that they do
    not have are of size 1.
    """
    global _warned
    state = current().state
    if state is not None:
        return state
    if not _warned:
        _warned = True
        warnings.warn(
            "spar: the parallel state is not initialized; going on as in a single process "
            "(init_parallel_state makes it)",
            stacklevel=2,
        )
    return ParallelState()


def destroy_parallel_state() -> None:
    """Forgets the state, so that another can be made; its groups are torch.distributed's to destroy."""
    _set_state(None)
