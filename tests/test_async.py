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
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import spar
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


# ---- gradients ----


def check_gradients(rank: int, world: int, group: Group, name: str, late: bool) -> None:
    """Gradients of several exchanges, also if wait() comes after something else was recorded."""
    results = []
    for async_op in (False, True):
        leaves = [draw(name, world, rank, salt).requires_grad_() for salt in range(3)]
        if async_op:
            flights = [call(name, x, group, world, async_op=True) for x in leaves]
            views = [y.transpose(0, 1) for y, _ in flights]  # taken before wait()
            for _, work in flights if not late else reversed(flights):
                work.wait()
            ys = [y for y, _ in flights]
        else:
            ys = [call(name, x, group, world) for x in leaves]
            views = [y.transpose(0, 1) for y in ys]
        loss = (ys[0] * ys[1] + 2 * ys[2]).sum() + (views[0] * 3).sum() + (ys[1] * 0.5).sum()
        loss.backward()
        results.append([*(y.detach().clone() for y in ys), *(x.grad for x in leaves)])
    for eager, other in zip(*results, strict=True):
        assert_same(other, eager)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", DIRECT)
def test_gradients_equal_those_of_sync_calls(ranks: Ranks, world: int, name: str, late: bool) -> None:
    ranks(world, check_gradients, name, late)


def backward_in_flight(rank: int, world: int, group: Group) -> None:
    """In backward all reverse exchanges are begun before the first is waited for."""
    from spar._exchange import work as overlap

    spar.init(group)
    events: list[str] = []
    begin, wait = overlap.begin, overlap.Work.wait

    def note_begin(exchange: Any, *rest: Any, **more: Any) -> Any:
        events.append(f"begin {exchange.name}")
        return begin(exchange, *rest, **more)

    def note_wait(self: Any, timeout: Any = None) -> bool:
        events.append("wait")
        return wait(self, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "begin", note_begin)
        patch.setattr(overlap.Work, "wait", note_wait)
        leaves = [torch.full((2, 2), float(rank), requires_grad=True) for _ in range(3)]
        flights = [spar.all_to_all(x * 1, group, 0, 1, async_op=True) for x in leaves]
        for _, work in flights:
            work.wait()
        events.clear()
        sum(y.sum() for y, _ in flights).backward()
    assert events == ["begin backward of all_to_all"] * 3 + ["wait"] * 3


def test_backward_has_its_exchanges_in_flight_together(ranks: Ranks) -> None:
    ranks(2, backward_in_flight)


