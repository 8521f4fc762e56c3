"""What a group argument means."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import topology

Group = dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str] | str | None

_distributed = dist.is_available()


def process_group(group: Group) -> dist.ProcessGroup:
    """What a group argument means: a ProcessGroup, a 1-D DeviceMesh, (mesh, dim), a name or None.

    None is the current topology's sequence group; WORLD where there is none.

    Raises:
        ValueError: torch.distributed is not initialised, the mesh has more dims, the name is not known, or
            this rank is not in the group.
        TypeError: something else was given.
    """
    if group is not None and isinstance(group, dist.ProcessGroup):  # of None it takes long
        return group
    if group is None:
        sequence = topology.sequence_group() if topology.in_use else None
        if sequence is not None:
            return sequence
        world = dist.group.WORLD if _distributed else None
        if world is None:
            raise ValueError(
                "process_group is None and torch.distributed is not initialized; "
                "call torch.distributed.init_process_group first, or pass a group"
            )
        return world
    if isinstance(group, str):
        return _named(group)
    if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
        mesh, dim = group
        return mesh.get_group(dim)
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"process_group is not a group of this rank: global rank {dist.get_rank()} is not among its ranks"
        )
    if not isinstance(group, tuple) and hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(
                f"process_group is a DeviceMesh of {group.ndim} dims {group.mesh_dim_names}; "
                "expected one dim, or (mesh, dim)"
            )
        return group.get_group()
    kind = type(group).__name__
    raise TypeError(
        f"process_group is {group!r:.80} ({'an' if kind[0] in 'aeiou' else 'a'} {kind}); "
        "expected a ProcessGroup, a DeviceMesh, (mesh, dim), a group's name or None"
        + ("; did you forget the group argument?" if isinstance(group, int) else "")
    )


def _named(name: str) -> dist.ProcessGroup:
    from torch._C._distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(cast(Any, name))
    except (LookupError, RuntimeError) as error:
        raise ValueError(f"process_group names {name!r}, which is no group of this rank") from error
