# SPDX-License-Identifier: Apache-2.0
"""Causal convolutions over a sharded sequence: values, both derivatives, memory that is written in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from helpers.tables import MAKERS
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spar import MismatchError, SequenceLayout
from spar.integrations._transformers.tokens import Tokens

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
TOTAL = 23
LAYOUTS: dict[str, Callable[[Group], SequenceLayout]] = {
    **{name: partial(maker.of_total, TOTAL) for name, maker in MAKERS.items() if name != "packed"},
    "packed": lambda group: SequenceLayout.packed([7, 0, 1, 1, 14], group),
    "short packed": lambda group: SequenceLayout.packed([2] * 20, group),
    "documents": lambda group: SequenceLayout.zigzag(TOTAL, group).with_documents([7, 0, 1, 15]),
    "few tokens": lambda group: SequenceLayout.even(2, group),
    "holes": lambda group: SequenceLayout("local", (*(0, 5, 0, 2)[: group.size() - 1], 6), group),
}


def conv(weight: Tensor, x: Tensor, activation: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """[B, C, S] with [C, W], as transformers' causal_conv1d_fn."""
    taps = weight.size(1)
    if x.numel() == 0:  # a document without tokens, which torch refuses
        return x * weight[:, :1]
    y = F.conv1d(x, weight[:, None], padding=taps - 1, groups=x.size(1))[:, :, : x.size(2)]
    return activation(y)


