# SPDX-License-Identifier: Apache-2.0
"""This rank's groups by name, made from DeviceMeshes: data, context, tensor and expert parallelism.

Context parallelism is ring x ulysses. The ring ranks split each sequence, then the ulysses ranks split each
ring rank's part. The rank in the combined group "cp" is ulysses rank * ring size + ring rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .._deprecated import warn_deprecated

MESH = ("dp_replicate", "dp_shard", "ulysses", "ring", "tp")
FLAT = {
    "dp": ("dp_replicate", "dp_shard"),
    "cp": ("ulysses", "ring"),
    "dp_cp": ("dp_replicate", "dp_shard", "ulysses", "ring"),
}
EXPERT_MESH = ("edp", "efsdp", "ep")
_ALIASES = {"fsdp": "dp_shard_cp", "hsdp": "dp_cp"}
NAMES = (*MESH, *FLAT, "dp_shard_cp", *EXPERT_MESH, *_ALIASES)


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the group's backend name for each device type it supports."""
    try:
        return {device.type: group._get_backend(device).name() for device in group._device_types}
    except AttributeError:  # private to torch; the public API below requires a registered group
        config = dist.get_backend_config(group)
    return {kind: backend for kind, _, backend in (part.partition(":") for part in config.split(","))}


def device_type_of(group: dist.ProcessGroup | None) -> str:
    """Return the device type of the group's tensors: the accelerator if it has a native backend, else "cpu".

    Gloo also registers itself for CUDA, so it does not count as native to an accelerator. None means WORLD.
    """
    group = dist.group.WORLD if group is None else group
    backends = {} if group is None else backends_of(group)
    if "cpu" in backends and not torch.accelerator.is_available():
        return "cpu"
    return next((kind for kind, name in backends.items() if kind != "cpu" and name != "gloo"), "cpu")


_Getters = tuple[
    Callable[["ParallelState"], bool],
    Callable[["ParallelState"], dist.ProcessGroup | None],
    Callable[["ParallelState"], int],
    Callable[["ParallelState"], int],
    Callable[["ParallelState"], DeviceMesh | None],
]


def _getters(name: str) -> _Getters:
    """Make MindSpeed-MM's five getters of one group: is_X_enable, get_X_group, _group_size, _rank, ..."""

    def is_enable(self: ParallelState) -> bool:
        return self.is_group_enable(name)

    def get_group(self: ParallelState) -> dist.ProcessGroup | None:
        return self.get_group(name)

    def get_group_size(self: ParallelState) -> int:
        return self.get_group_size(name)

    def get_rank(self: ParallelState) -> int:
        return self.get_rank(name)

    def get_device_mesh(self: ParallelState) -> DeviceMesh | None:
        return self.get_device_mesh(name)

    getters = is_enable, get_group, get_group_size, get_rank, get_device_mesh
    for getter in getters:
        verb, _, suffix = getter.__name__.partition("_")
        getter.__name__ = f"{verb}_{name}_{suffix}"
        getter.__qualname__ = f"ParallelState.{getter.__name__}"
    return getters


