# SPDX-License-Identifier: Apache-2.0
"""Measure attention layers, forward and backward: times, balance and memory."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import spar

from ..measure import reduced, timed
from .kernels import counted, no_kernel
from .ways import GATHER, RING, WHOLE, ways


@dataclass
class Row:
    """What is measured of one way to attend: times in seconds, memory in bytes."""

    tokens: int
    way: str
    step: float
    error: float
    outside: float = 0.0
    peak: float = 0.0
    keys: float = 0.0
    products: float = 0.0  # the slowest rank's, divided by the mean; `seconds` likewise
    seconds: float = 0.0


def tensors_of(tokens: int, args: Namespace, key_heads: int) -> list[Tensor]:
    """Return q, k, v and the gradient of the output; of the whole sequence, equal on all ranks."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, tokens, n, args.width) for n in (args.heads, key_heads, key_heads, args.heads)]
    return [torch.randn(shape, generator=generator).to(getattr(torch, args.dtype)) for shape in shapes]


def with_gradients(attend: Callable[..., Tensor], inputs: Sequence[Tensor], upper: Tensor) -> list[Tensor]:
    """Return the output of an attention, and the gradients of its inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = attend(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, upper)]


class Layer:
    """A step's tensors, and the ways to attend with them."""

    def __init__(self, tokens: int, args: Namespace, key_heads: int) -> None:
        self.whole, self.ways = tensors_of(tokens, args, key_heads), ways(tokens)

    def step(self, name: str) -> Callable[[], list[Tensor]]:
        """Return a function that returns the output and the gradients; it does nothing where others wait."""
        way = self.ways[name]
        if name == WHOLE and dist.get_rank() > 0:
            return list
        *inputs, upper = [x[:, way.positions].contiguous() for x in self.whole]
        return partial(with_gradients, way.function, inputs, upper)


# ---- times ----


def once(step: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return the seconds and the CPU seconds of a step that all ranks begin at once, and its result."""
    dist.barrier()
    begin = time.perf_counter(), time.process_time()
    result = step()
    return time.perf_counter() - begin[0], time.process_time() - begin[1], result


def measure_steps(layer: Layer, tokens: int, seconds: float) -> list[Row]:
    """Time the steps in alternating turns; a first turn compares the results with those of one process."""
    rows, firsts, steps = [], [], [layer.step(name) for name in layer.ways]
    expected: list[Tensor] = []
    for name, step in zip(layer.ways, steps, strict=True):
        took, _, results = once(step)
        firsts.append(reduced(took))
        if name == WHOLE:
            expected = results or [torch.empty_like(layer.whole[i]) for i in (3, 0, 1, 2)]
            for x in expected:
                dist.broadcast(x, 0)
        index = layer.ways[name].positions
        parts = zip(results, expected, strict=False)
        error = max((float((a - b[:, index]).abs().max()) for a, b in parts), default=0.0)
        rows.append(Row(tokens, name, 0.0, reduced(error)))
        del results
    first = sum(firsts)
    turns = range(max(3 if first < seconds else 0, min(15, int(seconds / first))))
    times = [[reduced(once(step)[0]) for step in steps] for _ in turns] or [firsts]  # the first warmed up
    for row, durations in zip(rows, zip(*times, strict=True), strict=True):
        row.step = statistics.median(durations)
    return rows


def measure_outside(layer: Layer, rows: list[Row], seconds: float) -> None:
    shared = [row for row in rows if row.way != WHOLE]
    with no_kernel():
        times = timed([layer.step(row.way) for row in shared], seconds)
    for row, took in zip(shared, times, strict=True):
        row.outside = reduced(took.median)


def measure_balance(layer: Layer, rows: list[Row], seconds: float) -> None:
    for row in rows:
        if row.way in (GATHER, RING):
            step, times = layer.step(row.way), []
            for _ in range(max(1, min(5, int(seconds / row.step)))):
                dist.barrier()
                with counted() as work:
                    step()
                times.append(work.seconds)
            row.products, row.seconds = _over_mean(work.products), _over_mean(min(times))


def _over_mean(seconds: float) -> float:
    return reduced(seconds) / (reduced(seconds, dist.ReduceOp.SUM) / dist.get_world_size())


# ---- memory ----


def peak(step: Callable[[], Any], steps: int = 3) -> float:
    """Return by how much this process's memory grows at most, in bytes.

    VmHWM counts memory of the peers that is mapped, too: of shared memory only this process's is added.
    """
    step()
    gc.collect()
    spar.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, shared = _status(), spar.memory_stats()["arena.reserved_bytes"]
    for _ in range(steps):
        step()
    after = _status()
    anonymous = after["VmHWM"] - after["RssShmem"] - after["RssFile"] - before["RssAnon"]
    return anonymous + spar.memory_stats()["arena.reserved_bytes"] - shared


def _status() -> dict[str, int]:
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[0][:3] in ("VmH", "Rss")}


def measure_memory(tokens: int, args: Namespace, rows: list[Row]) -> None:
    def mean_peak(layer: Layer, way: str) -> float:
        ranks = 1 if way == WHOLE else dist.get_world_size()
        return reduced(peak(layer.step(way)), dist.ReduceOp.SUM) / ranks

    layer = Layer(tokens, args, args.key_heads)
    with no_kernel(copies=True):
        for row in rows:
            row.peak = mean_peak(layer, row.way)
        for key_heads, sign in ((args.heads, 1), (1, -1)) if args.heads > 1 else ():
            layer = Layer(tokens, args, key_heads)
            for row in rows:
                if row.way in (GATHER, RING):
                    row.keys += sign * mean_peak(layer, row.way) * args.heads / (args.heads - 1)
