# SPDX-License-Identifier: Apache-2.0
"""Jobs that end without an error, in a row: python -m helpers.exits JOBS FOLDER; prints their exit codes.

Each rank is a fork, which Python finalizes as it does a script. gloo's threads hardly get a core that
other threads want: they still hold the last collective's tensors when the rank exits, as on a busy machine.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD = 4


def yield_core(threads: list[int]) -> None:
    """Let these threads run on this thread's core, with the lowest priority."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in (0, *threads):
        os.sched_setaffinity(thread, {cores[os.getpid() % len(cores)]})
    for thread in threads:
        os.setpriority(os.PRIO_PROCESS, thread, 19)


def gloo_threads() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(task.name) for task in tasks if (task / "comm").read_text() == "pt_gloo_runloop\n"]


def make_call(spar: Any, rng: random.Random, rank: int, group: dist.ProcessGroup) -> None:
    """Exchange a tensor of a random shape, forward and backward."""
    shape = [rng.randint(1, 9) for _ in range(rng.randint(2, 4))]
    kind, (dim, other) = rng.randrange(3), rng.sample(range(len(shape)), 2)
    total, sizes = shape[dim], spar.cal_split_sizes(shape[dim], WORLD)
    if kind > 0:
        shape[dim] = sizes[rank]
    x = torch.ones(shape, requires_grad=True)
    if kind == 0:
        y = spar.split_forward_gather_backward(x, group, dim, sizes)
    elif kind == 1:
        y = spar.gather_forward_split_backward(x, group, dim, sizes)
    else:
        y = spar.all_to_all(x, group, other, dim, gather_size=total)
    y.sum().backward()


def run_rank(rank: int, store: Path, seed: int) -> None:
    import spar  # not before the fork: it refuses to exchange in a fork of a process that has it

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    group, rng = dist.group.WORLD, random.Random(seed)
    assert group is not None
    for _ in range(100):
        make_call(spar, rng, rank, group)
    dist.barrier()
    threads = gloo_threads()
    assert threads
    yield_core(threads)
    globals().update(group=group)  # as a script's variable, which outlives destroy_process_group
    found: list[object] = [None] * WORLD
    dist.all_gather_object(found, rank)
    assert found == list(range(WORLD))
    dist.destroy_process_group()
    sys.exit(0)


def main(jobs: int, folder: Path) -> None:
    for job in range(jobs):
        processes = []
        for rank in range(WORLD):
            processes.append(os.fork())
            if not processes[-1]:
                run_rank(rank, folder / f"{job}", job)
        print(*(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