class ParallelState:
    """This rank's groups by name (NAMES); a name without a group has size 1, rank 0. From MindSpeed-MM.

    For X = dp, cp, tp, ulysses, ring, edp, efsdp and ep there are also get_X_group, get_X_group_size,
    get_X_rank, get_X_device_mesh and is_X_enable.
    """

    def __init__(
        self,
        meshes: dict[str, DeviceMesh] | None = None,
        groups: dict[str, dist.ProcessGroup] | None = None,
        cp_neighbours: str | bool | None = None,
        *,
        ring_by_ring: bool | None = None,
    ) -> None:
        """cp_neighbours: see `get_cp_neighbours`. ring_by_ring: deprecated; True is cp_neighbours="ring"."""
        if isinstance(cp_neighbours, bool):  # where spar 0.1 had ring_by_ring
            cp_neighbours, ring_by_ring = None, cp_neighbours
        if ring_by_ring is not None:
            warn_deprecated(
                "ParallelState(ring_by_ring=)", 'cp_neighbours="ring", or None for False', "0.3.0"
            )
            cp_neighbours = "ring" if ring_by_ring else cp_neighbours
        self._meshes = meshes or {}
        self._groups = groups or {}  # groups outside any mesh
        self._cp_neighbours = cp_neighbours

    def _resolve_alias(self, name: str) -> str:
        if name not in NAMES:
            raise RuntimeError(f"there is no group named {name!r}; known: {', '.join(NAMES)}")
        return _ALIASES.get(name, name)

    def get_device_mesh(self, name: str) -> DeviceMesh | None:
        """Return the 1-D mesh of this rank's group, or None if there is no such group."""
        name = self._resolve_alias(name)
        if name not in self._meshes and name in self._groups:
            group = self._groups[name]
            try:
                self._meshes[name] = DeviceMesh.from_group(
                    group, device_type_of(group), mesh_dim_names=(name,)
                )
            except (KeyError, ValueError) as error:
                raise RuntimeError(
                    f"torch.distributed does not know the {name} group, which a DeviceMesh requires; "
                    "use get_group instead, or make the group with torch.distributed.new_group"
                ) from error
        return self._meshes.get(name)

    def get_group(self, name: str) -> dist.ProcessGroup | None:
        """Return this rank's group of a name, or None if there is no such group."""
        name = self._resolve_alias(name)
        mesh = self._meshes.get(name)
        return self._groups.get(name) if mesh is None else mesh.get_group()

    def get_group_size(self, name: str) -> int:
        """Return the number of ranks of the group; 1 if there is none."""
        group = self.get_group(name)
        return 1 if group is None else group.size()

    def get_rank(self, name: str) -> int:
        """Return this rank's rank in the group; 0 if there is none."""
        group = self.get_group(name)
        return 0 if group is None else group.rank()

    def get_cp_neighbours(self) -> str | None:
        """Return of which group the ranks are neighbours in cp, on all its ranks; None: of neither.

        - "ring": the rank in cp is ulysses rank * ring size + ring rank, as in MindSpeed-MM.
        - "ulysses": it is ring rank * ulysses size + ulysses rank, as in vLLM-Omni, yunchang and xDiT.

        The creator of the state derives it from the whole layout: ranks that derived it from their own groups
        could disagree.
        """
        return self._cp_neighbours

    def is_cp_ring_by_ring(self) -> bool:
        """Return whether ring ranks are neighbours in cp, as in groups of `init_parallel_state`."""
        return self._cp_neighbours == "ring"

    def is_group_enable(self, name: str) -> bool:
        """Return whether the group has more than one rank."""
        return self.get_group_size(name) > 1

    def get_fsdp_group(self) -> dist.ProcessGroup | None:
        """Return the group that shards one copy of the parameters: dp_shard x cp."""
        return self.get_group("fsdp")

    def get_fsdp_rank(self) -> int:
        """Return the rank in `get_fsdp_group()`: the index of this rank's shard of the parameters."""
        return self.get_rank("fsdp")

    def get_hsdp_group(self) -> dist.ProcessGroup | None:
        """Return the group of all replicas and shards of the parameters: dp_replicate x dp_shard x cp."""
        return self.get_group("hsdp")

    def get_hsdp_group_size(self) -> int:
        """Return the number of ranks that hold the parameters, over all replicas."""
        return self.get_group_size("hsdp")

    def get_hsdp_device_mesh(self) -> DeviceMesh | None:
        """Return the 2-D mesh (dp_replicate, dp_shard_cp) for fully_shard."""
        return self._meshes.get("hsdp_mesh")

    is_dp_enable, get_dp_group, get_dp_group_size, get_dp_rank, get_dp_device_mesh = _getters("dp")
    is_cp_enable, get_cp_group, get_cp_group_size, get_cp_rank, get_cp_device_mesh = _getters("cp")
    is_tp_enable, get_tp_group, get_tp_group_size, get_tp_rank, get_tp_device_mesh = _getters("tp")
    (
        is_ulysses_enable,
        get_ulysses_group,
        get_ulysses_group_size,
        get_ulysses_rank,
        get_ulysses_device_mesh,
    ) = _getters("ulysses")
    is_ring_enable, get_ring_group, get_ring_group_size, get_ring_rank, get_ring_device_mesh = _getters(
        "ring"
    )
    is_edp_enable, get_edp_group, get_edp_group_size, get_edp_rank, get_edp_device_mesh = _getters("edp")
    is_efsdp_enable, get_efsdp_group, get_efsdp_group_size, get_efsdp_rank, get_efsdp_device_mesh = _getters(
        "efsdp"
    )
    is_ep_enable, get_ep_group, get_ep_group_size, get_ep_rank, get_ep_device_mesh = _getters("ep")


