"""Groups of ranks as torch.distributed makes, ends and knows them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..groups import close
from ..topology.groups_by_name import device_type_of
from .rank_groups import check_groups


def new_group_of(groups: list[list[int]], backend: str | None, what: str) -> dist.ProcessGroup | None:
    """Makes all groups, on all ranks in one order; returns the one that this rank is in.

    Members keep the order of their list.
    """
    check_groups(what, groups, dist.get_world_size())
    mine = None
    for ranks in groups:
        # torch sorts ranks where it is not told otherwise, which older ones cannot be
        keep: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
        group = dist.new_group(ranks, backend=backend, **keep)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def end_group(group: dist.ProcessGroup | None) -> None:
    """Destroys a group, unless somebody did before."""
    if group is not None and group in dist.distributed_c10d._world.pg_map:
        close(group)
        dist.destroy_process_group(group)


def device_of(group: dist.ProcessGroup, local_rank: int) -> torch.device:
    """Where the group's tensors usually are."""
    kind = device_type_of(group)
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, local_rank % max(1, torch.accelerator.device_count()))


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Its global ranks; those in it where torch.distributed does not know the group."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return list(range(group.size()))
