# SPDX-License-Identifier: Apache-2.0
"""Run `python -m spar check --device cuda` with SPAR_TRANSPORT=push, and then nccl.

A rank for each GPU; with one GPU, two ranks on it, over the loop library in NCCL's place (loop_nccl.c).
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import loop
import torch
from report import Report, stage

LIMIT_S, END_S = 70.0, 5.0  # of a run, and of the other ranks behind rank 0
TRANSPORTS = ("push", "nccl")
ROW = re.compile(r"^(\S.*?)  +(pass|FAIL|not run)  +(\S+)  +\S", re.M)  # operation, result, transports


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit status; None: it was killed after so many seconds."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def run_ranks(world: int, gpus: int, environment: dict[str, str], *arguments: str) -> tuple[int | None, str]:
    """Run the ranks; return rank 0's exit status, None after the limit, and what it printed."""
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(world)]
        for rank, path in enumerate(outputs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % gpus), "LOCAL_WORLD_SIZE": str(world)}
            command = [sys.executable, "-m", "spar", "check", *arguments]
            with path.open("wb") as output:
                ranks.append(subprocess.Popen(command, env=environment | shared | own, stdout=output))
        status = ended(ranks[0], LIMIT_S)
        for process in ranks[1:]:
            ended(process, END_S)
        return status, outputs[0].read_text()


def check(report: Report, transport: str, status: int | None, output: str) -> None:
    rows = ROW.findall(output)
    wrong = [f"{name}: {result}" for name, result, _ in rows if result != "pass"]
    used = sorted({name for _, _, names in rows for name in names.split("+")} - {"-"})
    end = f"killed after {LIMIT_S:g} s" if status is None else f"exit status {status}"
    counts = f"{len(rows) - len(wrong)} of {len(rows)} checks pass"
    report.say(f"SPAR_TRANSPORT={transport}: {counts}, over {', '.join(used)}; {end}.")
    report.figure(transport, {"checks": len(rows), "wrong": wrong, "transports": used})
    is_right = status == 0 and bool(rows) and not wrong and transport in used
    report.expect(is_right, f"{transport}: {end}; {'; '.join(wrong)}")
    if not is_right:
        print(output)


def main() -> int:
    report, options = stage(__doc__)
    if options.stand_ins:
        status, output = run_ranks(2, 1, dict(os.environ), "--only", "all_gather")
        check(report, "shm", status, output)
        return report.status()
    if not torch.cuda.is_available():
        report.skip("torch has no CUDA device")
    gpus = torch.cuda.device_count()
    for transport in TRANSPORTS:
        environment = os.environ | {"SPAR_TRANSPORT": transport}
        if gpus == 1 and transport == "nccl":
            environment |= loop.preloaded(options.kit)
        backend = ("--backend", "gloo") if gpus == 1 else ()
        found = run_ranks(max(2, gpus), gpus, environment, "--device", "cuda", *backend)
        check(report, transport, *found)
    return report.status()


if __name__ == "__main__":
    sys.exit(main())
