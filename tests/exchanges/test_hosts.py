# SPDX-License-Identifier: Apache-2.0
"""Groups that span hosts: their results. The hosts are network namespaces.

Ranks of one host are a part of the group's ranks: two hosts of two ranks, and one rank beside three.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.hosts import SHAPES, WORLD, Hosts, Shape, group_with, pool_of
from helpers.operations import failures, setting_of_world
from helpers.processes import finish
from helpers.reference import assert_same, cells, part
from test_exact import SIZES, sizes
from test_ops import strided

import spar
from spar._attention import slices
from spar._commands.check.cases import cases
from spar._group.registry import group_of

Group = dist.ProcessGroup


@pytest.fixture(scope="module", params=SHAPES)
def pool(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield from pool_of(request.param)


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


RECEIVED = struct.Struct("=128xQ")  # struct tcp_info of linux/tcp.h up to tcpi_bytes_received


def received() -> int:
    """Return how many bytes this process's TCP connections have received: each once, if sent again by TCP."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # listdir's own is closed
            if not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as each:
                if each.family == socket.AF_INET and each.type == socket.SOCK_STREAM:
                    info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.size)
                    total += RECEIVED.unpack(info)[0]
    return total


def count_bytes(rank: int, world: int, group: Group) -> dict[str, int]:
    part, counts = torch.zeros(1, 1 << 16, world, dtype=torch.float64), {}  # 2 MB
    for name, call in {"gather": spar.all_gather, "all_to_all": spar.all_to_all}.items():
        call(part, group)
        dist.barrier(group)
        before = received()
        call(part, group)
        dist.barrier(group)
        counts[name] = received() - before
    return counts


def test_each_byte_crosses_to_a_host_once(pool: Ranks, request: pytest.FixtureRequest) -> None:
    """A gather's parts are for all ranks of a host."""
    here, counts = shape_of(request)[0], pool(WORLD, count_bytes)
    for host in (range(here), range(here, WORLD)):
        gathered, exchanged = (sum(counts[r][name] for r in host) for name in ("gather", "all_to_all"))
        far, size = WORLD - len(host), WORLD << 19
        assert far * size <= gathered < 1.1 * far * size
        assert far * size * len(host) // WORLD <= exchanged < 1.1 * far * size * len(host) // WORLD


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


def attend_in_slices(rank: int, world: int, group: Group) -> None:
    """Between hosts, heads are exchanged in slices, of which each has enough bytes."""
    q, k, v = torch.randn(3, 1, 512, 8, 16, generator=torch.Generator().manual_seed(rank))
    layout, calls, results = spar.SequenceLayout.even(512 * world, group), [], []
    with pytest.MonkeyPatch.context() as patch:
        for least in (2 << 20, 80 << 10):  # a rank receives 576 KB of q, k and v
            patch.setattr(slices, "LEAST", least)
            group_of(group).exchanges.clear()
            before = group_of(group).count()
            results.append(spar.attention(q, k, v, layout, causal=True, method="ulysses"))
            calls.append(group_of(group).count() - before)
    assert calls == [2, 4] and torch.equal(*results)


def test_heads_are_exchanged_in_slices(pool: Ranks) -> None:
    pool(WORLD, attend_in_slices)


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


def call_late(rank: int, world: int, group: Group, late: int) -> float:
    own = group_with(10)
    begin = time.monotonic()
    if rank == late:
        time.sleep(0.8)
    assert spar.all_gather(torch.full((2,), float(rank)), own).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    return time.monotonic() - begin


def test_late_rank_delays_the_call(pool: Ranks) -> None:
    assert min(pool(WORLD, call_late, 0)) > 0.7
