# SPDX-License-Identifier: Apache-2.0
"""Gradients of asynchronous calls: which exchanges backward makes, and in which order."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from conftest import Ranks
from helpers.operations import DIRECT
from helpers.reference import assert_same
from test_async import Group, call, draw
from torch.utils.checkpoint import checkpoint

import spar


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
