# SPDX-License-Identifier: Apache-2.0
"""Measure the host time of calls, for benchmarks/cost.py: --host over nccl, --shm over shared memory.

Over nccl without NCCL and the driver: each rank is a process that uses libraries whose functions do nothing
(stages/null_gpu.c), and CPU tensors in place of a GPU's. Rank 0 measures. What it measures is what spar does
in Python and in C for one call, torch's allocation of the output included. Over shared memory all ranks call.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CALLS = 200  # of a turn
BYTES = 2048  # of an input, bf16


def build(folder: Path) -> None:
    """Build the libraries, and a stand-in for NVRTC, into the folder."""
    flags = ["cc", "-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{ROOT / 'csrc'}"]
    sources = {"libcuda.so.1": "benchmarks/stages/null_gpu.c", "libnccl.so.2": "benchmarks/stages/null_gpu.c"}
    sources["libnvrtc.so.12"] = "tests/standin/libnvrtc.c"
    for name, source in sources.items():
        visible = ["-fvisibility=default"] if "nvrtc" in name else []
        command = [*flags, *visible, str(ROOT / source), f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run(command, check=True)


# ---- a rank ----


def exchanges(group: Any) -> dict[str, Callable[[], Any]]:
    """The calls to measure, on a group whose CPU tensors take the way of CUDA's."""
    import torch

    import spar
    from spar._group.registry import group_of
    from spar._transports import nccl

    comm = group_of(group)
    comm.channel("init", torch.device("cuda", 0))
    channel = comm.channels["cuda"]
    assert isinstance(channel, nccl.NcclChannel), comm.transport("cuda")
    module: Any = nccl
    guards: Any = torch._C._dynamo.guards
    module.empty = guards._empty_strided_cpu  # as transports/cuda.py allocates on a GPU
    comm.channels["cpu"], comm.transports["cpu"] = channel, comm.transports["cuda"]
    world = group.size()
    x = torch.zeros(1, BYTES // 2 // 64, 8, 8, dtype=torch.bfloat16)
    whole = torch.zeros(BYTES // 2, dtype=torch.bfloat16)
    sequence, heads = world * x.size(1), world * x.size(2)
    return {
        "all_to_all": lambda: spar.all_to_all(x, group, 2, 1, sequence),
        "its inverse": lambda: spar.all_to_all(x, group, 1, 2, heads),
        "all_gather": lambda: spar.all_gather(whole, group),
    }


def shared(group: Any) -> dict[str, Callable[[], Any]]:
    """The calls to measure over shared memory, which all ranks make; and what torch takes by itself."""
    import torch

    import spar

    x = [torch.zeros(1, BYTES // 2 // 64, 8, 8, dtype=torch.bfloat16) for _ in range(3)]
    learned = [each.clone().requires_grad_() for each in x]
    gradients = [torch.ones_like(y) for y in spar.all_to_all(x, group)]

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            return tuple([each.view_as(each) for each in inputs])

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads

    def step(forward: Callable[[], Any], grads: list[torch.Tensor]) -> None:
        for each in learned:
            each.grad = None
        torch.autograd.backward(forward(), grads)

    return {
        "all_to_all": lambda: spar.all_to_all(x[0], group),
        "Q, K, V in one": lambda: spar.all_to_all(x, group),
        "Q, K, V in three": lambda: [spar.all_to_all(each, group) for each in x],
        "Q, K, V in one, recorded": lambda: spar.all_to_all(learned, group),
        "Q, K, V in one, and backward": lambda: step(lambda: spar.all_to_all(learned, group), gradients),
        "a Function of three, and backward": lambda: step(lambda: Nothing.apply(*learned), x),  # type: ignore[no-untyped-call]
    }


def microseconds(call: Callable[[], Any]) -> float:
    """Return the median of the calls' mean times in many turns."""
    times = []
    for _ in range(60):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    return statistics.median(times[10:])


def count_instructions(call: Callable[[], Any], rank: int) -> None:
    """Run the call often and twice as often, on rank 0 in two dumps of callgrind."""
    count = ctypes.CDLL("libcuda.so.1").null_count if rank == 0 else bool
    for _ in range(20):
        call()
    for times in (CALLS, 2 * CALLS):
        count(1)
        for _ in range(times):
            call()
        count(0)


def serve(rank: int, world: int, folder: Path, counts: bool, shm: bool) -> None:
    for name in ("libcuda.so.1", "libnccl.so.2", "libnvrtc.so.12"):
        ctypes.CDLL(str(folder / name), mode=os.RTLD_GLOBAL)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    place = f"file://{folder}/store-{world}-{counts}-{shm}"
    dist.init_process_group("gloo", place, rank=rank, world_size=world)
    for name, call in (shared if shm else exchanges)(dist.group.WORLD).items():
        us = 0.0
        if counts and (rank == 0 or shm):
            count_instructions(call, rank)
        elif rank == 0 or shm:
            us = microseconds(call)
        if rank == 0:
            print(f"{name}: {us:.2f}", flush=True)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("over", "1")
    store.wait(["over"])
    os._exit(0)


# ---- all ranks ----


def run(world: int, folder: Path, counts: bool, shm: bool = False) -> dict[str, float]:
    """Return microseconds, or thousands of instructions, of each call on `world` ranks."""
    processes = []
    for rank in range(world):
        tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "-q"] if counts and rank == 0 else []
        command = [*tool, sys.executable, str(HERE / "host_cost.py"), "--rank", str(rank)]
        command += ["--world", str(world), "--folder", str(folder), *(["--counts"] if counts else [])]
        command += ["--shm"] if shm else []
        environment = os.environ | {"NULL_RANK": str(rank), "NULL_WORLD": str(world)}
        environment |= {"XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
        if shm:  # once a second a call looks for idle pages: under callgrind, many calls
            environment["SPAR_ARENA_MAX"] = str(64 << 20)
        else:
            environment["SPAR_TRANSPORT"] = "nccl"
        output = subprocess.PIPE if rank == 0 else None
        processes.append(
            subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output, text=True)
        )
    text, errors = processes[0].communicate()
    for process in processes[1:]:
        process.wait() if processes[0].returncode == 0 else process.kill()
    if processes[0].returncode:
        raise RuntimeError(f"rank 0 of {world}: {errors[-3000:]}")
    times = {line.rpartition(": ")[0]: float(line.rpartition(": ")[2]) for line in text.splitlines()}
    return dict(zip(times, instructions(folder), strict=True)) if counts else times


def instructions(folder: Path) -> list[float]:
    """Return thousands of instructions of each call, from callgrind's files; remove these."""
    files = sorted(folder.glob("callgrind.out.*.*"), key=lambda path: int(path.suffix[1:]))
    totals = []
    for path in files:
        found = re.search(r"^totals: (\d+)", path.read_text(), re.M)
        totals.append(int(found[1]) if found else 0)
    for path in folder.glob("callgrind.out.*"):
        path.unlink()
    return [(more - less) / CALLS / 1000 for less, more in zip(totals[::2], totals[1::2], strict=True)]


def table(worlds: tuple[int, ...], shm: bool) -> None:
    counted = shutil.which("valgrind") is not None
    print("| op, 2 KB | ranks | host time | thousands of instructions |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        build(Path(name))
        for world in worlds:
            times = run(world, Path(name), False, shm)
            counts = run(world, Path(name), True, shm) if counted else {}
            for op, us in times.items():
                shown = f"{counts[op]:.1f}" if op in counts else "no valgrind"
                print(f"| {op} | {world} | {us:.1f} us | {shown} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--counts", action="store_true")
    parser.add_argument("--shm", action="store_true")
    options = parser.parse_args()
    serve(options.rank, options.world, options.folder, options.counts, options.shm)
