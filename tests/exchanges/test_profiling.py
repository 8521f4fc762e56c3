# SPDX-License-Identifier: Apache-2.0
"""torch.profiler shows each exchange as one event with readable inputs, and changes nothing of what runs."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.operations import DIRECT
from torch.profiler import profile

import spar

Group = dist.ProcessGroup


def shown(profiled: Any) -> Counter[str]:
    return Counter(event.name for event in profiled.events() if event.name.startswith("spar::"))


def check_inputs(rank: int, world: int, group: Group) -> None:
    x = torch.zeros(3, 2 * world, requires_grad=True)
    for _ in range(2):  # the second call repeats the first
        with profile(record_shapes=True) as profiled:
            spar.all_to_all(x, group, 1, 0).sum().backward()
        found = [event for event in profiled.events() if event.name.startswith("spar::")]
        assert [event.name for event in found] == ["spar::all_to_all", "spar::backward of all_to_all"]
        for event, shape in zip(found, ([3, 2 * world], [3 * world, 2]), strict=True):
            assert event.input_shapes == [shape]
            inputs = dict(event.kwinputs)
            layouts = inputs.pop("layouts")
            before, after = f"dim 0 in {[3] * world}", f"dim 1 in {[2] * world}"
            if "backward" in event.name:
                before, after = after, before
            assert f"[{3 * world}, {2 * world}]: {before} -> {after}" == layouts
            name = spar.transport(group).name
            sent = 3 * 2 * 4 * (world - 1)
            assert inputs == {"bytes": sent, "group": group.group_name, "ranks": world, "transport": name}


def test_events_show_bytes_group_transport_and_layouts(ranks: Ranks) -> None:
    ranks(3, check_inputs)


def check_each(rank: int, world: int, group: Group) -> None:
    x = torch.ones(2, 2 * world)
    out = torch.empty(2 * world, 2)
    own, whole = (torch.ones(1, size, world) for size in (2, 2 * world))
    calls = {
        name: partial(direct, whole if direct.whole else own, group, [2] * world)
        for name, direct in DIRECT.items()
    }
    calls["gather_forward_split_backward"] = lambda: spar.gather_forward_split_backward(x, group, 0)
    for name, call in calls.items():
        expected = call()
        with profile() as profiled:
            assert torch.equal(call(), expected)
        assert shown(profiled) == {f"spar::{name}": 1}
    with profile() as profiled:
        spar.all_to_all(x, group, 1, 0, out=out)
    assert shown(profiled) == {"spar::all_to_all": 1}
    with profile() as profiled:
        _, work = spar.all_gather(x, group, async_op=True)
        work.wait()
    assert shown(profiled) == {"spar::all_gather": 1}


def test_each_exchange_is_one_event_and_no_dispatched_op(ranks: Ranks) -> None:
    ranks(2, check_each)


def check_failure(rank: int, world: int, group: Group) -> None:
    spar.init(group)
    x = torch.empty(1).expand(1 << 61) if rank == 1 else torch.zeros(2)
    with profile(), pytest.raises(ValueError if rank == 1 else spar.MismatchError, match=r"more than 2\^63"):
        spar.all_gather(x, group)
    assert spar.all_gather(torch.zeros(2), group).shape == (2 * world,)


def test_failure_of_one_rank_is_reported_to_its_peers(ranks: Ranks) -> None:
    ranks(2, check_failure, timeout=30)


def check_attention(rank: int, world: int, group: Group) -> None:
    layout = spar.SequenceLayout.zigzag(40, group)
    q, k, v = (torch.randn(1, layout.sizes[rank], 2, 8, requires_grad=True) for _ in range(3))
    for method, most in (("ulysses", 4), ("ring", 2 * world)):
        with profile() as profiled:
            spar.attention(q, k, v, layout, causal=True, method=method).sum().backward()
        counts = shown(profiled)
        assert "spar::exchange" not in counts
        assert 2 <= counts.total() <= most, counts


def test_attention_shows_its_exchanges_once(ranks: Ranks) -> None:
    ranks(3, check_attention)


def check_counts(rank: int, world: int, group: Group) -> None:
    x = torch.zeros(3, 2 * world, 5)
    spar.all_to_all(x, group, 1, 0)
    name = spar.transport(group).name
    keys = f"calls.{name}", f"sent.{name}_bytes", f"time.{name}_us"
    before = spar.memory_stats()
    start = time.perf_counter()
    for _ in range(50):
        spar.all_to_all(x, group, 1, 0)
    spar.all_gather(x[: rank + 1], group, sizes=[1, 2, 3])
    elapsed = (time.perf_counter() - start) * 1e6
    after = spar.memory_stats()
    calls, sent, microseconds = (after[key] - before[key] for key in keys)
    row = 2 * world * 5 * 4
    assert calls == 51
    assert sent == 50 * 3 * 2 * 5 * 4 * (world - 1) + (rank + 1) * row * (world - 1)
    assert 0 < microseconds <= elapsed
    others = {key for key in after if key.startswith(("calls.", "sent.", "time."))} - {*keys}
    assert all(after[key] == before[key] for key in others)
    with contextlib.suppress(spar.MismatchError):
        spar.all_gather(torch.zeros(rank + 1, 2), group)
    assert spar.memory_stats()[keys[0]] == after[keys[0]]  # not those that fail


def test_counters_by_transport(ranks: Ranks) -> None:
    ranks(3, check_counts)
