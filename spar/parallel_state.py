"""Which ranks share what: data, context and tensor parallelism over one DeviceMesh. Source: seed 003.

Context parallelism is ring x ulysses: first the ring cuts each sequence, then each ring rank's part is cut
among its ulysses ranks. The rank in the combined "cp" group is ulysses rank * ring size + ring rank.
"""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .topology import sequence_group
from .topology import set_sequence_parallel_group as set_sequence_parallel_group

_MESH = ("dp_replicate", "dp_shard", "ulysses", "ring", "tp")
_FLAT = {
    "dp": ("dp_replicate", "dp_shard"),
    "cp": ("ulysses", "ring"),
    "dp_cp": ("dp_replicate", "dp_shard", "ulysses", "ring"),
}
_EXPERT_MESH = ("edp", "efsdp", "ep")
_ALIASES = {"fsdp": "dp_shard_cp", "hsdp": "dp_cp"}
NAMES = (*_MESH, *_FLAT, "dp_shard_cp", *_EXPERT_MESH, *_ALIASES)


class ParallelState:
    """The groups of this rank, by name (NAMES). Without a mesh every size is 1, and there are no groups."""

    def __init__(self, meshes: dict[str, DeviceMesh] | None = None) -> None:
        self._meshes = meshes or {}

    def _known(self, name: str) -> str:
        if name not in NAMES:
            raise RuntimeError(f"there is no group named {name!r}; known: {', '.join(NAMES)}")
        return _ALIASES.get(name, name)

    def get_device_mesh(self, name: str) -> DeviceMesh | None:
        """The 1-D mesh of this rank's group; None where there is none."""
        return self._meshes.get(self._known(name))

    def get_group(self, name: str) -> dist.ProcessGroup | None:
        mesh = self.get_device_mesh(name)
        return None if mesh is None else mesh.get_group()

    def get_group_size(self, name: str) -> int:
        mesh = self.get_device_mesh(name)
        return 1 if mesh is None else mesh.size()

    def get_rank(self, name: str) -> int:
        """This rank's place in the group."""
        mesh = self.get_device_mesh(name)
        return 0 if mesh is None else mesh.get_local_rank()

    def is_group_enable(self, name: str) -> bool:
        """Whether the group has more than one rank."""
        return self.get_group_size(name) > 1

    def get_fsdp_group(self) -> dist.ProcessGroup | None:
        """The ranks that share one copy of the parameters: dp_shard x cp."""
        return self.get_group("fsdp")

    def get_fsdp_rank(self) -> int:
        return self.get_rank("fsdp")

    def get_hsdp_group(self) -> dist.ProcessGroup | None:
        """All ranks that hold copies or shares of the same parameters: dp_replicate x dp_shard x cp."""
        return self.get_group("hsdp")

    def get_hsdp_group_size(self) -> int:
        return self.get_group_size("hsdp")

    def get_hsdp_device_mesh(self) -> DeviceMesh | None:
        """The 2-D mesh (dp_replicate, dp_shard_cp), as fully_shard takes it."""
        return self._meshes.get("hsdp_mesh")

    def is_dp_enable(self) -> bool:
        return self.is_group_enable("dp")

    def get_dp_group(self) -> dist.ProcessGroup | None:
        return self.get_group("dp")

    def get_dp_group_size(self) -> int:
        return self.get_group_size("dp")

    def get_dp_rank(self) -> int:
        return self.get_rank("dp")

    def get_dp_device_mesh(self) -> DeviceMesh | None:
        return self.get_device_mesh("dp")

    def is_cp_enable(self) -> bool:
        return self.is_group_enable("cp")

    def get_cp_group(self) -> dist.ProcessGroup | None:
        return self.get_group("cp")

    def get_cp_group_size(self) -> int:
        return self.get_group_size("cp")

    def get_cp_rank(self) -> int:
        return self.get_rank("cp")

    def get_cp_device_mesh(self) -> DeviceMesh | None:
        return self.get_device_mesh("cp")

    def is_ulysses_enable(self) -> bool:
        return self.is_group_enable("ulysses")

    def get_ulysses_group(self) -> dist.ProcessGroup | None:
        return self.get_group("ulysses")

    def get_ulysses_group_size(self) -> int:
        return self.get_group_size("ulysses")

    def get_ulysses_rank(self) -> int:
        return self.get_rank("ulysses")

    def get_ulysses_device_mesh(self) -> DeviceMesh | None:
        return self.get_device_mesh("ulysses")

    def is_ring_enable(self) -> bool:
        return self.is_group_enable("ring")

    def get_ring_group(self) -> dist.ProcessGroup | None:
        return self.get_group("ring")

    def get_ring_group_size(self) -> int:
        return self.get_group_size("ring")

    def get_ring_rank(self) -> int:
        return self.get_rank("ring")

    def get_ring_device_mesh(self) -> DeviceMesh | None:
        return self.get_device_mesh("ring")

    def is_tp_enable(self) -> bool:
        return self.is_group_enable("tp")

    def get_tp_group(self) -> dist.ProcessGroup | None:
        return self.get_group("tp")

    def get_tp_group_size(self) -> int:
        return self.get_group_size("tp")

    def get_tp_rank(self) -> int:
        return self.get_rank("tp")

    def get_tp_device_mesh(self) -> DeviceMesh | None:
        return self.get_device_mesh("tp")

    def is_edp_enable(self) -> bool:
        return self.is_group_enable("edp")

    def get_edp_group(self) -> dist.ProcessGroup | None:
        return self.get_group("edp")

    def get_edp_group_size(self) -> int:
        return self.get_group_size("edp")

    def get_edp_rank(self) -> int:
        return self.get_rank("edp")

    def get_edp_device_mesh(self) -> DeviceMesh | None:
        return self.get_device_mesh("edp")

    def is_efsdp_enable(self) -> bool:
        return self.is_group_enable("efsdp")

    def get_efsdp_group(self) -> dist.ProcessGroup | None:
        return self.get_group("efsdp")

    def get_efsdp_group_size(self) -> int:
        return self.get_group_size("efsdp")

    def get_efsdp_rank(self) -> int:
        return self.get_rank("efsdp")

    def get_efsdp_device_mesh(self) -> DeviceMesh | None:
        return self.get_device_mesh("efsdp")

    def is_ep_enable(self) -> bool:
        return self.is_group_enable("ep")

    def get_ep_group(self) -> dist.ProcessGroup | None:
        return self.get_group("ep")

    def get_ep_group_size(self) -> int:
        return self.get_group_size("ep")

    def get_ep_rank(self) -> int:
        return self.get_rank("ep")

    def get_ep_device_mesh(self) -> DeviceMesh | None:
        return self.get_device_mesh("ep")


