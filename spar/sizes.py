"""The size rule: how a dim is shared among ranks where nobody says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def share(total: int, world_size: int, rank: int) -> int:
    """`rank`'s share of `total`: total // world_size, the remainder one each to the first ranks.

    Without a branch, so that a symbolic total stays symbolic under torch.compile.
    """
    return (total + world_size - 1 - rank) // world_size


def cal_split_sizes(dim_size: int | torch.Tensor, world_size: int) -> list[int]:
    """The size of each rank's piece of a dim. Source: seed 003, `cal_split_sizes`.

    Args:
        dim_size: extent of the dim, at least 0; a 0-dim integer tensor is taken as well.
        world_size: number of ranks, at least 1.

    Returns:
        `world_size` sizes that sum to `dim_size`; the first `dim_size % world_size` are one larger.

    Raises:
        ValueError: a size below 0, or no ranks.
    """
    total = int(dim_size.item()) if isinstance(dim_size, torch.Tensor) else dim_size
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; expected at least 1")
    if total < 0:
        raise ValueError(f"dim_size is {total}; expected at least 0")
    return [share(total, world_size, rank) for rank in range(world_size)]


def cal_split_sizes_multi(sizes: Sequence[int] | torch.Tensor, world_size: int) -> torch.Tensor:
    """`cal_split_sizes` for several sequences at once. Source: seed 003, `cal_split_sizes_multi`.

    Args:
        sizes: lengths of the sequences, each at least 0.
        world_size: number of ranks, at least 1.

    Returns:
        int64 tensor [world_size, len(sizes)]: row r holds rank r's share of each sequence.

    Raises:
        ValueError: a size below 0, or no ranks.
    """
    totals = torch.as_tensor(sizes, dtype=torch.int64).reshape(1, -1)
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; expected at least 1")
    if bool((totals < 0).any()):
        raise ValueError(f"a size is {int(totals.min())}; expected at least 0")
    ranks = torch.arange(world_size, dtype=torch.int64, device=totals.device).reshape(-1, 1)
    return totals // world_size + (ranks < totals % world_size)
