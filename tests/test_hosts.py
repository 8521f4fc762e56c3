# SPDX-License-Identifier: Apache-2.0
"""Groups that span hosts: results, faults, deaths and cut links. The hosts are network namespaces.

Ranks of one host are a part of the group's ranks: two hosts of two ranks, and one rank beside three.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.fault_cases import FAULTS, LIMIT, LOST_WITHIN, OVER, gather
from helpers.hosts import Hosts, Shape
from helpers.operations import failures, setting_of_world
from helpers.reference import assert_same, cells, part
from helpers.workers import machine
from namespaces import INTERFACE
from test_exact import SIZES, sizes
from test_fault_matrix import attempt, check_fault, make_scene, run_fault
from test_faults import await_report, finish, report
from test_ops import strided

import spar
from spar._commands.check.cases import cases

Group = dist.ProcessGroup
SHAPES = {"2 + 2": (2, 2), "3 + 1": (3, 1)}
WORLD = 4


# ---- results ----


@pytest.fixture(scope="module", params=SHAPES)
def pool(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Four ranks on two hosts, which the tests of a shape share. spar chooses their transport."""
    with Hosts(SHAPES[request.param]) as hosts:
        pool = Ranks((WORLD,), entering=[hosts.entering(rank) for rank in range(WORLD)])
        pool.transport = ""
        yield pool
        pool.stop()


def name_transports(rank: int, world: int, group: Group, shape: Shape) -> list[str]:
    first = dist.new_group(list(range(shape[0])))
    for each in (group, first) if rank < shape[0] else (group,):
        spar.all_gather(torch.zeros(1), each)
    return [spar.transport(group).name or "", spar.transport(first).name or "" if rank < shape[0] else ""]


def shape_of(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.node.callspec.params["pool"]]


def test_tcp_serves_groups_that_span_hosts(pool: Ranks, request: pytest.FixtureRequest) -> None:
    """And shared memory those within a host."""
    here = shape_of(request)[0]
    assert pool(WORLD, name_transports, shape_of(request)) == [
        ["tcp", "shm" if r < here else ""] for r in range(WORLD)
    ]


def received() -> int:
    """Return how many bytes this rank's host has received."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    return int(next(line for line in lines if INTERFACE in line).partition(":")[2].split()[0])


def count_bytes(rank: int, world: int, group: Group, host: list[int]) -> dict[str, int]:
    part, counts = torch.zeros(1, 1 << 16, world, dtype=torch.float64), {}  # 2 MB
    for name, call in {"gather": spar.all_gather, "all_to_all": spar.all_to_all}.items():
        call(part, group)
        dist.barrier(group)
        before = received()
        call(part, group)
        dist.barrier(group)
        counts[name] = received() - before
    return counts if rank == host[0] else {}


def test_each_byte_crosses_to_a_host_once(pool: Ranks, request: pytest.FixtureRequest) -> None:
    """A gather's parts are for all ranks of a host."""
    here = shape_of(request)[0]
    for host in (list(range(here)), list(range(here, WORLD))):
        counts = pool(WORLD, count_bytes, host)[host[0]]
        far, size = WORLD - len(host), WORLD << 19
        assert far * size <= counts["gather"] < 1.1 * far * size
        assert far * size * len(host) // WORLD <= counts["all_to_all"] < 1.1 * far * size * len(host) // WORLD


def run_operations(rank: int, world: int, group: Group) -> list[str]:
    setting = setting_of_world()
    return [f"{case.name}: {text}" for case in cases(world) for text in failures(case, setting)]


def test_every_operation_and_its_gradient(pool: Ranks) -> None:
    assert pool(WORLD, run_operations) == [[]] * WORLD


DTYPES = (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)


def exchange_each_dtype(rank: int, world: int, group: Group) -> None:
    for dtype in DTYPES:
        whole = cells((3, 13, 6), dtype)
        tokens, heads = sizes("ramp", 13, world), sizes("holes", 6, world)
        own = part(whole, tokens, 1, rank)
        y = spar.all_to_all(own, group, 2, 1, scatter_sizes=heads, gather_sizes=tokens)
        assert_same(y, part(whole, heads, 2, rank), dtype)
        assert_same(spar.all_gather(own, group, 1, tokens), whole, dtype)
        if dtype.is_floating_point:  # small ints, of which every dtype holds the sum
            whole = (torch.arange(3 * 13 * 6).reshape(3, 13, 6) % 7).to(dtype)
            y = spar.reduce_scatter(whole * (rank + 1), group, 1, tokens)
            assert_same(y, part(whole * 10, tokens, 1, rank), dtype)