def check_more_gradients(rank: int, world: int, group: Group) -> None:
    x = draw("all_to_all", world, rank).requires_grad_()

    def gradient(async_op: bool, how: str) -> torch.Tensor:
        if not async_op:
            y = call("all_to_all", x, group, world)
        else:
            y, work = call("all_to_all", x, group, world, async_op=True)
            if how == "hook":
                y.register_hook(lambda grad: grad * 2)
            if how != "no wait":
                work.wait()
        if how == "hook" and not async_op:
            y.register_hook(lambda grad: grad * 2)
        if how == "no wait":
            while async_op and not work.is_completed():
                time.sleep(0.001)
        if how == "twice":
            y.square().sum().backward(retain_graph=True)
        if how == "second":
            (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
            (found,) = torch.autograd.grad((first * x).sum(), x)
            return found
        x.grad = None
        y.square().sum().backward()
        assert x.grad is not None
        return x.grad.clone()

    for how in ("plain", "hook", "no wait", "twice", "second"):
        assert_same(gradient(True, how), gradient(False, how), how)

    def block(x: torch.Tensor) -> torch.Tensor:
        y, work = call("all_to_all", x * 2, group, world, async_op=True)
        work.wait()
        return y.square() * y

    for reentrant in (False, True):
        (wanted,) = torch.autograd.grad(block(x).sum(), x)
        x.grad = None
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
        assert x.grad is not None
        assert_same(x.grad, wanted, reentrant)
    a, b = draw("all_gather", world, rank), draw("all_gather", world, rank, 1).requires_grad_()
    (y, z), work = call("all_gather", [a, b], group, world, async_op=True)
    work.wait()
    z.sum().backward()
    assert y.requires_grad and b.grad is not None
    assert_same(b.grad, torch.full_like(b, float(world)))


def test_hooks_checkpoints_and_second_derivatives(ranks: Ranks) -> None:
    ranks(2, check_more_gradients)


WAITS = ("in order", "reversed", "one dropped", "sync")


def two_gradients(how: str, group: Group, world: int, rank: int) -> list[torch.Tensor]:
    """Return the gradients of two exchanges of one shape, for whose outputs this rank waits as `how` says."""
    leaves = [draw("all_to_all", world, rank, salt).requires_grad_() for salt in (1, 2)]
    if how == "sync":
        outputs = [call("all_to_all", x, group, world) for x in leaves]
    else:
        flights = [call("all_to_all", x, group, world, async_op=True) for x in leaves]
        works = [work for _, work in flights]
        outputs = [y for y, _ in flights]
        for work in works[::-1] if how == "reversed" else works[: 1 if how == "one dropped" else 2]:
            work.wait()
        while not works[1].is_completed():
            time.sleep(0.001)
    loss = sum(y.mul(1 + 3 * i).square().sum() for i, y in enumerate(outputs))
    return list(torch.autograd.grad(loss, leaves))


def check_orders_of_waits(rank: int, world: int, group: Group) -> None:
    spar.init(group)
    expected = two_gradients("sync", group, world, rank)
    for shift in range(1, len(WAITS)):
        for first in range(len(WAITS)):
            how = WAITS[(first + shift * rank) % len(WAITS)]
            for found, wanted in zip(two_gradients(how, group, world, rank), expected, strict=True):
                assert_same(found, wanted, (how, shift, first))


def test_backward_follows_the_order_of_issue_on_all_ranks(ranks: Ranks) -> None:
    ranks(3, check_orders_of_waits)


def check_hooks_before_the_wait(rank: int, world: int, group: Group) -> None:
    """Rank 0's hook changes the gradient that its exchange moves, once; peers have none."""
    hooks = {
        "new": lambda grad: grad / 2 if rank == 0 else None,
        "in place": lambda grad: grad.div_(2) if rank == 0 else None,
    }
    for how, hook in hooks.items():
        for _ in range(20):
            x = draw("all_gather", world, rank).requires_grad_()
            y, work = call("all_gather", x, group, world, async_op=True)
            if rank == 0:
                y.register_hook(hook)
            work.wait()
            (found,) = torch.autograd.grad((y * torch.ones(y.shape)).sum(), x)
            assert_same(found, torch.full_like(x, world - 0.5), how)


def test_hooks_before_the_wait_change_what_is_exchanged(ranks: Ranks) -> None:
    ranks(2, check_hooks_before_the_wait)


def check_late_changes(rank: int, world: int, group: Group) -> None:
    x = draw("all_gather", world, rank).requires_grad_()
    y, work = call("all_gather", x, group, world, async_op=True)
    if rank == 0:
        y.grad_fn.register_prehook(lambda grads: tuple(grad / 2 for grad in grads))
    work.wait()
    if rank == 0:
        with pytest.raises(spar.SparError, match=r"gradient of call \d+ was changed after its exchange"):
            torch.autograd.grad(y.sum(), x)
    else:
        torch.autograd.grad(y.sum(), x)
        with pytest.raises(spar.MismatchError, match="rank 0 failed: SparError"):
            spar.all_gather(x.detach(), group)


def test_a_gradient_changed_in_flight_is_an_error(ranks: Ranks) -> None:
    ranks(2, check_late_changes)


def check_unused_output(rank: int, world: int, group: Group, async_op: bool) -> None:
    """Rank 1's loss ignores the second output: rank 0's gradient of that meets rank 1's of the first."""
    leaves = [draw("all_gather", world, rank, salt).requires_grad_() for salt in (1, 2)]
    outputs = []
    for x in leaves:
        y = call("all_gather", x, group, world, async_op=async_op)
        outputs.append(y[0] if async_op else y)
        if async_op:
            y[1].wait()
    used = outputs[: 2 - rank]
    with pytest.raises(spar.MismatchError, match=r"gradient of call (\d+)\)(.|\n)*gradient of call (?!\1)"):
        sum(y.square().sum() for y in used).backward()
    assert spar.all_gather(torch.tensor([rank]), group).tolist() == [0, 1]


@pytest.mark.parametrize("async_op", [False, True])
def test_gradients_of_different_calls_do_not_match(ranks: Ranks, async_op: bool) -> None:
    ranks(2, check_unused_output, async_op)


def check_misuse(rank: int, world: int, group: Group) -> None:
    """What was saved for backward before wait() raises in backward: its values were not complete."""
    weight = torch.ones(2 * world, requires_grad=True)
    y, work = spar.all_gather(torch.ones(2, requires_grad=True), group, async_op=True)
    product = y * weight
    work.wait()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_use_before_wait_raises_in_backward(ranks: Ranks) -> None:
    ranks(2, check_misuse)


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


def test_async_under_modes_and_compile(ranks: Ranks) -> None:
    ranks(2, check_traced)
