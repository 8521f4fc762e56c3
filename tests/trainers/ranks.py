# SPDX-License-Identifier: Apache-2.0
"""Ranks of `runs/TRAINER.py`, forked from one process that imports its library, which takes seconds.

`python -m trainers.ranks TRAINER FOLDER "RANKS ARGUMENT..." ...`: each starts that many ranks, after those
before ended. They have torchrun's environment, and save what `main(folder, *arguments)` returns.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def enter(rank: int, world: int, port: int, module: Any, folder: Path, arguments: list[str]) -> None:
    gc.freeze()  # the objects of imports: each gc.collect() would take a quarter of a second for them
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "tests"}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), **agent)
    found = module.main(folder, *arguments)
    torch.save(found, folder / f"{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def run(module: Any, folder: Path, world: int, arguments: list[str]) -> None:
    """Run all ranks to their end; where one fails, kill the others and exit."""
    folder.mkdir()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent
    context = multiprocessing.get_context("fork")
    given = world, store.port, module, folder, arguments
    ranks = [context.Process(target=enter, args=(rank, *given)) for rank in range(world)]
    for each in ranks:
        each.start()
    running = {each.sentinel: each for each in ranks}
    while running:
        for sentinel in connection.wait(list(running)):
            if running.pop(sentinel).exitcode:
                for each in ranks:
                    each.kill()
                sys.exit(f"a rank of {module.__name__} failed")


if __name__ == "__main__":
    gc.set_threshold(10_000)  # as conftest.py does
    trainer, root, *runs = sys.argv[1:]
    runner = importlib.import_module(f"trainers.runs.{trainer}")
    for i, words in enumerate(runs):
        ranks, *given = words.split()
        run(runner, Path(root) / str(i), int(ranks), given)