def test_results_of_each_dtype(pool: Ranks) -> None:
    pool(WORLD, exchange_each_dtype)


def exchange_at_random(rank: int, world: int, group: Group, seed: int) -> None:
    """Make calls of random shapes, sizes and strides, forward and backward; the same seed on all ranks."""
    rng = random.Random(seed)
    for _ in range(12):
        shape = tuple(rng.choice((0, 1, 3, 8, 17, 40)) for _ in range(rng.randint(2, 4)))
        scatter, dim = rng.sample(range(len(shape)), 2)
        there, here = (sizes(rng.choice(SIZES), shape[d], world) for d in (scatter, dim))
        whole, upper = cells(shape, torch.float32), cells(shape, torch.float32, salt=1)
        own = strided(part(whole, here, dim, rank), rng.choice(("contiguous", "transposed", "sliced")))
        x = own.detach().requires_grad_()
        if rng.random() < 0.6:
            y = spar.all_to_all(x, group, scatter, dim, scatter_sizes=there, gather_sizes=here)
            expected = part(whole, there, scatter, rank)
            outer, wanted = part(upper, there, scatter, rank), part(upper, here, dim, rank)
        else:
            y, expected = spar.all_gather(x, group, dim, here), whole
            outer, wanted = upper, part(upper * world, here, dim, rank)
        assert_same(y.detach(), expected, (shape, scatter, dim))
        y.backward(outer)
        assert x.grad is not None
        assert_same(x.grad, wanted, (shape, scatter, dim))


@pytest.mark.parametrize("seed", range(3))
def test_random_exchanges(pool: Ranks, seed: int) -> None:
    pool(WORLD, exchange_at_random, seed)


def exchange_on_three_hosts(rank: int, folder: Path) -> None:
    group = dist.group.WORLD
    assert group is not None
    exchange_at_random(rank, WORLD, group, 3)
    dist.barrier()


def test_three_hosts(tmp_path: Path) -> None:
    with Hosts((1, 2, 1)) as hosts:
        assert finish(hosts.start(exchange_on_three_hosts, tmp_path, SPAR_TIMEOUT="20"), 40) == [0] * WORLD


def exchange_layouts(rank: int, world: int, group: Group) -> None:
    whole = cells((2, 37, 3), torch.float32)
    for layout in (
        spar.SequenceLayout.even(37, group),
        spar.SequenceLayout.zigzag(37, group),
        spar.SequenceLayout.packed([5, 0, 30, 2], group),
        spar.SequenceLayout.joint(5, 32, group),
    ):
        own = layout.shard(whole, 1, None)
        assert_same(layout.gather(own, 1, None), whole, layout)
        assert_same(layout.reduce_scatter(whole, 1), 4 * own, layout)


def test_layouts(pool: Ranks) -> None:
    pool(WORLD, exchange_layouts)


def exchange_sizes(rank: int, world: int, group: Group) -> None:
    """From a byte to more than the buffers of a socket hold, alternating, with new values in each call."""
    for call, count in enumerate((1, 5 << 20, 65_537, 1, 3 << 20, 4096) * 2):
        parts = [torch.full((count,), (call * world + r) % 256, dtype=torch.uint8) for r in range(world)]
        assert_same(spar.all_gather(parts[rank], group), torch.cat(parts), (call, count))


def test_small_and_large_calls_in_turn(pool: Ranks) -> None:
    pool(WORLD, exchange_sizes)


