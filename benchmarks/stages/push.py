# SPDX-License-Identifier: Apache-2.0
"""Check and time all operations over the push transport: python benchmarks/stages/push.py [--data FILE].

A rank for each GPU; with one GPU, two ranks on it, whose processes take turns of milliseconds, unless the
CUDA MPS daemon runs. The ranks need no communicator of NCCL's. Times are set against permute,
all_to_all_single, permute, where the process group's backend can do that, and against its permutes alone.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_ops
import gpu_ranks
import torch
import torch.distributed as dist
from gpu_ops import MIB, check, microseconds
from report import Report, stage
from torch import Tensor

import spar
from spar._commands.bench import formulations
from spar._group.registry import group_of

LIMIT_S = 50  # of each step of the process group, and of an exchange
REPLAY_S = 4
SIZES = (MIB // 4, 2 * MIB, 32 * MIB, 200 * MIB)
FAR_APART = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}  # torch's name: ranks may share a GPU


def check_absent_replay(device: torch.device) -> None:
    """The last rank does not replay its graph; the others' waits end by the kernels' own time limit."""
    group, x = dist.new_group(), torch.zeros(4, device=device)
    spar.gather_forward_split_backward(x, group, 0)
    group_of(group).timeout = REPLAY_S
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        spar.gather_forward_split_backward(x, group, 0)
    gpu_ops.meet()
    if dist.get_rank() != dist.get_world_size() - 1:
        begin = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        waited = time.monotonic() - begin
        check(REPLAY_S - 1 < waited < REPLAY_S + 3, f"a replay waited {waited:.1f} s, not {REPLAY_S} s")
        time.sleep(0.5)  # the watchdog reads what the kernel wrote
        gpu_ops.expect_error(group, x, spar.ExchangeTimeoutError, "a replay without a peer")
    gpu_ops.meet()


def host_us(device: torch.device) -> float:
    """Return the host time of a call."""
    small = torch.zeros(1, 16, dist.get_world_size(), 8, device=device, dtype=torch.bfloat16)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            spar.all_to_all(small, None)
        times.append((time.perf_counter() - begin) / 20 * 1e6)
    torch.cuda.synchronize()
    return min(times)


def times(device: torch.device, report: Report) -> None:
    world = dist.get_world_size()
    host = host_us(device)
    report.figure("call_us", host)
    report.say(f"Host time of a call: {host:.1f} us.")
    columns = ("push", "permute + all_to_all_single + permute", "its permutes alone", "a copy of the input")
    report.table("bytes of a rank", *columns)
    found: dict[str, list[float | None]] = {}
    for size in SIZES:
        x = torch.zeros(1, size // (2 * 128 * 8 * world), 8 * world, 128, device=device, dtype=torch.bfloat16)

        def permutes(x: Tensor = x) -> Tensor:
            parts = x.unflatten(2, (world, -1)).movedim(2, 0).contiguous()
            back: Tensor = parts.movedim(0, 1).flatten(1, 2).contiguous()
            return back

        calls: list[Callable[[], object]] = [
            lambda x=x: spar.all_to_all(x, None),  # type: ignore[misc]
            lambda x=x: formulations.exchange(x, 2, 1),  # type: ignore[misc]
            permutes,
            x.clone,
        ]
        row: list[float | None] = []
        for call in calls:
            try:
                for _ in range(3):
                    call()
                row.append(microseconds(call, 10))
            except (RuntimeError, ValueError):  # gloo has no all_to_all of CUDA tensors
                row.append(None)
        found[f"{size // 1024} KiB"] = row
        cells = ["not possible" if us is None else f"{us:.0f} us" for us in row]
        report.row(f"{size // 1024} KiB", *cells)
    report.figure("us", found)


def run(rank: int, world: int, store: str, options: argparse.Namespace) -> None:
    device, gpus = gpu_ranks.device_of("cuda", rank), torch.cuda.device_count()
    limit = datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group(options.backend, f"file://{store}", limit, rank=rank, world_size=world)
    report = Report(options.data if rank == 0 else None, rank == 0)
    begin = time.monotonic()
    spar.init(None, device)
    report.figure("set_up_s", time.monotonic() - begin)
    transport = spar.transport(None, device)
    check(transport.name == "push", str(transport))
    name = torch.cuda.get_device_name(device)
    report.say(f"{name} x {gpus}, {world} ranks, torch {torch.__version__}, backend {options.backend}.")
    steps: dict[str, Callable[[], Any]] = {
        "All operations are correct, forward and backward.": lambda: gpu_ops.check_operations(device),
        "Replays of CUDA graphs are correct.": lambda: gpu_ops.check_graph(device),
        **{what: lambda fault=fault: fault(device) for what, fault in gpu_ops.FAULTS.items()},  # type: ignore[misc]
        "If a rank does not replay its graph, the stream continues.": lambda: check_absent_replay(device),
        "The times were measured.": lambda: times(device, report),
    }
    for what, step in steps.items():
        begin = time.monotonic()
        step()
        report.say(f"- {what} ({time.monotonic() - begin:.1f} s)")
    gpu_ops.end_group()


def over_stand_ins(data: str | None) -> int:
    script = Path(__file__).resolve().parents[2] / "tests/helpers/loop_ranks.py"
    command = [sys.executable, str(script), "--push", *(["--data", data] if data else [])]
    return subprocess.run(command).returncode


def main() -> int:
    report, options = stage(__doc__)
    if options.stand_ins:
        return over_stand_ins(options.data)
    if not torch.cuda.is_available():
        report.skip("torch has no CUDA device")
    world = max(2, torch.cuda.device_count())
    os.environ |= {"SPAR_TRANSPORT": "push"}  # or the reason why not
    if world > torch.cuda.device_count():
        os.environ |= FAR_APART
    options.device, options.ranks = "cuda", None
    options.backend = "nccl" if world <= torch.cuda.device_count() else "gloo"
    return gpu_ranks.start(run, options, "push", shares_gpus=True)


if __name__ == "__main__":
    sys.exit(main())
