# SPDX-License-Identifier: Apache-2.0
"""What train.py reports: the memory of a rank, the time of its exchanges, and the usual code beside them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from model import ByteModel
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import profile

import spar
from spar import SequenceLayout

CALLS, ROUNDS = 20, 10  # of which the fastest round counts: other work on the machine only makes it slower


class Losses(Protocol):
    """A run of training."""

    losses: list[float]
    differences: list[float]


def gathered(value: float) -> list[float]:
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def largest(value: int) -> int:
    return int(max(gathered(value)))


# ---- memory ----


def kept_bytes(model: ByteModel, batch: tuple[Tensor, Tensor], layout: SequenceLayout) -> int:
    """Return the bytes that one forward keeps for backward, the parameters aside.

    The resident memory of a process is no measure of them: torch alone takes more, and freed memory stays.
    """
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()  # of views of one storage, once
        return x.detach()

    with saved_tensors_hooks(note, lambda x: x):
        losses = model(*batch, layout)
    losses.sum().backward()  # ends what forward began, on every rank
    return sum(kept.values())


class Memory(NamedTuple):
    alone: int  # bytes in one process
    rank: int  # on the rank that has most
    longest: int  # tokens that fit into `alone` bytes on each rank
    world: int

    @classmethod
    def of(cls, alone: int, seq: int, kept: Callable[[int], int], world: int) -> Memory:
        """Collective. kept: measures the bytes of a rank for a number of tokens."""
        rank = kept(seq)
        longest = seq * alone // rank  # they grow with the tokens; nothing grows with their square
        while longest > seq and kept(longest) > alone:
            longest -= world
        return cls(alone, rank, longest, world)

    def line(self, seq: int) -> str:
        return (
            f"activations kept for backward: {self.alone / 1e6:.1f} MB in one process, "
            f"{self.rank / 1e6:.1f} MB on a rank ({self.rank / self.alone:.0%})\n"
            f"longest sequence in {self.alone / 1e6:.1f} MB of each rank: {self.longest:,} tokens "
            f"instead of {seq:,}"
        )


# ---- time ----


def cores() -> int:
    return len(os.sched_getaffinity(0))


def speed(spread: float, alone: float, world: int) -> str:
    """Return the line about a step's seconds."""
    if world > cores():
        return f"a step's time says nothing here: {world} ranks share {cores()} core{'s' * (cores() > 1)}"
    return f"a step: {spread * 1e3:.1f} ms sharded, {alone * 1e3:.1f} ms in one process"


def exchange_seconds(profiler: profile) -> list[float]:
    """Return the seconds of each exchange of a profile, in their order; each is one event."""
    events = [event for event in profiler.function_events or () if event.name.startswith("spar::")]
    events.sort(key=lambda event: event.time_range.start)
    return [event.time_range.elapsed_us() / 1e6 for event in events]


class Times(NamedTuple):
    """Exchanges of one step: how many, and the seconds in them, as a mean over the ranks.

    moving: from the arrival of the last rank, which waits for no other, to the end: the transfer. It includes
    the time that the system takes to wake the others.
    """

    exchanges: int
    moving: float
    waiting: float

    @classmethod
    def of(cls, seconds: Sequence[float], steps: int) -> Times:
        """Collective. The rank that arrives last has the shortest time of an exchange."""
        world = dist.get_world_size()
        of_ranks: list[Sequence[float]] = [seconds] * world
        dist.all_gather_object(of_ranks, seconds)
        moving = sum(map(min, zip(*of_ranks, strict=True))) / steps
        mean = sum(map(sum, of_ranks)) / world / steps
        return cls(len(seconds) // steps, moving, mean - moving)

    def line(self, step: float) -> str:
        total = self.moving + self.waiting
        return (
            f"{self.exchanges} exchanges of a step: {total * 1e3:.2f} ms, {total / step:.0%} of it\n"
            f"    {self.waiting * 1e3:.2f} ms until the last rank arrives, "
            f"{self.moving * 1e3:.2f} ms from there to the end"
        )


def by_heads(x: Tensor, tokens: Sequence[int], heads: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange [B, own tokens, H, D] to [B, S, own heads, D] by permute, all_to_all_single, permute."""
    batch, own, _, dim = x.shape
    mine = heads[dist.get_rank(group)]
    sent = x.permute(2, 0, 1, 3).contiguous()
    sizes = [mine * batch * count * dim for count in tokens]
    received = x.new_empty(sum(sizes))
    dist.all_to_all_single(
        received, sent.view(-1), sizes, [count * batch * own * dim for count in heads], group=group
    )
    parts = [part.view(mine, batch, -1, dim) for part in received.split(sizes)]
    return torch.cat(parts, 2).permute(1, 2, 0, 3).contiguous()


def seconds_of(call: Callable[[], object]) -> float:
    """Collective. Return the seconds of one call where all ranks call together."""
    best = float("inf")
    for _ in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, max(gathered((time.perf_counter() - start) / CALLS)))
    return best


def beside_the_usual_code(batch: int, heads: int, dim: int, layout: SequenceLayout) -> str:
    """Collective. Return the line about a layer's q, k and v, exchanged by spar and by the usual code."""
    group, tokens = layout.group, list(layout.sizes)
    assert group is not None
    split = spar.cal_split_sizes(heads, group.size())
    qkv = [torch.randn(batch, tokens[group.rank()], heads, dim) for _ in range(3)]

    def by_spar() -> list[Tensor]:
        exchanged: list[Tensor] = spar.all_to_all(qkv, group, 2, 1, gather_sizes=[tokens] * 3)
        return exchanged

    def usual() -> list[Tensor]:
        return [by_heads(x, tokens, split, group) for x in qkv]

    if not all(map(torch.equal, by_spar(), usual())):
        sys.exit(f"rank {group.rank()}: spar.all_to_all of q, k and v differs from the usual code")
    own, others = seconds_of(by_spar), seconds_of(usual)
    return (
        f"q, k and v of a layer to heads, no rank late: {own * 1e3:.2f} ms by spar.all_to_all\n"
        f"    by permute, all_to_all_single, permute over gloo: {others * 1e3:.2f} ms, "
        f"{others / own:.0f} times as long"
    )


def transport(group: dist.ProcessGroup | None) -> str:
    used = spar.transport(group)
    rejected = "".join(f"; not {name}: {reason}" for name, reason in used.rejected)
    return f"transport: {used.name} ({used.reason}{rejected})"


# ---- the picture ----


def draw(path: Path, title: str, single: Losses, spread: Losses, tolerance: float) -> None:
    from matplotlib.figure import Figure  # on rank 0 only; without pyplot it always draws with Agg

    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, apart = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    losses.plot(single.losses, color="tab:orange", linewidth=6, alpha=0.5, label="one process")
    losses.plot(spread.losses, color="tab:blue", linewidth=1.5, label=title)
    losses.set(title="A byte-level language model of Python's standard library", ylabel="loss, nats per byte")
    apart.plot(spread.differences, ".-", color="tab:blue", label="relative difference")
    apart.axhline(tolerance, color="tab:red", linestyle="--", label="allowed")
    apart.set_yscale("symlog", linthresh=1e-8)  # a difference may be 0
    apart.set(xlabel="step", ylim=(0, 1e-2), yticks=[0, 1e-8, 1e-6, 1e-4])
    for axes in (losses, apart):
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right", ncols=2)
    figure.savefig(path, dpi=120)