def exchange_in_flight(rank: int, world: int, group: Group) -> None:
    """Calls of several sizes in flight, whose waits and gradients are in other orders than their issue."""
    wholes = [cells((n, 3), torch.float32, salt=n) for n in (5, 40_000, 8)]
    shards = [part(whole, sizes("ramp", len(whole), world), 0, rank) for whole in wholes]
    inputs = [shard.clone().requires_grad_() for shard in shards]
    pending = [
        spar.all_gather(x, group, 0, sizes("ramp", len(whole), world), async_op=True)
        for x, whole in zip(inputs, wholes, strict=True)
    ]
    outputs = [y for y, _ in pending]
    for n in (2, 0, 1):
        pending[n][1].wait()
    for n, whole in enumerate(wholes):
        assert_same(outputs[n].detach(), whole, n)
    torch.stack([(outputs[n] * wholes[n]).sum() for n in (1, 2, 0)]).sum().backward()  # type: ignore
    for x, shard in zip(inputs, shards, strict=True):
        assert x.grad is not None
        assert_same(x.grad, shard * world)


def test_calls_in_flight(pool: Ranks) -> None:
    pool(WORLD, exchange_in_flight)


def exchange_in_groups(rank: int, world: int, group: Group) -> None:
    """Groups of some ranks of each host; and two threads, each with its group of all ranks."""
    for members in ([0, 3], [1, 2, 3], [3, 0, 2]):
        some = dist.new_group(members)
        if rank in members:
            own = torch.full((3,), float(rank))
            expected = torch.tensor(sorted(members)).repeat_interleave(3).float()
            assert_same(spar.all_gather(own, some), expected, members)
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for call in range(20):
                own = torch.full((1 + call * 1000 * number,), float(rank + call))
                y = spar.all_gather(own, groups[number])
                assert y.reshape(world, -1)[:, 0].tolist() == [float(r + call) for r in range(world)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_groups_of_some_ranks_and_of_threads(pool: Ranks) -> None:
    pool(WORLD, exchange_in_groups)


def group_with(limit: float) -> Group:
    """Return a new group of all ranks, after its first call, whose calls time out after `limit` seconds."""
    group = dist.new_group(list(range(WORLD)))
    os.environ["SPAR_TIMEOUT"] = str(limit)
    spar.all_gather(torch.zeros(1), group)
    del os.environ["SPAR_TIMEOUT"]
    dist.barrier()
    return group


def call_late(rank: int, world: int, group: Group, late: int) -> float:
    own = group_with(10)
    begin = time.monotonic()
    if rank == late:
        time.sleep(0.8)
    assert spar.all_gather(torch.full((2,), float(rank)), own).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    return time.monotonic() - begin


def test_late_rank_delays_the_call(pool: Ranks) -> None:
    assert min(pool(WORLD, call_late, 0)) > 0.7


# ---- faults that processes survive ----

# The cap on shared memory need not bound what comes from other hosts.
LEFT_OUT = {"out of memory"}
NAMES = [name for name in FAULTS if name not in LEFT_OUT]


def run_faults(rank: int, folder: Path) -> None:
    scene = make_scene(rank, WORLD)
    results = {}
    for name in NAMES:
        results[name] = run_fault(FAULTS[name], rank, WORLD, scene)
        (folder / f"{rank}.part").write_text(json.dumps(results))
        (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    dist.barrier()


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[dict[str, Any]], list[Any]]]:
    """Return by shape each rank's results, to the last fault that it ended, and the processes."""
    found = {}
    all_hosts = {name: Hosts(shape) for name, shape in SHAPES.items()}
    folders = {name: tmp_path_factory.mktemp("faults") for name in SHAPES}
    started = {name: hosts.start(run_faults, folders[name]) for name, hosts in all_hosts.items()}
    for name, hosts in all_hosts.items():
        codes = finish(started[name], 100)
        paths = [folders[name] / f"{rank}.json" for rank in range(WORLD)]
        results = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
        found[name] = results, [codes, [process.pid for process in started[name]]]
        hosts.close()
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_fault(faults: Any, name: str, shape: str) -> None:
    """The odd rank is the last, on the second host: in 3 + 1 the only one there."""
    results, (_, pids) = faults[shape]
    check_fault(FAULTS[name], [of_rank[name] for of_rank in results], pids[-1])


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_end_after_faults(faults: Any, shape: str) -> None:
    assert faults[shape][1][0] == [0] * WORLD


