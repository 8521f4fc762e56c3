# SPDX-License-Identifier: Apache-2.0
"""`async_op=True`: exchanges in flight, their order, gradients and errors."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.operations import DIRECT
from helpers.reference import assert_same, rule
from torch.utils.flop_counter import FlopCounterMode

import spar
from spar._exchange import work as works
from spar._group import queue
from spar._group.registry import group_of

Group = dist.ProcessGroup
TOTAL, HEADS = 10, 7


def call(name: str, x: Any, group: Group, world: int, **more: Any) -> Any:
    """Run an operation on a tensor, or a list, of [2, this rank's part of 10, 7]."""
    return DIRECT[name](x, group, rule(TOTAL, world), **more)


def draw(name: str, world: int, rank: int, salt: int = 0) -> torch.Tensor:
    """Return small ints, so that sums are exact in any order."""
    generator = torch.manual_seed(100 * salt + rank)
    length = TOTAL if DIRECT[name].whole else rule(TOTAL, world)[rank]
    return torch.randint(-8, 8, (2, length, HEADS), generator=generator).float()


# ---- results and order ----


def check_values(rank: int, world: int, group: Group, name: str) -> None:
    spar.init(group)
    inputs = [draw(name, world, rank, salt) for salt in range(8)]
    expected = [call(name, x, group, world).clone() for x in inputs]
    for _ in range(3):
        flights = [call(name, x, group, world, async_op=True) for x in inputs]
        for (y, work), wanted in reversed(list(zip(flights, expected, strict=True))):
            assert work.wait() is True and work.is_completed()
            assert_same(y, wanted)
    listed, work = call(name, inputs[:3], group, world, async_op=True)
    alone = call(name, inputs[3], group, world)  # waits for its turn
    assert work.is_completed()
    assert work.wait(timeout=10) and work.wait(timedelta(seconds=1)) and work.wait()
    for y, wanted in zip([*listed, alone], expected, strict=False):
        assert_same(y, wanted)
    out = torch.empty_like(expected[0])
    got, work = call(name, inputs[0], group, world, async_op=True, out=out)
    assert got is out
    work.wait()
    assert_same(out, expected[0])


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", DIRECT)
def test_async_equals_sync(ranks: Ranks, world: int, name: str) -> None:
    ranks(world, check_values, name)


def check_dtypes(rank: int, world: int, group: Group) -> None:
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.complex128, torch.int16):
        x = torch.arange(6).add(rank).to(torch.float32).to(dtype)
        wanted = spar.all_gather(x, group)
        y, work = spar.all_gather(x, group, async_op=True)
        work.wait()
        assert_same(y, wanted)
    z = torch.complex(torch.arange(3.0), torch.ones(3)).conj()
    y, work = spar.all_gather(z, group, async_op=True)
    work.wait()
    assert_same(y, z.resolve_conj().repeat(world))
    empty, work = spar.all_gather(torch.zeros(0, 3), group, async_op=True)
    work.wait()
    assert empty.shape == (0, 3)
    with torch.inference_mode():
        y, work = spar.reduce_scatter(torch.ones(world), group, async_op=True)
        work.wait()
        assert y.item() == world


def check_given(rank: int, world: int, group: Group) -> None:
    """A channel that gives calls to a stream allocates their outputs there, and lends them to the caller."""
    spar.init(group)
    channel, lent = group_of(group).channels["cpu"], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(channel), "enqueues", True)
        patch.setattr(works.Beside, "lend", lambda beside, outputs: lent.extend(outputs))
        for name in ("all_to_all", "all_gather", "reduce_scatter"):
            x = draw(name, world, rank).requires_grad_()
            expected = call(name, x.detach(), group, world).clone()
            y, handle = call(name, x, group, world, async_op=True)
            assert lent.pop() is y and not lent
            assert handle.wait()
            assert_same(y.detach(), expected)
            y.sum().backward()
            lent.clear()  # that of the gradient's exchange
            out = torch.empty_like(expected)
            got, handle = call(name, x.detach(), group, world, async_op=True, out=out)
            assert handle.wait() and got is out and not lent
            assert_same(out, expected)


def test_calls_that_are_given_to_a_stream(ranks: Ranks) -> None:
    ranks(2, check_given)


def test_async_moves_any_dtype(ranks: Ranks) -> None:
    ranks(2, check_dtypes)


def check_orders(rank: int, world: int, group: Group) -> None:
    """Each rank issues calls on several groups in another order; then waits in yet another."""
    groups = [dist.new_group(list(range(world))) for _ in range(4)]
    for each in groups:
        spar.init(each)
    flights = {}
    for turn in range(5):
        for i in sorted(range(4), key=lambda i: (i * (rank + 1) + turn * rank) % 5):
            x = torch.full((50,), float(1000 * turn + 100 * i + rank))
            flights[turn, i] = spar.all_gather(x, groups[i], async_op=True)
    for (turn, i), (y, work) in sorted(
        flights.items(), key=lambda row: (row[0][0] * 7 + rank * row[0][1]) % 11
    ):
        work.wait()
        wanted = [float(1000 * turn + 100 * i + p) for p in range(world) for _ in range(50)]
        assert y.tolist() == wanted, (turn, i)
    for each in groups:
        spar.close(each)


def test_groups_in_different_orders_on_different_ranks(ranks: Ranks) -> None:
    ranks(3, check_orders)


