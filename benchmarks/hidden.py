# SPDX-License-Identifier: Apache-2.0
"""How much of the time of attention's exchanges is hidden behind its kernel: `hosts.py --attention`.

Hidden is by how much a call is faster than one whose exchanges and kernel take turns, as a part of the time
that its exchanges take alone. In a turn all of them are timed one after another; figures are medians.
"waits" is how long a rank waits for exchanges in the call that is overlapped.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import spar
from spar import SequenceLayout
from spar._attention import slices
from spar._attention.attention import exchanges_only
from spar._commands.bench.measure import reduced
from spar._commands.printing import time_text
from spar._exchange.work import Work
from spar._group.registry import group_of

WIDTH = 64
COLUMNS = ("exchanges", "in turn", "overlapped")
waited = [0.0]  # seconds in the newest call
Timed = tuple[Callable[..., Tensor], list[Tensor]]


def _timed(call: Callable[..., Tensor], tensors: list[Tensor], backward: bool) -> float:
    """Return the slowest rank's seconds for a forward, or that and a backward."""
    dist.barrier()
    waited[0], begin = 0.0, time.perf_counter()
    y = call(*tensors)
    if backward:
        torch.autograd.grad(y, tensors, torch.ones_like(y))
    return reduced(time.perf_counter() - begin)


def _wait(self: Work, timeout: Any = None, wait: Callable[..., bool] = Work.wait) -> bool:
    begin = time.perf_counter()
    over = wait(self, timeout)
    waited[0] += time.perf_counter() - begin
    return over


def _calls(tokens: int, length: int, method: str, heads: int) -> dict[str, Timed]:
    """Return what each column times, for causal attention in documents of one length."""
    world = dist.get_world_size()
    groups = [dist.group.WORLD, dist.new_group(list(range(world)))]
    lengths = [length] * (tokens // length)
    if len(lengths) > 1:
        layouts = [SequenceLayout.packed(lengths, group) for group in groups]
    else:
        layouts = [SequenceLayout.zigzag(tokens, group) for group in groups]
    shards = [torch.randn(1, tokens // world, heads, WIDTH, requires_grad=True) for _ in range(3)]
    options: dict[str, Any] = {"causal": True, "method": method}
    calls: dict[str, Timed] = {
        "exchanges": (partial(exchanges_only, layout=layouts[0], mask=None, window=None, **options), shards),
        "in turn": (partial(spar.attention, layout=layouts[0], **options), shards),
        "overlapped": (partial(spar.attention, layout=layouts[1], **options), shards),
    }
    group_of(groups[0]).channel("attention", shards[0].device).in_flight_from = sys.maxsize
    for name, timed in calls.items():
        # A group remembers what its first call decided.
        most, slices.MOST = slices.MOST, slices.MOST if name == "overlapped" else 1
        _timed(*timed, True)
        slices.MOST = most
    return calls


def rows(tokens: int, length: int, turns: int) -> list[list[str]]:
    """Return a table for so many tokens: ulysses in documents of a length that divides it, gather whole."""
    found = [["method", "step", *COLUMNS, "waits", "hidden"]]
    Work.wait = _wait  # type: ignore[method-assign]
    for method, of_method, heads in (("ulysses", length, 8), ("gather", tokens, 2)):
        calls = _calls(tokens, of_method, method, heads)
        for backward in (False, True):
            times: dict[str, list[float]] = {name: [] for name in COLUMNS}
            waits = []
            for _ in range(turns):
                for name in COLUMNS:
                    times[name].append(_timed(*calls[name], backward))
                waits.append(reduced(waited[0]))
            medians = {name: statistics.median(each) for name, each in times.items()}
            gains = [a - b for a, b in zip(times["in turn"], times["overlapped"], strict=True)]
            hidden = statistics.median(gains) / medians["exchanges"]
            texts = [time_text(medians[name]) for name in COLUMNS]
            step = "forward and backward" if backward else "forward"
            found.append([method, step, *texts, time_text(statistics.median(waits)), f"{hidden:.0%}"])
    return found
