"""The parallel state of MindSpeed-MM, LightRFT's one sequence group, and DeviceMeshes that exist already."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._runtime.checks import check_int, check_type
from ..topology.groups_by_name import EXPERT_MESH, MESH, ParallelState, check_fit, make_meshes, state_of
from ..topology.resolve import Group, process_group
from ..topology.topology import current, sequence_group

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
    topology.given = None if group is None else process_group(group)
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
