# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes of their own, which a test starts and ends: they may die, and report by files."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import spar
from helpers import forks, tables
from helpers.limits import Deadline


def start(
    function: Callable[..., Any],
    world: int,
    folder: Path,
    *args: Any,
    initialize: bool = True,
    set_up: bool = True,
    **environment: str,
) -> list[Any]:
    """Run function(rank, folder, *args) on new ranks; `set_up`: after a first exchange on their group."""
    context = forks.context()
    processes = [
        context.Process(
            target=_enter,
            args=(function, rank, world, folder, args, initialize, set_up, environment),
        )
        for rank in range(world)
    ]
    for rank, process in enumerate(processes):
        process.completed = folder / f"{rank}.ended"  # type: ignore[attr-defined]
        process.start()
    return processes


def _enter(
    function: Callable[..., Any],
    rank: int,
    world: int,
    folder: Path,
    args: tuple[Any, ...],
    initialize: bool,
    set_up: bool,
    environment: dict[str, str],
) -> None:
    gc.freeze()  # the objects of torch's import: gc.collect() would take half a second for them
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    if "SPAR_TRANSPORT" in environment:
        tables.use_transport(environment.pop("SPAR_TRANSPORT"), rank)
    os.environ.update(environment)
    torch.set_num_threads(1)
    if initialize:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    if initialize and set_up:
        spar.gather_forward_split_backward(torch.zeros(1), None, 0)
    function(rank, folder, *args)
    (folder / f"{rank}.ended").touch()


def report(folder: Path, rank: int, what: str) -> None:
    """Publish a text under a number, for await_report."""
    (folder / f"{rank}.part").write_text(what)
    (folder / f"{rank}.part").rename(folder / f"{rank}")


def await_report(folder: Path, rank: int, limit: float = 60) -> str:
    end = time.monotonic() + limit
    while not (folder / f"{rank}").exists():
        assert time.monotonic() < end, f"no report of rank {rank}"
        time.sleep(0.01)
    return (folder / f"{rank}").read_text()


def finish(processes: list[Any], limit: float) -> list[int | None]:
    """Return the exit codes of processes that must end within the limit; None: one did not."""
    deadline = Deadline(limit)
    codes: list[int | None] = []
    for process in processes:
        while process.exitcode is None and (left := deadline.left(10)):
            process.join(left)
        # torch's threads sometimes abort a process at its exit (seen without spar, under load)
        torn = process.exitcode == -signal.SIGABRT and process.completed.exists()
        codes.append(0 if torn else process.exitcode)
    for process in processes:
        process.kill()
        process.join(10)  # until then, multiprocessing keeps the process and its pipes, also if it has ended
    return codes