def of_documents(fn: Callable[[Tensor], Tensor], x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([fn(part) for part in x.split(lengths, 2)], 2)


def convolved(
    fn: Callable[[Tensor], Tensor],
    x: Tensor,
    layout: SequenceLayout,
    before: int = 3,
    keeps_result: bool = False,
) -> Tensor:
    """Convolve this rank's tokens, as layers of transformers do in a view."""
    none: Any = None  # what counts multiply-adds
    return Tokens(none, none, layout, None).convolve(fn, x, before, keeps_result)


def check(rank: int, world: int, group: Group) -> None:
    generator = torch.Generator().manual_seed(0)
    for make in LAYOUTS.values():
        layout = make(group)
        own, total = layout.index(), layout.total
        spans = {1: (4,), 2: (2, 4), 3: (2, 4, 9), 4: (9,)}[world]
        for taps in spans:
            whole, upper = torch.randn(2, 2, 3, total, dtype=torch.float64, generator=generator)
            weight = torch.randn(3, taps, dtype=torch.float64, generator=generator).requires_grad_()
            leaf = whole.clone().requires_grad_()
            expected = of_documents(partial(conv, weight), leaf, layout.lengths)
            first = torch.autograd.grad(expected, (leaf, weight), upper, create_graph=True)
            # The sum over the ranks of the square of x's gradient is differentiated again.
            (second,) = torch.autograd.grad(first[0].pow(2).sum(), leaf)

            def run(x: Tensor, weight: Tensor, layout: SequenceLayout = layout) -> Tensor:
                return convolved(partial(conv, weight), x, layout, weight.size(1) - 1)

            for function in (run, partial(checkpoint, run, use_reentrant=False)):
                mine, shared = whole[:, :, own].requires_grad_(), weight.detach().requires_grad_()
                given = mine.detach().clone()
                y = function(mine, shared)
                found = torch.autograd.grad(y, (mine, shared), upper[:, :, own])
                assert torch.equal(mine, given), "the input was modified"
                torch.testing.assert_close(y, expected[:, :, own])
                sums = found[1].clone()
                dist.all_reduce(sums, group=group)
                torch.testing.assert_close(found[0], first[0][:, :, own])
                torch.testing.assert_close(sums, first[1])
            (of_x,) = torch.autograd.grad(run(mine, shared), mine, upper[:, :, own], create_graph=True)
            (again,) = torch.autograd.grad(of_x.pow(2).sum(), mine)
            torch.testing.assert_close(again, second[:, :, own])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_convolution_matches_the_whole_sequence(ranks: Ranks, world: int) -> None:
    ranks(world, check, timeout=240)


def check_memory(rank: int, world: int, group: Group) -> None:
    """Functions that return their input, a view, or a gradient that others have keep right values."""
    layout = SequenceLayout.even(TOTAL, group)
    own = layout.index()
    whole = torch.randn(1, 3, TOTAL, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    cases: list[tuple[Callable[[Tensor], Tensor], bool]] = [
        (lambda x: x, False),
        (lambda x: x.view_as(x), False),
        (lambda x: x * 2, False),
        (lambda x: x + 0 * x.detach(), False),
        (partial(conv, weight, activation=lambda y: y), False),
        (partial(conv, weight, activation=torch.tanh), True),
        (lambda x: x.cumsum(2) - F.pad(x.cumsum(2), (4, 0))[:, :, : x.size(2)], False),
    ]
    assert torch.equal(convolved(lambda x: x * 3, whole[:, :, own], layout, 0), whole[:, :, own] * 3)
    for fn, keeps_result in cases:
        for upper in (
            torch.ones(()).double().expand(whole.shape),
            torch.randn(whole.shape, dtype=torch.float64, generator=generator),
        ):
            leaf = whole.clone().requires_grad_()
            expected = fn(leaf)
            (gradient,) = torch.autograd.grad(expected, leaf, upper)
            mine = whole[:, :, own].requires_grad_()
            given, part = mine.detach().clone(), upper[:, :, own]
            kept = part.clone()
            y = convolved(fn, mine, layout, 3, keeps_result)
            # Two passes: the first must leave what it received to the second.
            for _ in range(2):
                (found,) = torch.autograd.grad(y, mine, part, retain_graph=True)
                torch.testing.assert_close(found, gradient[:, :, own])
                assert torch.equal(part, kept) and torch.equal(mine, given)
            torch.testing.assert_close(y, expected[:, :, own])
            with torch.no_grad():
                again = convolved(fn, mine, layout, 3, keeps_result)
                torch.testing.assert_close(again, expected[:, :, own])
                assert torch.equal(mine, given)


def test_memory_of_others_is_not_modified(ranks: Ranks) -> None:
    ranks(2, check_memory)


def check_narrow(rank: int, world: int, group: Group) -> None:
    """In 16 bits gradients are as near to those of float64 as one process's."""
    layout = SequenceLayout.zigzag(TOTAL, group)
    own = layout.index()
    generator = torch.Generator().manual_seed(0)
    whole, upper = torch.randn(2, 2, 8, TOTAL, generator=generator).bfloat16()
    weight = torch.randn(8, 4, generator=generator).bfloat16()
    exact_x, exact_w = whole.double().requires_grad_(), weight.double().requires_grad_()
    exact = torch.autograd.grad(conv(exact_w, exact_x), (exact_x, exact_w), upper.double())
    mine, shared = whole[:, :, own].requires_grad_(), weight.clone().requires_grad_()
    y = convolved(partial(conv, shared), mine, layout)
    found = torch.autograd.grad(y, (mine, shared), upper[:, :, own])
    sums = found[1].double()
    dist.all_reduce(sums, group=group)
    for x, e in ((found[0].double(), exact[0][:, :, own]), (sums, exact[1])):
        assert float((x - e).abs().max() / e.abs().max()) < 0.02


def test_convolution_in_16_bits(ranks: Ranks) -> None:
    ranks(3, check_narrow)


def check_errors(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.even(10, group)
    x = torch.zeros(1, 2, layout.sizes[rank])
    with pytest.raises(ValueError, match="input_ is of size 10 in dim 2; expected 5"):
        convolved(lambda x: x, torch.zeros(1, 2, 10), layout)
    with pytest.raises(MismatchError):
        convolved(lambda x: x, x, layout, 3 + rank)


def test_errors_of_convolutions(ranks: Ranks) -> None:
    ranks(2, check_errors, timeout=60)