def check_fit(names: tuple[str, ...], sizes: tuple[int, ...], world: int) -> None:
    """Raise ValueError, printing the layout, unless the sizes multiply to the world size."""
    product = math.prod(sizes)
    if product != world:
        layout = " x ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
        hint = "choose sizes whose product is the world size"
        if not dist.is_initialized():
            hint = "call torch.distributed.init_process_group first"
        raise ValueError(f"init_parallel_state: {layout} is {product} ranks; the world has {world}; {hint}")


def make_meshes(sizes: tuple[int, ...], experts: tuple[int, ...]) -> dict[str, DeviceMesh]:
    """Make the meshes of a state from the sizes of MESH and EXPERT_MESH. Collective."""
    device = device_type_of(None)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=MESH)
    meshes = {name: mesh[name] for name in MESH}
    for name, dims in FLAT.items():
        meshes[name] = mesh[dims]._flatten(name)
    # a separate mesh: torch cannot slice a flattened dim together with others
    replicate, shard, ulysses, ring, tensor = sizes
    names = ("dp_replicate", "dp_shard_cp", "tp")
    hybrid = init_device_mesh(device, (replicate, shard * ulysses * ring, tensor), mesh_dim_names=names)
    meshes |= {"dp_shard_cp": hybrid["dp_shard_cp"], "hsdp_mesh": hybrid["dp_replicate", "dp_shard_cp"]}
    if experts != (1, 1, 1):
        expert_mesh = init_device_mesh(device, experts, mesh_dim_names=EXPERT_MESH)
        meshes |= {name: expert_mesh[name] for name in EXPERT_MESH}
    return meshes


def state_of(mesh: DeviceMesh) -> ParallelState:
    """Make a state from the dims of an existing mesh. Collective if ring x ulysses must be flattened.

    Raises:
        ValueError: the mesh has no context-parallel dim, or ambiguous ones. Or its rank order puts different
            ring ranks into one ulysses group, or different ulysses ranks into one ring.
    """
    dims = tuple(mesh.mesh_dim_names or ())
    combined = [name for name in ("cp", "sp") if name in dims]
    levels = tuple(name for name in dims if name in ("ulysses", "ring"))
    if len(combined) + bool(levels) != 1:
        raise ValueError(
            f"take_over_mesh: mesh is {mesh} with the dims {dims}; "
            'expected "ring" and "ulysses", or one of "ring", "ulysses", "cp" and "sp": name its dims so'
        )
    neighbours = _cp_neighbours(mesh) if len(levels) > 1 else None
    meshes = {_ALIASES.get(name, name): mesh[name] for name in dims if name in NAMES}
    if combined:
        meshes["cp"] = meshes["ulysses"] = mesh[combined[0]]
    else:
        meshes["cp"] = mesh[levels]._flatten("cp") if len(levels) > 1 else mesh[levels[0]]
    return ParallelState(meshes, cp_neighbours=neighbours)


def _cp_neighbours(mesh: DeviceMesh) -> str | None:
    """Return what `get_cp_neighbours` returns, from the whole mesh, so that all its ranks decide alike.

    torch sorts the ranks of each group of a mesh, wherever they are in the mesh.
    """
    names = mesh.mesh_dim_names or ()
    levels = mesh.mesh.movedim((names.index("ulysses"), names.index("ring")), (-2, -1))
    orders = {"ring", "ulysses"}
    for block in levels.reshape(-1, *levels.shape[-2:]).tolist():
        rings = [sorted(ranks) for ranks in block]
        ulysses = [sorted(ranks) for ranks in zip(*block, strict=True)]
        ring_rank = {rank: n for ranks in rings for n, rank in enumerate(ranks)}
        ulysses_rank = {rank: n for ranks in ulysses for n, rank in enumerate(ranks)}
        crossing = [[ring_rank[rank] for rank in ranks] for ranks in ulysses]
        crossing += [[ulysses_rank[rank] for rank in ranks] for ranks in rings]
        if any(len(set(places)) > 1 for places in crossing):
            raise ValueError(
                f"take_over_mesh: in torch's order mesh has the rings {rings} and the ulysses groups "
                f"{ulysses}; expected rings whose n-th ranks form a ulysses group, and vice versa: reorder "
                "the ranks of the mesh"
            )
        in_cp = sorted(ring_rank)
        orders_by_name = {
            "ring": sorted(in_cp, key=lambda rank: (ulysses_rank[rank], ring_rank[rank])),
            "ulysses": sorted(in_cp, key=lambda rank: (ring_rank[rank], ulysses_rank[rank])),
        }
        orders &= {name for name, ranks in orders_by_name.items() if ranks == in_cp}
    return min(orders, default=None)  # "ring", if one of the groups has one rank
