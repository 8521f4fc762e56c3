# SPDX-License-Identifier: Apache-2.0
"""The ranks that a launcher such as torchrun started, or one rank without a launcher."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from .printing import count_text


class UsageError(Exception):
    """Arguments or an environment that a command cannot use. rank: of the only rank where this is so."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class Ranks:
    """This rank of the group WORLD. `store`: torch's key-value store, which outlives a broken group."""

    rank: int
    world: int
    device: torch.device
    backend: str
    store: Store

    def on_host(self) -> tuple[int, int]:
        """Return this rank's number on its host, and how many ranks the launcher started there."""
        rank, world = (os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        return int(rank or self.rank), int(world or self.world)


def launched() -> bool:
    """Whether a launcher set this process's rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def squarest(ranks: int) -> int:
    """Return the number of ulysses ranks with which ring x ulysses is as square as so many ranks allow."""
    return max(n for n in range(1, ranks + 1) if ranks % n == 0 and n * n <= ranks)


def add_device_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="cpu", metavar="TYPE", help="where the tensors are: cpu (default), cuda, ..."
    )
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help="torch.distributed's backend; by default torch's own for the device (cpu: gloo, cuda: nccl)",
    )


@contextmanager
def joined(kind: str = "cpu", backend: str | None = None, timeout: float = 600.0) -> Iterator[Ranks]:
    """Initialize torch.distributed with all ranks; with one rank if no launcher started this process.

    Args:
        kind: the device type. A rank uses the device of its LOCAL_RANK.
        backend: of torch.distributed; None: torch's default for the device type.
        timeout: of the process group, in seconds.

    Raises:
        UsageError: this rank has no such device, or the group cannot be made.
    """
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")) if launched() else (0, 1)
    device = _device(kind, rank)
    backend = backend or dist.Backend.default_device_backend_map.get(device.type, "gloo")
    alone: dict[str, Any] = {} if launched() else {"store": HashStore(), "rank": 0, "world_size": 1}
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **alone)
    except (ValueError, RuntimeError, AssertionError) as error:  # the last of a backend that torch lacks
        raise UsageError(f"torch.distributed cannot start over {backend!r}: {error}", rank) from error
    yield Ranks(rank, world, device, backend, dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()


def _device(kind: str, rank: int) -> torch.device:
    """Make the device of this rank current."""
    try:
        device = torch.device(kind)
    except RuntimeError:
        raise UsageError(
            f"--device is {kind!r}; expected cpu, cuda or another device type of torch"
        ) from None
    if device.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != device.type:
        raise UsageError(
            f"--device is {kind!r}, but torch {torch.__version__} finds no such device here; see "
            "`python -m spar info`"
        )
    count, index = torch.accelerator.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if index >= count:
        raise UsageError(
            f"LOCAL_RANK is {index}, but this host has {count_text(count, f'{kind} device')}; start at most "
            "one rank for each",
            rank,
        )
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)
