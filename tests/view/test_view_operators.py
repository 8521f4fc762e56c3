# SPDX-License-Identifier: Apache-2.0
"""Operators called by torch.ops in a view: torch's run by their rules, those of other libraries whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.view_cases import Inputs, compare, viewed
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

pytestmark = pytest.mark.one_transport

aten, mine = torch.ops.aten, torch.ops.spar_tests


@torch.library.custom_op("spar_tests::relu", mutates_args=())
def relu(x: Tensor) -> Tensor:
    """Has the name of a function of torch, and mixes tokens."""
    return x - x.mean(1, keepdim=True)


@torch.library.custom_op("spar_tests::limited", mutates_args=())
def limited(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("spar_tests::shift", mutates_args=("y", "last"))
def shift(x: Tensor, y: Tensor, last: Tensor) -> Tensor:
    """Changes two of its arguments."""
    y.add_(x.mean(1, keepdim=True))
    last.mul_(x.sum())
    return x.cumsum(1)


def register() -> None:
    relu.register_autograd(lambda _, gradient: gradient - gradient.mean(1, keepdim=True))
    limited.register_autograd(lambda _, gradient: gradient.clamp(-0.5, 0.5))


register()


def shifted(x: Tensor, *_: Any) -> Tensor:
    x, y = x.detach(), x.detach() * 2
    last, number = x[:, -1] * 1, torch.ones((), dtype=x.dtype)
    first, second = shift(x, y, last=last), mine.shift.default(x, y, last=number)
    return first + second + y + last[:, None] + number


def chained(operator: Any) -> Callable[..., Any]:
    """Run an operator between functions that have rules, on a tensor that is sharded again behind it."""

    def run(x: Tensor, y: Tensor, *_: Any) -> Tensor:
        out: Tensor = operator(x * 2) * y
        return out

    return run


def changed(operator: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """Return a tensor that an operator changes, directly or by a view of it."""

    def run(x: Tensor, *_: Any) -> Tensor:
        z = x * 2
        operator(z)
        return z

    return run


def exp(x: Tensor) -> Any:
    """Asks whether a mode is active, as functions of torch do, and has the name of one."""
    if has_torch_function_unary(x):
        return handle_torch_function(exp, (x,), x)
    return x.exp() - x.exp().mean(1, keepdim=True)


CASES: dict[str, Callable[..., Any]] = {
    "an operator of a known name": chained(relu),
    "its packet": chained(mine.relu),
    "its overload": chained(mine.relu.default),
    "a gradient that is not linear": chained(mine.limited),
    "changed arguments": shifted,
    "a function of a known name": chained(exp),
    "mean": chained(lambda x: x - aten.mean.dim(x, [1], True)),
    "cat": lambda x, y, *_: aten.cat.default([x, y], 1),
    "embedding": lambda x, y, w, b, ids, mask: aten.embedding.default(w, ids) + x,
    "transpose": chained(lambda x: aten.transpose.int(aten.transpose.int(x, 1, 2).exp(), 1, 2)),
    "add_": changed(lambda z: aten.add_.Tensor(z, 1.0)),
    "copy_": changed(lambda z: aten.copy_.default(z, z * 2)),
    "view": changed(lambda z: aten.view.default(z, [-1]).add_(1)),
    "a packet's add_": changed(lambda z: aten.add_(z, 5)),
}


def check_operators(rank: int, world: int, group: dist.ProcessGroup) -> None:
    for name, function in CASES.items():
        for pair in (("tokens", "tokens"), ("tokens", "whole"), ("features", "tokens"), ("uneven", "tokens")):
            assert compare(group, function, pair, Inputs(3)) is None, (name, pair)
    views: list[Callable[[Tensor], Tensor]] = [
        lambda z: aten.slice.Tensor(z, 1, 2, 9),
        lambda z: torch.ops.prims.transpose(z, [1, 0, 2]),
    ]
    for view in views:  # here copies: changes of them are not in what they would be a view of

        def change(z: Tensor, view: Callable[[Tensor], Tensor] = view) -> None:
            view(z.detach()).add_(1)

        with pytest.raises(RuntimeError, match="that was changed in place through another one"):
            compare(group, changed(change), ("tokens", "tokens"), Inputs(3))


@pytest.mark.parametrize("world", [2, 3])
def test_operators_are_exact(ranks: Ranks, world: int) -> None:
    ranks(world, check_operators)


def check_replaced(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A function that replaces a method of torch runs by the rule of that method."""
    own = Tensor.to

    def to(*args: Any, **kwargs: Any) -> Tensor:
        return own(*args, **kwargs)

    def run(view: Any, x: Tensor) -> None:
        x.to(torch.float32)
        assert not view.report.functions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", to)
        viewed(group, run)


def test_functions_that_replace_those_of_torch_have_their_rules(ranks: Ranks) -> None:
    ranks(2, check_replaced)


def check_strict(rank: int, world: int, group: dist.ProcessGroup) -> None:
    def run(view: Any, x: Tensor) -> None:
        view.blocks = 1
        with pytest.raises(
            RuntimeError, match=r"spar_tests.relu at test_view_operators.py:.* another library"
        ):
            mine.relu(x)

    viewed(group, run, True)


def test_strict_refuses_operators_of_other_libraries(ranks: Ranks) -> None:
    ranks(2, check_strict)
