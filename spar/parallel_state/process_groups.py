# SPDX-License-Identifier: Apache-2.0
"""Make, destroy and inspect torch.distributed process groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..groups import close
from ..topology.groups_by_name import device_type_of


def new_group_of(groups: list[list[int]], backend: str | None, caller: str) -> dist.ProcessGroup | None:
    """Make all groups, in the same order on every rank, and return this rank's, or None. Collective.

    The ranks of a group keep the order of their list. `where` names the caller in errors.

    Raises:
        ValueError: a group is empty, or a rank is in several or not in the world.
    """
    members, world = [rank for ranks in groups for rank in ranks], dist.get_world_size()
    are_distinct, are_in_world = len(set(members)) == len(members), set(members) <= set(range(world))
    if not (groups and all(groups) and are_distinct and are_in_world):
        raise ValueError(
            f"{caller}: the groups are {groups}; "
            f"expected ranks 0 to {world - 1}, each at most once, and no empty group"
        )
    mine = None
    for ranks in groups:
        # new_group sorts ranks by default, and older versions of torch have no sort_ranks
        keep: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
        group = dist.new_group(ranks, backend=backend, **keep)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def destroy_group(group: dist.ProcessGroup | None) -> None:
    """Destroy a group, unless it was destroyed before."""
    if group is not None and group in dist.distributed_c10d._world.pg_map:
        close(group)
        dist.destroy_process_group(group)


def device_of(group: dist.ProcessGroup, local_rank: int) -> torch.device:
    """Return the device of the group's tensors; `local_rank` selects among accelerators."""
    kind = device_type_of(group)
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, local_rank % max(1, torch.accelerator.device_count()))


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Return the group's global ranks, or its group ranks if it is not registered with torch.distributed."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return list(range(group.size()))
