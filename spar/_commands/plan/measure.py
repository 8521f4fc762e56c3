# SPDX-License-Identifier: Apache-2.0
"""`python -m spar plan --measure`: time one attention and exchanges of two sizes, and keep the speeds."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ... import groups
from ..._control.speeds import Measured, Speeds, write
from ...ops.all_to_all import all_to_all
from ..printing import KIB, MIB, size_text, time_text
from ..ranks import Ranks, UsageError, joined, launched

TURNS = 7
FEW, MANY = 2 * KIB, 16 * MIB  # bytes of a rank
HEADS, WIDTH = 4, 64
TOKENS = {"cpu": 1024}
OTHERWISE = 16384  # tokens on a GPU


def run(device: str, backend: str | None) -> int:
    """Measure on the ranks that a launcher started, and print what the file has then."""
    if not launched() or os.environ["WORLD_SIZE"] == "1":
        raise UsageError("--measure on one rank; expected several, started by torchrun")
    with joined(device, backend) as ranks:
        speeds, hosts = measured(ranks), len(groups.transport(device=ranks.device.type).hosts)
        found = Measured(far=speeds) if hosts > 1 else Measured(near=speeds)
        if ranks.on_host()[0] == 0:
            try:
                path = write(ranks.device.type, found)
            except OSError as error:
                raise UsageError(f"the speeds cannot be kept: {error}", ranks.rank) from error
            if ranks.rank == 0:
                print(text_of(speeds, "between hosts" if hosts > 1 else "within a host"))
                print(f"kept in {path}")
    return 0


def measured(ranks: Ranks) -> Speeds:
    """Return the speeds of the slowest rank."""
    device, world = ranks.device, ranks.world
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    tokens = TOKENS.get(device.type, OTHERWISE)
    q, k, v = torch.randn(3, 1, HEADS, tokens, WIDTH, dtype=dtype, device=device, requires_grad=True)
    upper = torch.ones_like(q)

    def attend() -> object:
        return torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), upper)

    def exchange(size: int) -> Callable[[], object]:
        x = torch.zeros(1, size // (4 * WIDTH * world), world, WIDTH, device=device)
        return functools.partial(all_to_all, x, None, 2, 1)

    kernel, few, many = (_median(call, device) for call in (attend, exchange(FEW), exchange(MANY)))
    work = HEADS * WIDTH * tokens * (tokens + 1) / 2
    sent = MANY * (world - 1) / world
    return Speeds(work / kernel, few, sent / max(many - few, 1e-9))


def _median(call: Callable[[], object], device: torch.device) -> float:
    """Return the median over the turns of the slowest rank's seconds."""
    times = []
    for _ in range(TURNS + 1):
        dist.barrier()
        begin = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=device))
        dist.all_reduce(times[-1], dist.ReduceOp.MAX)
    return statistics.median([x.item() for x in times[1:]])


def text_of(speeds: Speeds, where: str) -> str:
    kernel = (
        f"attention: {speeds.work / 1e9:.3g} billion products of an item of a query and a key in a second"
    )
    moving = f"{time_text(speeds.latency)}, and {size_text(speeds.bandwidth)} of a rank in a second"
    return f"{kernel}, with backward\nexchanges {where}: {moving}"
