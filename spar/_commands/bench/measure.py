# SPDX-License-Identifier: Apache-2.0
"""Time operations, forward and backward, in turns that alternate with their references on all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..check.trial import listed
from .libraries import AllToAll
from .operations import SMALLEST, Operation
from .report import Row, Time

TURNS = 5  # at least
Outputs = Tensor | list[Tensor] | tuple[Tensor, ...]


class Identity(torch.autograd.Function):
    """The shortest Function in Python, for the cost of the engine around it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def measure(operation: Operation, size: int, seconds: float, libraries: Mapping[str, AllToAll]) -> list[Row]:
    """Check the results, and time each direction for about `seconds`. Collective.

    libraries: other libraries' all_to_all, by their names; timed if the operation is an all_to_all.

    Raises:
        SystemExit: the ways have different results.
    """
    ways: dict[str, Callable[..., Outputs]] = {"spar": operation.ours, "formulation": operation.theirs}
    if operation.other:
        ways["other"] = operation.other
    compared = libraries if operation.name == "all_to_all" else {}
    ways |= compared
    leaves = [x.detach().requires_grad_() for x in operation.inputs]

    def grads_of(function: Callable[..., Outputs], grads: list[Tensor] | None) -> Callable[[], Outputs]:
        ys = listed(function(*leaves))
        outer_grads = [torch.ones_like(y) for y in ys] if grads is None else grads
        return lambda: torch.autograd.grad(ys, leaves, outer_grads, retain_graph=True)

    def compare(what: str, ours: Outputs, name: str, theirs: Outputs) -> None:
        if not all(map(torch.equal, listed(ours), listed(theirs))):
            raise SystemExit(
                f"rank {dist.get_rank()}: {what} of {operation.name} ({size} bytes) differs from the {name}'s"
            )

    ys = listed(operation.ours(*operation.inputs))
    generator = torch.Generator().manual_seed(2)
    upstream = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in ys]
    backward = {name: grads_of(way, upstream) for name, way in ways.items()}
    for name in ("formulation", *compared):
        compare("the result", ys, name, ways[name](*operation.inputs))
        compare("the gradient", backward["spar"](), name, backward[name]())

    def row(direction: str, written: int, calls: dict[str, Callable[[], Any]]) -> Row:
        calls = {**calls, "copy": copying(written)}
        if direction == "backward":
            calls["engine"] = grads_of(Identity.apply, None)
        times = dict(zip(calls, timed(list(calls.values()), seconds), strict=True))
        library_times = {name: times.pop(name) for name in compared}
        return Row(
            operation.name,
            direction,
            size,
            written,
            **times,  # spar, formulation, copy, engine, other
            other_name=operation.other_name,
            libraries=library_times,
        )

    def forward(inputs: Any) -> dict[str, Callable[[], Any]]:
        return {name: partial(way, *inputs) for name, way in ways.items()}

    rows = [row("forward", operation.written, forward(operation.inputs))]
    if size == SMALLEST:  # at larger sizes it adds the same microseconds
        rows.append(row("recorded", operation.written, forward(leaves)))
    rows.append(row("backward", operation.written_back, backward))
    return rows


# ---- times ----


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
        for way, samples in zip(ways, turns, strict=True):
            samples.append(turn(way, seconds / rounds / len(ways)))
    return [
        Time(
            statistics.median(statistics.median(times) for times in samples[1:]),
            statistics.median(times[min(len(times) - 1, int(len(times) * 0.99))] for times in samples[1:]),
        )
        for samples in turns
    ]


def copying(written: int) -> Callable[[], Tensor]:
    source, target = torch.ones(written, dtype=torch.uint8), torch.zeros(written, dtype=torch.uint8)
    return lambda: target.copy_(source)