def differ_from(rank: int, world: int, group: Group, odd: int) -> tuple[str, str, list[int]]:
    """Another shape on one rank; then a good call, on the same group."""
    own = group_with(10)
    with pytest.raises(spar.MismatchError) as caught:
        spar.all_gather(torch.zeros(2, 3 + (rank == odd)), own)
    assert spar.all_gather(torch.full((1,), float(rank)), own).tolist() == [0.0, 1.0, 2.0, 3.0]
    text = str(caught.value)
    return text.split(":", 1)[1], text, list(caught.value.ranks)


@pytest.mark.parametrize("odd", range(WORLD))
def test_rank_of_either_host_may_differ(pool: Ranks, odd: int) -> None:
    found = pool(WORLD, differ_from, odd)
    assert len({same for same, _, _ in found}) == 1
    for _, text, ranks in found:
        assert "all_gather [8, 3]" in text and "all_gather [8, 4]" in text and ranks == [odd]


def fail_before(rank: int, world: int, group: Group, odd: int) -> None:
    own = group_with(10)
    error, text = (
        (ValueError, "dim is 7") if rank == odd else (spar.MismatchError, f"rank {odd} failed: .*dim is 7")
    )
    with pytest.raises(error, match=text) as caught:
        spar.all_gather(torch.zeros(2), own, 7 if rank == odd else 0)
    assert rank == odd or caught.value.ranks == (odd,)  # type: ignore[attr-defined]
    assert spar.all_gather(torch.full((1,), float(rank)), own).tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("odd", [0, 1])
def test_rank_of_the_first_host_may_fail_before_its_call(pool: Ranks, odd: int) -> None:
    pool(WORLD, fail_before, odd)


# ---- deaths ----


def call_until_death(rank: int, folder: Path, victim: int, how: str) -> None:
    """Make large calls until the victim dies: in a call, or in a pause before it that is within the limit."""
    big = torch.zeros(1 << 20)
    dist.barrier()
    if rank == victim:
        if how == "between calls":
            time.sleep(0.3)
            report(folder, 100, str(time.time()))
            os._exit(0)
        report(folder, 100, "")
    result = attempt(lambda: [gather(big, None, 0) for _ in range(10_000)])
    result["again"] = attempt(lambda: gather(torch.zeros(1), None, 0))
    (folder / f"{rank}.json").write_text(json.dumps(result))


DEATHS = {  # the shape, the victim, how it dies
    "in a call, beside a rank of its host": ("2 + 2", 2, "in a call"),
    "in a call, the only rank of its host": ("3 + 1", 3, "in a call"),
    "in a call, rank 0, which has the store": ("2 + 2", 0, "in a call"),
    "between calls": ("3 + 1", 1, "between calls"),
}


@pytest.mark.parametrize("name", DEATHS)
def test_death_is_reported_on_all_hosts(tmp_path: Path, name: str) -> None:
    shape, victim, how = DEATHS[name]
    with Hosts(SHAPES[shape]) as hosts, machine.alone():
        processes = hosts.start(call_until_death, tmp_path, victim, how, SPAR_TIMEOUT="30")
        died = await_report(tmp_path, 100)
        if how == "in a call":
            time.sleep(0.3)
            died = str(time.time())
            os.kill(processes[victim].pid, signal.SIGKILL)
        codes = finish(processes, 20)
    survivors = [rank for rank in range(WORLD) if rank != victim]
    assert [codes[rank] for rank in survivors] == [0] * 3
    for rank in survivors:
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result["error"] == "PeerLostError", (rank, result)
        assert result["ranks"] == [victim], (rank, result)
        assert f"rank {victim} " in result["text"]
        assert result["at"] - float(died) < LOST_WITHIN, (rank, result)
        assert result["again"]["error"] == "GroupBrokenError" and result["again"]["seconds"] < 0.3


# ---- absent and interrupted ranks of any place: the faults have the last rank ----


def miss_call(rank: int, world: int, group: Group, absent: list[int]) -> dict[str, Any]:
    own = group_with(LIMIT)
    if rank in absent:
        time.sleep(LIMIT + 0.6)
        return {}
    return attempt(lambda: spar.all_gather(torch.zeros(4), own))


