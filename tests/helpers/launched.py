# SPDX-License-Identifier: Apache-2.0
"""Ranks with torchrun's environment, without the seconds in which it and each of them import torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from helpers.processes import finish, start


def launch(function: Callable[..., Any], world: int, folder: Path, *args: Any, limit: float = 120) -> None:
    """Runs function(folder, *args) on `world` fresh ranks, which must end well."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent
    ranks = start(_enter, world, folder, world, store.port, function, args, initialize=False)
    assert finish(ranks, limit) == [0] * world


def _enter(
    rank: int, folder: Path, world: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        OMP_NUM_THREADS="1",
    )
    function(folder, *args)
