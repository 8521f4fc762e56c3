# SPDX-License-Identifier: Apache-2.0
"""The time to build a plan, and the plan cache."""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref

import pytest
import torch
from helpers import core
from helpers.cases import every_op, items
from helpers.core import CoreError, Plan, Spec, contiguous, request

from spar._exchange.layouts import even, pair, zigzag

pytestmark = [pytest.mark.spread, pytest.mark.quick]

# ---- The time to build a plan ---------------------------------------------------------------------------


def planning_seconds(op: str, world: int, sides: int) -> float:
    """Return the median time of a few new plans of a [1, S, H, D] tensor."""
    sequence, heads = 4 * world, 2 * world
    args = {
        "all_to_all": [2, 1, sequence],
        "split": [1],
        "gather": [1],
        "zigzag_split": [1, 8, sequence],
        "zigzag_gather": [1, 8, sequence],
        "packed_split": [1, 8, 2, sequence // 2, sequence // 2],
        "packed_gather": [1, 8, 2, sequence // 2, sequence // 2],
        "exchange": pair(zigzag(1, sequence, 8), even(2, heads)),
    }[op]
    held = sequence if op.endswith("split") else 4
    asked = request(op, world, world // 3, [contiguous([1, held, heads, 128], args, 2)], sides)
    times = []
    for _ in range(9):
        plan = ctypes.POINTER(core.PlanStruct)()
        begin = time.perf_counter()
        status = core.library().spar_plan_build(byref(asked), byref(plan))
        times.append(time.perf_counter() - begin)
        core.check(status)
        core.library().spar_plan_release(plan)
    return statistics.median(times)


@pytest.mark.alone
@pytest.mark.parametrize("sides", [0, core.SIDE_PULL], ids=["push", "push and pull"])
@every_op
def test_planning_time(op: str, sides: int, record_property: Callable[[str, object], None]) -> None:
    times = {world: planning_seconds(op, world, sides) * 1e6 for world in (8, 1024, 4096)}
    for world, microseconds in times.items():
        record_property(f"plan for {world} ranks, us", round(microseconds, 1))
    print({world: f"{microseconds:.0f} us" for world, microseconds in times.items()})
    assert times[1024] < 1000


# ---- The cache --------------------------------------------------------------------------------------------


@pytest.fixture
def cache() -> Iterator[Callable[[int], None]]:
    """Empty the cache, and return a function that sets its capacity."""
    limit = core.library().spar_plan_cache_limit
    limit(0)
    limit(1024)
    yield limit
    limit(0)
    limit(1024)


def stats() -> tuple[int, int, int]:
    now = core.PlanStats()
    core.library().spar_plan_cache_stats(byref(now))
    return now.cached, now.hits, now.misses


def get(extent: int) -> Plan:
    return Plan(request("gather", 2, 0, [contiguous([extent, 3], [0])]), cached=True)


class Counts:
    """Changes of the cache's counters since the construction."""

    def __init__(self) -> None:
        _, self.hits_before, self.misses_before = stats()

    @property
    def cached(self) -> int:
        return stats()[0]

    @property
    def hits(self) -> int:
        return stats()[1] - self.hits_before

    @property
    def misses(self) -> int:
        return stats()[2] - self.misses_before


def test_cache_returns_the_same_plan(cache: Callable[[int], None]) -> None:
    counts = Counts()
    a, b = get(1), get(1)
    assert ctypes.addressof(a.struct) == ctypes.addressof(b.struct)
    assert (counts.cached, counts.hits, counts.misses) == (1, 1, 1)


def test_least_recently_used_plan_is_evicted(cache: Callable[[int], None]) -> None:
    cache(3)
    for extent in (1, 2, 3, 1, 4):  # 4 evicts 2
        get(extent)
    counts = Counts()
    assert counts.cached == 3
    for extent in (1, 3, 4):
        get(extent)
    assert (counts.hits, counts.misses) == (3, 0)
    get(2)
    assert (counts.hits, counts.misses, counts.cached) == (3, 1, 3)
    get(1)  # the least recently used
    assert (counts.hits, counts.misses, counts.cached) == (3, 2, 3)


@pytest.mark.parametrize("limit", [1, 2, 7, 2000])
def test_cache_is_bounded(cache: Callable[[int], None], limit: int) -> None:
    cache(limit)
    counts = Counts()
    for extent in range(3000):
        get(extent)
    assert (counts.cached, counts.hits, counts.misses) == (limit, 0, 3000)
    for extent in range(2999, 2999 - limit, -1):
        get(extent)
    assert counts.hits == limit
    cache(1)
    assert counts.cached == 1
    get(3000 - limit)  # the newest
    assert counts.hits == limit + 1


def test_cache_is_bounded_in_bytes(cache: Callable[[int], None]) -> None:
    """A plan of 20,000 sequences takes over a megabyte; the cache holds at most 64 MiB."""
    counts = Counts()

    def packed(last: int) -> Plan:
        lengths = [2] * 20_000 + [2 * last]
        spec = contiguous([sum(lengths) // 2, 3], [0, 1, len(lengths), *lengths])
        return Plan(request("packed_gather", 2, 0, [spec]), cached=True)

    for last in range(60):
        plan = packed(last)
    assert plan.struct.footprint > 2**20
    assert 2 <= counts.cached <= 2**26 // plan.struct.footprint
    packed(59)
    assert counts.hits == 1
    get(1)
    assert counts.cached >= 2


def test_capacity_0_caches_nothing(cache: Callable[[int], None]) -> None:
    get(1)
    cache(0)
    counts = Counts()
    assert counts.cached == 0
    get(1), get(1)
    assert (counts.cached, counts.hits, counts.misses) == (0, 0, 2)


def test_evicted_plans_in_use_stay_valid(cache: Callable[[int], None]) -> None:
    inputs = [[items(2, 3)], [items(2, 3).fill_(7)]]
    wanted = torch.cat([x for (x,) in inputs])
    for evict in (lambda: cache(0), lambda: [get(extent) for extent in range(10, 30)]):
        cache(4)
        plans = [
            Plan(request("gather", 2, rank, [contiguous([2, 3], [0], 2)]), cached=True) for rank in (0, 1)
        ]
        evict()
        for (got,) in core.world(2).exchange(plans, inputs):
            assert torch.equal(got, wanted)


def test_failed_plan_is_not_cached(cache: Callable[[int], None]) -> None:
    counts = Counts()
    for _ in range(2):
        with pytest.raises(CoreError, match="a dim is 9"):
            Plan(request("gather", 2, 0, [contiguous([2, 3], [9])]), cached=True)
    assert (counts.cached, counts.hits) == (0, 0)


BASE = Spec(2, [4, 4], [4, 1], [0])
DIFFERENT = {
    "rank": ("gather", 4, 1, [BASE], 0),
    "world": ("gather", 2, 0, [BASE], 0),
    "sides": ("gather", 4, 0, [BASE], core.SIDE_PULL),
    "op": ("split", 4, 0, [BASE], 0),
    "item size": ("gather", 4, 0, [BASE._replace(item=4)], 0),
    "extents": ("gather", 4, 0, [BASE._replace(extents=[4, 3])], 0),
    "strides": ("gather", 4, 0, [BASE._replace(strides=[5, 1])], 0),
    "args": ("gather", 4, 0, [BASE._replace(args=[1])], 0),
    "a size of each rank": ("gather", 4, 0, [BASE._replace(args=[0, 4, 4, 4, 4])], 0),
    "tensors": ("gather", 4, 0, [BASE, BASE], 0),
    "a second tensor": ("gather", 4, 0, [BASE, BASE._replace(item=4)], 0),
}


def test_different_requests_have_different_entries(cache: Callable[[int], None]) -> None:
    counts = Counts()
    asked = [("gather", 4, 0, [BASE], 0), *DIFFERENT.values()]
    plans = [Plan(request(*one), cached=True) for one in asked]
    assert (counts.hits, counts.misses) == (0, len(asked))
    again = [Plan(request(*one), cached=True) for one in asked]
    assert [ctypes.addressof(p.struct) for p in plans] == [ctypes.addressof(p.struct) for p in again]
    assert (counts.hits, counts.misses) == (len(asked), len(asked))


def test_long_key_is_cached(cache: Callable[[int], None]) -> None:
    counts = Counts()
    specs = [contiguous([1] * 64, [63])] * 16
    a, b = (Plan(request("gather", 1, 0, specs), cached=True) for _ in range(2))
    assert ctypes.addressof(a.struct) == ctypes.addressof(b.struct)
    assert (counts.cached, counts.hits) == (1, 1)


def test_concurrent_gets(cache: Callable[[int], None]) -> None:
    """Use 8 threads and more plans than the capacity; tests/c does the same under the sanitizers."""
    cache(5)
    counts = Counts()
    rounds = 400

    def use(thread: int) -> None:
        draw = random.Random(thread)
        for _ in range(rounds):
            extent = draw.randint(1, 8)
            plan = get(extent)
            assert plan.out_shapes == [(2 * extent, 3)]
            assert plan.push_bytes == [3 * extent] * 2

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, range(8)))
    assert counts.hits + counts.misses == 8 * rounds
    assert counts.cached == 5
