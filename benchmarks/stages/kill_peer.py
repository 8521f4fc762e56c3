# SPDX-License-Identifier: Apache-2.0
"""Kill a peer while both ranks write to each other's slots.

The other rank must raise PeerLostError within seconds, and its CUDA context must live. Two ranks on two GPUs,
or on one.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import gpu_ranks
import torch
import torch.distributed as dist
from report import FAILED, Report, stage

import spar

BEFORE_S = 1.0  # exchanges before the kill
WITHIN_S = 5.0  # by which the other rank raises
LIMIT_S = 40.0  # of the stage
TOKENS = {"cuda": 30 << 12, "cpu": 1 << 10}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def exchange_until_lost(x: torch.Tensor) -> tuple[Exception, torch.Tensor, int]:
    """Exchange until a call raises; return the error, the newest output and the number of calls."""
    calls, y = 0, x
    while True:
        try:
            y = spar.all_to_all(x, None)
            synchronize(x.device)
        except Exception as error:
            return error, y, calls
        calls += 1


def survive(report: Report, x: torch.Tensor, killed: Path) -> None:
    error, y, calls = exchange_until_lost(x)
    took = time.monotonic() - float(killed.read_text()) if killed.exists() else float("inf")
    what = f"{type(error).__name__} {took:.1f} s after the kill, after {calls} exchanges: {error}"
    report.expect(isinstance(error, spar.PeerLostError) and took < WITHIN_S, what)
    report.say(what)
    begin = time.monotonic()
    total = int(torch.ones(1 << 20, device=x.device).sum().item())
    report.expect(total == 1 << 20, f"a kernel after it found {total}")
    report.expect(bool((y == 0).all()), "an output from before the kill changed")
    report.say(f"The context lives: a kernel took {time.monotonic() - begin:.2f} s.")
    report.figure("seconds", took)
    report.figure("exchanges", calls)


def run(rank: int, folder: str, kind: str, data: str | None) -> None:
    report, status = Report(data if rank == 0 else None), FAILED
    try:
        device, killed = gpu_ranks.device_of(kind, rank), Path(folder, "killed")
        limit = datetime.timedelta(seconds=LIMIT_S)
        dist.init_process_group("gloo", f"file://{folder}/store", limit, rank=rank, world_size=2)
        x = torch.zeros(1, TOKENS[kind], 2, 128, dtype=torch.bfloat16, device=device)
        spar.all_to_all(x, None)
        transport, wanted = spar.transport(None, device), "push" if kind == "cuda" else "shm"
        report.expect(transport.name == wanted, str(transport))
        synchronize(device)
        dist.barrier()

        def kill() -> None:
            killed.write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == 1:
            threading.Timer(BEFORE_S, kill).start()
            exchange_until_lost(x)
        else:
            survive(report, x, killed)
            status = report.status()
    except Exception as error:
        traceback.print_exc()
        report.expect(False, f"rank {rank}: {type(error).__name__}: {error}")
    os._exit(status)  # torch's groups would wait for the peer


def main() -> int:
    report, options = stage(__doc__)
    kind = "cpu" if options.stand_ins else "cuda"
    if kind == "cuda" and not torch.cuda.is_available():
        report.skip("torch has no CUDA device")
    if kind == "cuda":
        os.environ |= {"SPAR_TRANSPORT": "push"}  # or the reason why not
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run, args=(rank, folder, kind, options.data)) for rank in range(2)]
        for process in ranks:
            process.start()
        ranks[0].join(LIMIT_S)
        for process in ranks:
            if process.exitcode is None:
                process.kill()
            process.join()
    code, peer = (process.exitcode or 0 for process in ranks)
    if peer != -signal.SIGKILL:
        print(f"rank 1 ended with {peer} before it was killed", file=sys.stderr)
        return FAILED
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