@pytest.mark.parametrize("absent", [[0], [1, 3], [0, 1, 2]], ids=str)
def test_timeout_names_all_absent_ranks(pool: Ranks, absent: list[int]) -> None:
    results = pool(WORLD, miss_call, absent)
    for rank in set(range(WORLD)) - set(absent):
        result = results[rank]
        assert (result["error"], result["ranks"]) == ("ExchangeTimeoutError", absent), result
        assert LIMIT - 0.1 < result["seconds"] < LIMIT + 2


def interrupt_one(rank: int, world: int, group: Group, odd: int) -> dict[str, Any]:
    own = group_with(10)
    if rank == odd:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    elif rank == WORLD - 1 - odd:
        time.sleep(0.6)  # so that the others wait in the call
    return attempt(lambda: spar.all_gather(torch.zeros(4), own))


def test_ctrl_c_on_the_first_host_is_reported_to_all(pool: Ranks) -> None:
    odd = 1
    results = pool(WORLD, interrupt_one, odd)
    assert results[odd]["error"] == "KeyboardInterrupt"
    for result in (results[rank] for rank in range(WORLD) if rank != odd):
        assert result["error"] == "GroupBrokenError", result
        assert re.search(rf"rank {odd} was interrupted in call \d", result["text"])
        assert result["seconds"] < 2


# ---- cut links ----


def call_over_cut(rank: int, folder: Path, between: bool) -> None:
    """Call until the link is cut, or only then."""
    big = torch.zeros(1 << 18)
    dist.barrier()
    report(folder, rank, "")
    if between:
        await_report(folder, 100)
    result = attempt(lambda: [gather(big, None, 0) for _ in range(100_000)])
    result["again"] = attempt(lambda: gather(torch.zeros(1), None, 0))
    (folder / f"{rank}.json").write_text(json.dumps(result))


@pytest.mark.parametrize(
    ("shape", "between"), [("2 + 2", False), ("3 + 1", True)], ids=["in a call", "between calls"]
)
def test_cut_link_is_an_error_on_both_sides(tmp_path: Path, shape: str, between: bool) -> None:
    limit = 1.5
    with Hosts(SHAPES[shape]) as hosts, machine.alone():
        processes = hosts.start(call_over_cut, tmp_path, between, SPAR_TIMEOUT=str(limit))
        for rank in range(WORLD):
            await_report(tmp_path, rank)
        time.sleep(0.2)
        hosts.cut(1)
        cut = time.time()
        report(tmp_path, 100, "")
        codes = finish(processes, limit + OVER + 5)
        sides = [hosts.ranks_of(host) for host in range(2)]
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]
    for own, others in (sides, sides[::-1]):
        for result in (results[rank] for rank in own):
            assert result["error"] in ("ExchangeTimeoutError", "PeerLostError", "GroupBrokenError"), result
            assert result["at"] - cut < limit + 2, result
            assert result["again"]["error"] == "GroupBrokenError"
        timed_out = [results[rank] for rank in own if results[rank]["error"] == "ExchangeTimeoutError"]
        for result in timed_out:
            assert result["ranks"] and set(result["ranks"]) <= set(others), result
    assert codes == [0] * WORLD


def call_over_returning_link(rank: int, folder: Path) -> None:
    """Calls in which the link is cut for a second."""
    dist.barrier()
    report(folder, rank, "")
    for call in range(40):
        parts = [torch.full((50_000,), float(call + r)) for r in range(WORLD)]
        assert_same(spar.all_gather(parts[rank]), torch.cat(parts), call)
        time.sleep(0.02)
    assert sum(n for name, n in spar.memory_stats().items() if name.startswith("calls.")) >= 41
    dist.barrier()


def test_link_that_returns_within_the_limit_costs_nothing(tmp_path: Path) -> None:
    with Hosts((2, 2)) as hosts:
        processes = hosts.start(call_over_returning_link, tmp_path, SPAR_TIMEOUT="20")
        for rank in range(WORLD):
            await_report(tmp_path, rank)
        time.sleep(0.2)
        hosts.cut(1)
        time.sleep(1)
        assert all(process.exitcode is None for process in processes), "no rank can have ended its calls"
        hosts.restore(1)
        assert finish(processes, 25) == [0] * WORLD
