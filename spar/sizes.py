# SPDX-License-Identifier: Apache-2.0
"""The size rule: how a dim is sharded by default."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

_MOST_RANKS = 1 << 20  # a list with an entry for each rank must fit into memory


def share(total: int, world_size: int, rank: int) -> int:
    """Return `rank`'s local size of `total`: total // world_size, plus 1 on the first total % world_size.

    It has no branch, so that a symbolic total stays symbolic under torch.compile.
    """
    return (total + world_size - 1 - rank) // world_size


def as_int(value: Any) -> int:
    """Convert a numpy integer or anything else with `__index__` to an int; a SymInt stays symbolic.

    Raises:
        TypeError: a bool, or a value that is not an int.
    """
    if type(value) is int:
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool):
        raise TypeError("a bool is not an int")
    if isinstance(value, (int, torch.SymInt)):
        return value  # type: ignore[return-value]
    return operator.index(value)


def swapped_hint(sizes: Sequence[Any], world_size: int) -> str:
    """Return the hint for sizes, not one for each rank, that are cal_split_sizes(world_size, len(sizes))."""
    ints = 0 < len(sizes) <= _MOST_RANKS and all(type(size) is int for size in sizes)
    if not ints or list(sizes) != cal_split_sizes(world_size, len(sizes)):
        return ""
    return f"; did you swap the arguments of cal_split_sizes(dim_size={len(sizes)}, world_size={world_size})?"


def totals_of_share(size: int, world_size: int, rank: int) -> range:
    """Return the global sizes of which `rank`'s local size is `size`: the inverse of `share`."""
    first = (size - 1) * world_size + rank + 1
    return range(max(first, 0), first + world_size)


def as_named_int(name: str, value: Any) -> int:
    """Convert like `as_int`; the error shows the argument's name and value."""
    try:
        return as_int(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r:.200}; expected an int") from None


def _ranks(world_size: Any) -> int:
    count = as_named_int("world_size", world_size)
    if not 1 <= count <= _MOST_RANKS:
        hint = "; did you swap it with the size?" if count > _MOST_RANKS else ""
        raise ValueError(f"world_size is {count}; expected at least 1, and at most {_MOST_RANKS}{hint}")
    return count


def cal_split_sizes(dim_size: int | torch.Tensor, world_size: int) -> list[int]:
    """Return the local size of a dim on each rank, as MindSpeed-MM's `cal_split_sizes` does.

    Swapped arguments are valid too: fewer items than ranks, most of which then have none. Pass them by name.
    An operation that is given such sizes reports that they are not one for each rank.

    Args:
        dim_size: the global size, at least 0; a 0-dim int tensor is accepted.
        world_size: number of ranks, at least 1.

    Returns:
        `world_size` sizes that sum to `dim_size`; the first `dim_size % world_size` are one larger.

    Raises:
        ValueError: dim_size is negative, or world_size is not from 1 to 2**20.
        TypeError: an argument is not an int.
    """
    total, world = as_named_int("dim_size", dim_size), _ranks(world_size)
    if total < 0:
        raise ValueError(f"dim_size is {total}; expected at least 0")
    return [share(total, world, rank) for rank in range(world)]


def cal_split_sizes_multi(sizes: Sequence[int] | torch.Tensor, world_size: int) -> torch.Tensor:
    """Return each rank's local sizes of several sequences, as MindSpeed-MM's `cal_split_sizes_multi` does.

    Args:
        sizes: global lengths of the sequences, each at least 0.
        world_size: number of ranks, at least 1.

    Returns:
        An int64 tensor `[world_size, len(sizes)]`, whose row r holds rank r's local size of each sequence.

    Raises:
        ValueError: a size is negative or not below 2**63, or world_size is not from 1 to 2**20.
        TypeError: the sizes are not ints.
    """
    lengths, world = _lengths(sizes), _ranks(world_size)
    totals = lengths.to(torch.int64).reshape(1, -1)
    if bool((totals < 0).any()):
        raise ValueError(f"a size is {int(totals.min())}; expected at least 0")
    ranks = torch.arange(world, dtype=torch.int64, device=totals.device).reshape(-1, 1)
    return totals // world + (ranks < totals % world)


def _lengths(sizes: Any) -> torch.Tensor:
    """Convert to an int tensor; an empty list has no dtype of its own."""
    try:
        tensor = sizes if isinstance(sizes, torch.Tensor) else torch.as_tensor(sizes, device="cpu")
    except (OverflowError, RuntimeError):
        raise ValueError(f"sizes is {sizes!r:.200}; expected ints from 0 to 2**63 - 1") from None
    except (TypeError, ValueError):
        raise TypeError(f"sizes is {sizes!r:.200}; expected a list of ints") from None
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
        raise TypeError(f"sizes is {sizes!r:.200}; expected a list of ints")
    return tensor
