# SPDX-License-Identifier: Apache-2.0
"""Times of several ways to do the same, in alternating turns on all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TURNS = 5  # at least


@dataclass
class Time:
    """In seconds."""

    median: float
    p99: float


def turn(function: Callable[[], Any], seconds: float) -> list[float]:
    """Time as many calls as fit, at least 3; all ranks make the same number."""
    dist.barrier()
    begin = time.perf_counter()
    function()
    count = reduced(seconds / (time.perf_counter() - begin), dist.ReduceOp.MIN)
    times = []
    for _ in range(max(3, min(2000, int(count)))):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return sorted(times)


def reduced(number: float, by: Any = dist.ReduceOp.MAX) -> float:
    """Reduce a number over all ranks."""
    numbers = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(numbers, by)
    return float(numbers)


def timed(ways: list[Callable[[], Any]], seconds: float) -> list[Time]:
    """Time the ways in alternating turns, more of them if calls are short: the machine's speed changes."""
    begin = time.perf_counter()
    turns = [[turn(way, 0.0)] for way in ways]  # to warm up; not counted
    rounds = max(TURNS, min(25, int(reduced(seconds / (time.perf_counter() - begin), dist.ReduceOp.MIN))))
    for _ in range(rounds):
        for way, found in zip(ways, turns, strict=True):
            found.append(turn(way, seconds / rounds / len(ways)))
    return [
        Time(
            statistics.median(statistics.median(times) for times in found[1:]),
            statistics.median(times[min(len(times) - 1, int(len(times) * 0.99))] for times in found[1:]),
        )
        for found in turns
    ]


def copying(written: int) -> Callable[[], Tensor]:
    source, target = torch.ones(written, dtype=torch.uint8), torch.zeros(written, dtype=torch.uint8)
    return lambda: target.copy_(source)
