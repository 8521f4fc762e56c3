# SPDX-License-Identifier: Apache-2.0
"""MindSpeed-MM's parallel state, LightRFT's single sequence group, and existing DeviceMeshes."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._checks import check_int, check_type
from ..topology.groups_by_name import EXPERT_MESH, MESH, ParallelState, check_fit, make_meshes, state_of
from ..topology.resolve import Group, process_group
from ..topology.topology import current, sequence_group

__all__ = [
    "destroy_parallel_state",
    "get_parallel_state",
    "get_sequence_parallel_group",
    "init_parallel_state",
    "is_parallel_state_initialized",
    "set_sequence_parallel_group",
    "take_over_mesh",
]

_warned = False

# ---- one sequence group: LightRFT ----


def set_sequence_parallel_group(group: Group) -> None:
    """Set the current topology's sequence group. From LightRFT.

    The group counts as a ulysses group, without a ring. A sequence group made by `initialize_model_parallel`
    overrides it.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, (mesh, dim), a group name, or None to unset the group.

    Raises:
        ValueError: this rank is not in the group, or the DeviceMesh has several dims.
        TypeError: `group` is of another type.
    """
    topology = current()
    topology.given = None if group is None else process_group(group, "set_sequence_parallel_group")
    topology.is_alone = group is None
    topology.refresh()


def get_sequence_parallel_group() -> dist.ProcessGroup | None:
    """Return the current topology's sequence group, or None. From LightRFT."""
    return sequence_group()


# ---- meshes: MindSpeed-MM ----


def _divide(name: str, size: int, divisor_name: str, divisor: int) -> int:
    if size % divisor:
        raise ValueError(
            f"init_parallel_state: {name} is {size}; expected a multiple of {divisor}, {divisor_name}"
        )
    return size // divisor


def _check_no_state(caller: str) -> None:
    if current().mesh_state is not None:
        raise RuntimeError(
            f"{caller}: the parallel state is already initialized; call destroy_parallel_state() first"
        )


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
    """Make the groups of the current topology's parallel state. Collective. From MindSpeed-MM.

    The mesh is dp_replicate x dp_shard x ulysses x ring x tp, slowest dim first, where:

    - dp_shard = fully_shard_parallel_size / (ring * ulysses), at least 1;
    - dp_replicate = data_parallel_size / dp_shard.

    The expert mesh, edp x efsdp x ep, covers the same ranks. It is made if one of its sizes is not 1. An edp
    of 1 is replaced by world size / (efsdp * ep).

    Args:
        data_parallel_size: data-parallel size, dp_replicate * dp_shard.
        fully_shard_parallel_size: ranks that shard one copy of the parameters, context-parallel ones too.
        tensor_parallel_size: the size of tp.
        ring_attention_size: the size of ring.
        ulysses_parallel_size: the size of ulysses.
        expert_parallel_size: the size of ep.
        expert_fully_shard_parallel_size: the size of efsdp.
        expert_data_parallel_size: the size of edp.

    Returns:
        The parallel state, which `get_parallel_state` returns from now on.

    Raises:
        ValueError: a size is below 1 or does not divide, or the product of the sizes is not the world size.
        TypeError: a size is not an int.
        RuntimeError: already initialized; call `destroy_parallel_state` first.
    """
    all_sizes = [check_int("init_parallel_state", name, size, 1) for name, size in locals().items()]
    data, fully_shard, tensor, ring, ulysses, *expert_sizes = all_sizes
    _check_no_state("init_parallel_state")
    shard = 1
    if fully_shard > 1:
        divisor_name = "ring_attention_size * ulysses_parallel_size"
        shard = _divide("fully_shard_parallel_size", fully_shard, divisor_name, ring * ulysses)
    replicate = _divide("data_parallel_size", data, "the size of dp_shard", shard)
    sizes = (replicate, shard, ulysses, ring, tensor)
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    check_fit(MESH, sizes, world)
    experts = (expert_sizes[2], expert_sizes[1], expert_sizes[0])
    if experts != (1, 1, 1):
        if experts[0] == 1:
            experts = (max(1, world // (experts[1] * experts[2])), *experts[1:])
        check_fit(EXPERT_MESH, experts, world)
    state = ParallelState(make_meshes(sizes, experts) if world > 1 else None, cp_neighbours="ring")
    _set_state(state)
    return state


def take_over_mesh(mesh: DeviceMesh) -> ParallelState:
    """Use an existing DeviceMesh as the current topology's parallel state.

    Collective if the mesh has both ring and ulysses.

    Args:
        mesh: a mesh with dims named "ring" and "ulysses" or one of them, or with one of "cp" and "sp", which
            then is a ulysses group. Dims with other names of the parallel state (NAMES), such as "tp", become
            its groups. Dims with unknown names are ignored.

    Returns:
        The parallel state, which `get_parallel_state` returns from now on.

    Raises:
        ValueError: the mesh has no such dim, or ambiguous ones. Or its rank order does not nest ring and
            ulysses in one sequence.
        TypeError: `mesh` is not a DeviceMesh.
        RuntimeError: already initialized; call `destroy_parallel_state` first.
    """
    check_type("take_over_mesh", "mesh", mesh, DeviceMesh, "a DeviceMesh")
    _check_no_state("take_over_mesh")
    state = state_of(mesh)
    _set_state(state)
    return state


def is_parallel_state_initialized() -> bool:
    """Return whether the current topology has a state, whichever API made it. From MindSpeed-MM."""
    return current().state is not None


def get_parallel_state() -> ParallelState:
    """Return the current topology's parallel state. From MindSpeed-MM.

    If another API made the groups, the state shows those: cp is their sequence group, and names without a
    group have size 1. If nothing is initialized, returns the state of a single process and warns once.
    """
    global _warned
    state = current().state
    if state is not None:
        return state
    if not _warned:
        _warned = True
        warnings.warn(
            "spar: the parallel state is not initialized: operations return their input unsharded; "
            "call init_parallel_state() first",
            stacklevel=2,
        )
    return ParallelState()


def destroy_parallel_state() -> None:
    """Drop the parallel state, so that another can be made. Does not destroy its process groups."""
    _set_state(None)