def check_before_the_set_up(rank: int, world: int, group: Group) -> None:
    fresh = dist.new_group(list(range(world)))
    y, work = spar.all_gather(torch.full((2,), float(rank)), fresh, async_op=True)
    work.wait()
    assert y.tolist() == [float(p) for p in range(world) for _ in range(2)]
    spar.close(fresh)


def test_first_call_sets_the_group_up(ranks: Ranks) -> None:
    ranks(2, check_before_the_set_up)


def check_timeouts(rank: int, world: int, group: Group) -> None:
    """An infinite timeout, and one beyond what a lock can wait, do not limit the wait."""
    spar.init(group)
    for timeout in (float("inf"), 1e300, 2**80, timedelta.max, -1.0, float("-inf")):
        if rank == 1:
            time.sleep(0.05)
        _, work = spar.all_gather(torch.zeros(1 << 10), group, async_op=True)
        if rank == 0 and not isinstance(timeout, timedelta) and timeout < 0:
            with pytest.raises(spar.ExchangeTimeoutError, match="still in flight"):
                work.wait(timeout)
            timeout = None
        assert work.wait(timeout if rank == 0 else None)
    _, work = spar.all_gather(torch.zeros(1), group, async_op=True)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (float("nan"), ValueError, r"Work\.wait: timeout is nan; expected a finite number"),
        ("1", TypeError, r"Work\.wait: timeout is '1'; expected a number"),
        (True, TypeError, r"Work\.wait: timeout is True; expected a number"),
    ]
    for value, kind, text in wrong:
        with pytest.raises(kind, match=text):
            work.wait(value)
        with pytest.raises(kind, match=text):
            spar.Work().wait(value)
    assert work.wait()


def test_timeouts_of_wait(ranks: Ranks) -> None:
    ranks(2, check_timeouts)


def check_progress(rank: int, world: int, group: Group) -> None:
    """It makes progress while this rank neither calls nor waits, and returns before the peers come."""
    spar.init(group)
    begin = time.monotonic()
    if rank == 1:
        time.sleep(0.3)
    y, work = spar.all_gather(torch.full((1 << 16,), float(rank)), group, async_op=True)
    if rank == 0:
        assert time.monotonic() - begin < 0.25 and not work.is_completed()
        with pytest.raises(spar.ExchangeTimeoutError, match="still in flight after a wait of"):
            work.wait(0.01)
    end = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < end
        time.sleep(0.005)
    assert y[:: 1 << 16].tolist() == [float(p) for p in range(world)]
    work.wait()


def test_exchange_runs_while_the_caller_computes(ranks: Ranks) -> None:
    ranks(2, check_progress)


def check_threads(rank: int, world: int, group: Group) -> None:
    """A thread for each group in flight, which ends when it is idle; a dropped Work is completed."""
    groups = [dist.new_group(list(range(world))) for _ in range(3)]
    for each in groups:
        spar.init(each)
    queue._IDLE_S = 0.2
    before, held = threading.active_count(), spar.memory_stats()["arena.quarantined_bytes"]
    for _ in range(20):
        for each in groups:
            spar.all_gather(torch.zeros(100), each, async_op=True)
    assert threading.active_count() <= before + 3
    for each in groups:
        assert spar.all_gather(torch.full((1,), float(rank)), each).tolist() == list(range(world))
        assert group_of(each).queue is None and group_of(each).calls == 21
    end = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < end
        time.sleep(0.05)
    gc.collect()
    assert spar.memory_stats()["arena.quarantined_bytes"] <= held
    y, work = spar.all_gather(torch.full((1,), float(rank)), groups[0], async_op=True)  # a thread again
    work.wait()
    assert y.tolist() == list(range(world))
    for each in groups:
        spar.close(each)


def test_threads_are_bounded_and_end(ranks: Ranks) -> None:
    ranks(2, check_threads)


# ---- what runs at once ----


def check_traced(rank: int, world: int, group: Group) -> None:
    y, work = spar.all_gather(torch.zeros(2, device="meta"), group, async_op=True)
    assert y.shape == (2 * world,) and work.is_completed() and work.wait()
    mode = FlopCounterMode(display=False)
    x = torch.full((2,), float(rank), requires_grad=True)
    with mode:
        y, work = spar.all_gather(x, group, async_op=True)
        assert work.is_completed() and work.wait()
        (y * y).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0 * rank * world] * 2
    with torch.profiler.profile():
        y, work = spar.all_gather(x, group, async_op=True)
        work.wait()
    torch._dynamo.reset()

    def block(x: torch.Tensor) -> torch.Tensor:
        y, work = spar.all_gather(x * 2, group, async_op=True)
        work.wait()
        return y * 3

    if rank == 0:  # it compiles, which takes seconds; its calls match the other rank's eager ones
        with pytest.raises(torch._dynamo.exc.Unsupported, match="async_op=True cannot be traced"):
            torch.compile(block, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    broken = torch.compile(block, backend="aot_eager") if rank == 0 else block  # the call breaks the graph
    assert_same(broken(x).detach(), block(x).detach())
    outside = torch.compiler.disable(block)

    def around(x: torch.Tensor) -> torch.Tensor:
        return outside(x * 2) + 1

    compiled = torch.compile(around, backend="aot_eager") if rank == 0 else around
    assert_same(compiled(x).detach(), (block(x * 2) + 1).detach())
    (wanted,) = torch.autograd.grad(block(x * 2).square().sum(), x)
    (found,) = torch.autograd.grad((compiled(x) - 1).square().sum(), x)
    assert_same(found, wanted)


@pytest.mark.one_transport
def test_async_under_modes_and_compile(ranks: Ranks) -> None:
    ranks(2, check_traced)
