# SPDX-License-Identifier: Apache-2.0
"""Two ranks whose exchanges run over the stand-in driver, in place of benchmarks/gpu_ops.py.

Run as a program by the bring-up's stages: `loop`, with the loop library preloaded, and `push`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from helpers import nccl_faults, nccl_ranks, push_ranks, standins


def start(rank: int, world: int, store: str) -> tuple[dist.ProcessGroup, Any]:
    """Return the group, and an all_to_all."""
    standins.guard_environment()
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    group = dist.group.WORLD
    assert group is not None
    whole = torch.randn(64 * world, 20, 101, generator=torch.manual_seed(7))
    expected = [x.contiguous() for x in whole.tensor_split(world, 1)]
    return group, [("all_to_all", (1, 0, 64 * world), list(whole.chunk(world)), expected, 1.0, False)]


def run(rank: int, world: int, store: str, counts: Any) -> None:
    group, cells = start(rank, world, store)
    for staging in (1 << 14, 1 << 20):  # in many steps, and in one
        nccl_ranks.check_cells(rank, world, group, staging, cells)
    for staging in (1 << 14, 1 << 20):  # last: the staging memory of captured calls stays
        nccl_ranks.check_capture(rank, world, group, staging)
    nccl_ranks.check_streams(rank, world, group)
    nccl_faults.check_wait(rank, world, group)
    counts[rank] = ctypes.CDLL("libnccl.so.2").loop_groups()
    assert counts[rank] > 0
    dist.barrier()
    dist.destroy_process_group()


def run_push(rank: int, world: int, store: str, counts: Any) -> None:
    group, cells = start(rank, world, store)
    for slot in (1 << 14, 1 << 20):  # in many rounds, and in one
        push_ranks.over_push(rank, world, group, slot, push_ranks.check_cells, cells)
        push_ranks.over_push(rank, world, group, slot, nccl_ranks.check_capture, 1 << 14)
    push_ranks.over_push(rank, world, group, slot, nccl_ranks.check_streams)
    push_ranks.over_push(rank, world, group, slot, nccl_faults.check_absent)
    counts[rank] = 6
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--push", action="store_true")
    parser.add_argument("--data")
    options = parser.parse_args()
    counts = torch.zeros(2, dtype=torch.int64).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            run_push if options.push else run, (2, f"{folder}/store", counts), nprocs=2, start_method="fork"
        )
    line = f"2 ranks: operations, graphs, streams and an aborted call, in {counts.sum()} groups."
    print(line)
    if options.data:
        Path(options.data).write_text(json.dumps({"lines": [line]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