_state: ParallelState | None = None
_warned = False


def _sizes(names: tuple[str, ...], sizes: tuple[int, ...]) -> str:
    return " x ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))


def _check_fit(names: tuple[str, ...], sizes: tuple[int, ...], world: int) -> None:
    product = 1
    for size in sizes:
        product *= size
    if product != world:
        hint = "" if dist.is_initialized() else "; call torch.distributed.init_process_group first"
        raise ValueError(
            f"init_parallel_state: {_sizes(names, sizes)} is {product} ranks; the world has {world}{hint}"
        )


def _divided(what: str, size: int, by: str, parts: int) -> int:
    if size % parts:
        raise ValueError(f"init_parallel_state: {what} is {size}; expected a multiple of {parts}, {by}")
    return size // parts


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
    """Makes the groups of this process's state. Collective: all ranks call it alike. Source: seed 003.

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
        RuntimeError: there is a state already; see `destroy_parallel_state`.
    """
    global _state
    for name, size in locals().items():
        if size < 1:
            raise ValueError(f"init_parallel_state: {name} is {size}; expected at least 1")
    if _state is not None:
        raise RuntimeError("init_parallel_state: there is a parallel state; destroy_parallel_state() ends it")
    ring, ulysses = ring_attention_size, ulysses_parallel_size
    shard = 1
    if fully_shard_parallel_size > 1:
        by = "ring_attention_size * ulysses_parallel_size"
        shard = _divided("fully_shard_parallel_size", fully_shard_parallel_size, by, ring * ulysses)
    replicate = _divided("data_parallel_size", data_parallel_size, "the ranks of dp_shard", shard)
    sizes = (replicate, shard, ulysses, ring, tensor_parallel_size)
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    _check_fit(_MESH, sizes, world)
    experts = (expert_data_parallel_size, expert_fully_shard_parallel_size, expert_parallel_size)
    if experts != (1, 1, 1):
        if expert_data_parallel_size == 1:
            experts = (max(1, world // (experts[1] * experts[2])), *experts[1:])
        _check_fit(_EXPERT_MESH, experts, world)
    _state = ParallelState(_meshes(sizes, experts) if world > 1 else None)
    return _state


def _meshes(sizes: tuple[int, ...], experts: tuple[int, ...]) -> dict[str, DeviceMesh]:
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    mesh = init_device_mesh(device, sizes, mesh_dim_names=_MESH)
    meshes = {name: mesh[name] for name in _MESH}
    for name, dims in _FLAT.items():
        meshes[name] = mesh[dims]._flatten(name)
    # its own mesh: torch does not let a flattened dim be sliced together with others
    replicate, shard, ulysses, ring, tensor = sizes
    names = ("dp_replicate", "dp_shard_cp", "tp")
    hybrid = init_device_mesh(device, (replicate, shard * ulysses * ring, tensor), mesh_dim_names=names)
    meshes |= {"dp_shard_cp": hybrid["dp_shard_cp"], "hsdp_mesh": hybrid["dp_replicate", "dp_shard_cp"]}
    if experts != (1, 1, 1):
        expert_mesh = init_device_mesh(device, experts, mesh_dim_names=_EXPERT_MESH)
        meshes |= {name: expert_mesh[name] for name in _EXPERT_MESH}
    return meshes


def is_parallel_state_initialized() -> bool:
    """Whether `init_parallel_state` was called. Source: seed 003."""
    return _state is not None


def get_parallel_state() -> ParallelState:
    """The state; without one, and with one warning, that of a single process. Source: seed 003."""
    global _warned
    if _state is not None:
        return _state
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
    global _state
    _state = None


def get_sequence_parallel_group() -> dist.ProcessGroup | None:
    return sequence_group()


def get_sequence_parallel_world_size() -> int:
    group = sequence_group()
    return 1 if group is None else group.size()


def get_sequence_parallel_rank() -> int:
    group = sequence_group()
    return 0 if group is None else group.rank()
