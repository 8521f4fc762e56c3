# SPDX-License-Identifier: Apache-2.0
"""Resolve the group argument of an operation to a ProcessGroup."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import topology
from .absent import AbsentGroup

Group = dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str] | str | None

# The functions of MindSpeed-MM, which call the argument process_group.
OF_MINDSPEED_MM = {
    "all_to_all",
    "split_forward_gather_backward",
    "gather_forward_split_backward",
    "load_balanced_split_forward_gather_backward",
    "load_balanced_gather_forward_split_backward",
    "packed_data_split_forward_gather_backward",
    "packed_data_gather_forward_split_backward",
}
_distributed = dist.is_available()


def process_group(group: Group, name: str, argument: str | None = None) -> dist.ProcessGroup:
    """Resolve a group argument to a ProcessGroup.

    Args:
        name: the operation that was called, which errors name.
        argument: what it calls the group; None: process_group if it is MindSpeed-MM's, else group.
        group: a ProcessGroup, a 1-D DeviceMesh, (mesh, dim), a group name, or None for the current topology's
            sequence group (WORLD if it has none).

    Raises:
        ValueError: torch.distributed is not initialized, the mesh has several dims, no group has this name,
            this rank is not in the group, or it is that of a layout from another process.
        TypeError: `group` is of another type.
    """
    if group is not None and isinstance(group, dist.ProcessGroup):  # isinstance(None, ...) is slow
        return group
    if group is None:
        sequence = topology.sequence_group() if topology.in_use else None
        if sequence is not None:
            return sequence
        world = dist.group.WORLD if _distributed else None
        if world is None:
            raise ValueError(
                f"{_place(name, argument)} is None and torch.distributed is not initialized; start the ranks "
                "with torchrun and call torch.distributed.init_process_group() first, or pass a group"
            )
        return world
    if isinstance(group, str):
        return _group_named(group, name, argument)
    if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
        mesh, dim = group
        return mesh.get_group(dim)
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{_place(name, argument)} is NON_GROUP_MEMBER: global rank {dist.get_rank()} is not among its "
            "ranks; call the operation on the group's ranks only"
        )
    if not isinstance(group, tuple) and hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(
                f"{_place(name, argument)} is a DeviceMesh of {group.ndim} dims {group.mesh_dim_names}; "
                "expected a 1-D mesh, or (mesh, dim)"
            )
        return group.get_group()
    if isinstance(group, AbsentGroup):
        raise ValueError(
            f"{name}: this process has no group {group.group_name!r} of {group.size()} ranks, for which the "
            "layout was pickled; without it a layout shards, and cannot exchange. Exchange on the group's "
            "ranks, and create the group there before the layout is unpickled"
        )
    kind = type(group).__name__
    raise TypeError(
        f"{_place(name, argument)} is {group!r:.80} ({'an' if kind[0] in 'aeiou' else 'a'} {kind}); "
        "expected a ProcessGroup, a DeviceMesh, (mesh, dim), a group's name or None"
        + ("; did you forget the group argument?" if isinstance(group, int) else "")
    )


def _place(name: str, argument: str | None) -> str:
    return f"{name}: {argument or ('process_group' if name in OF_MINDSPEED_MM else 'group')}"


def _group_named(group: str, name: str, argument: str | None) -> dist.ProcessGroup:
    from torch._C._distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(cast(Any, group))
    except (LookupError, RuntimeError) as error:
        raise ValueError(
            f"{_place(name, argument)} is {group!r}; expected the name of a group of this rank: "
            "ProcessGroup.group_name"
        ) from error
