# SPDX-License-Identifier: Apache-2.0
"""Check and time all operations over the push transport: python benchmarks/stages/push.py [--data FILE].

A rank for each GPU; with one GPU, two ranks on it, whose processes take turns of milliseconds, unless the
CUDA MPS daemon runs. The ranks need no communicator of NCCL's. Times are set against permute,
all_to_all_single, permute, where the process group's backend can do that, and against its permutes alone.
"""

from __future__ import annotations

import argparse
import datetime
import math
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
from gpu_ops import check
from report import Report, stage

import spar
from spar import _C
from spar._group.registry import group_of

LIMIT_S = 50  # of each step of the process group, and of an exchange
REPLAY_S = 4
BUSY_CYCLES = 4_000_000_000  # 2 s
BYTES = 8 << 20  # of a rank's input


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


def check_busy_set_up(device: torch.device) -> None:
    """A group's set-up takes push although rank 0's stream is busy for seconds."""
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        torch.cuda._sleep(BUSY_CYCLES)
    group = dist.new_group()
    spar.init(group, device)
    transport = spar.transport(group, device)
    check(transport.name == "push", f"next to a busy stream: {transport}")
    spar.close(group)
    gpu_ops.meet()


def check_attention_graph(device: torch.device) -> None:
    """A captured ring of attention, whose keys travel in a side stream, follows its inputs."""
    shape = 1, 4096, 8, 64
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    layout = spar.SequenceLayout.even(shape[1] * dist.get_world_size())

    def attend() -> torch.Tensor:
        return spar.attention(q, k, v, layout, causal=True, method="ring")

    with torch.no_grad():
        attend()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = attend()
        for _ in range(2):
            for x in (q, k, v):
                x.normal_()
            graph.replay()
            wanted = attend().float()
            error = float((out.float() - wanted).norm() / wanted.norm())
            check(error < 0.01, f"a replay of attention: an error of {error:.0e}")


class Outputs:
    """A group whose outputs are large enough to be written by the peers."""

    def __init__(self, device: torch.device) -> None:
        world = dist.get_world_size()
        self.group = dist.new_group()
        shape = 1, BYTES // (4 * 128 * 8 * world), 8 * world, 128
        self.x = torch.arange(float(math.prod(shape)), device=device).view(shape) + dist.get_rank()
        self.wanted = self.exchange()
        self.channel: Any = group_of(self.group).channels["cuda"]

    def exchange(self) -> torch.Tensor:
        return spar.all_to_all(self.x, self.group)

    def lies_in_slot(self, output: torch.Tensor) -> bool:
        return _C.in_slot(output.data_ptr())


def check_outputs(device: torch.device, report: Report) -> None:
    """Outputs lie in the slot and are right; they follow streams, are used again, and may fill the slot."""
    outputs = Outputs(device)
    if outputs.channel.pooled is None:
        report.say("This torch has no pools for outputs.")
        return
    first = outputs.exchange()
    check(outputs.lies_in_slot(first), f"an output lies at {first.data_ptr():x}, not in the slot")
    place = first.data_ptr()
    del first
    again = outputs.exchange()
    check(again.data_ptr() == place, "a freed output was not used again")
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        copy = again.clone()
    again.record_stream(side)
    del again
    later = [outputs.exchange() for _ in range(3)]
    check(
        place not in [each.data_ptr() for each in later], "an output that a side stream reads was used again"
    )
    kept = [outputs.exchange() for _ in range(40)]
    torch.cuda.synchronize()
    check(not all(map(outputs.lies_in_slot, kept)), "the slot was never full")
    for each in (copy, *later, *kept):
        check(torch.equal(each, outputs.wanted), "an output is wrong")
    spar.close(outputs.group)
    check(torch.equal(later[0], outputs.wanted), "an output changed when its group was closed")
    gpu_ops.meet()


def time_outputs(device: torch.device, report: Report) -> None:
    """Time calls whose peers write to the outputs, and to their images."""
    outputs = Outputs(device)
    pooled, found = outputs.channel.pooled, {}
    for name, empty in (("outputs", pooled), ("images", None)):
        outputs.channel.pooled = empty
        for _ in range(3):
            outputs.exchange()
        found[name] = gpu_ops.microseconds(outputs.exchange, 20)
        gpu_ops.meet()
    report.figure("us_of_8_MiB", found)
    report.say(f"8 MiB of a rank: to outputs {found['outputs']:.0f} us, to images {found['images']:.0f} us.")
    spar.close(outputs.group)


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
        "Outputs that peers write to are right, follow streams, and outlive their group.": (
            lambda: check_outputs(device, report)
        ),
        "Next to a busy stream, a set-up takes push.": lambda: check_busy_set_up(device),
        "Direct outputs were timed.": lambda: time_outputs(device, report),
        "The times were measured.": lambda: gpu_ops.times(device, report),
        **{what: lambda fault=fault: fault(device) for what, fault in gpu_ops.FAULTS.items()},  # type: ignore[misc]
        "If a rank does not replay its graph, the stream continues.": lambda: check_absent_replay(device),
        "Replays of a ring of attention are correct.": lambda: check_attention_graph(device),
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
    options.device, options.ranks = "cuda", None
    options.backend = "nccl" if world <= torch.cuda.device_count() else "gloo"
    return gpu_ranks.start(run, options, "push", shares_gpus=True)


if __name__ == "__main__":
    sys.exit(main())
