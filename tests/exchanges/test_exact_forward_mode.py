# SPDX-License-Identifier: Apache-2.0
"""Exchanges in forward mode: tangents, and Hessians that are symmetric."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Ranks
from helpers.reference import assert_same, cells, rule
from test_exact import Group
from torch.autograd import forward_ad

import spar
from spar import SequenceLayout

pytestmark = pytest.mark.quick_ranks


def linear_functions(world: int, rank: int, group: Group) -> dict[str, tuple[Any, torch.Tensor]]:
    """Return operations that do not scale their outputs, each with an input; lists give one tensor."""
    total, heads = 11, 5
    layout, held = SequenceLayout.zigzag(total, group), rule(total, world)
    own = cells((2, held[rank], heads, 2), torch.float64, salt=rank)
    part = cells((layout.sizes[rank], 3), torch.float64, salt=rank)
    whole = cells((total, 4), torch.float64, salt=rank).t()  # no input is contiguous

    def exchange_in_flight(x: torch.Tensor) -> torch.Tensor:
        y, work = spar.all_gather(x, group, 0, list(layout.sizes), async_op=True)
        work.wait()
        return y

    def exchange_list(x: torch.Tensor) -> torch.Tensor:
        y, z = spar.all_to_all([x, 2 * x], group, 2, 1, total)
        return y * 3 + z

    return {
        "all_to_all": (lambda x: spar.all_to_all(x, group, 2, 1, total), own),
        "list": (exchange_list, own),
        "all_gather": (lambda x: spar.all_gather(x, group, 0, list(layout.sizes)), part),
        "in flight": (exchange_in_flight, part),
        "reduce_scatter": (lambda x: spar.reduce_scatter(x, group, 1), whole),
        "layout.gather": (lambda x: layout.gather(x, 0, None), part),
        "layout.shard": (lambda x: layout.shard(x, 1, None), whole),
        "split": (lambda x: spar.split_forward_gather_backward(x, group, 1), whole),
        "view": (lambda x: spar.split_forward_gather_backward(x.t(), group, 0), whole),
        "gather": (lambda x: spar.gather_forward_split_backward(x, group, 1, held), own),
    }


def check_forward_mode(rank: int, world: int, group: Group) -> None:
    functions = linear_functions(world, rank, group)
    for name, (function, x) in functions.items():
        tangent = torch.randn_like(x)
        expected, there = function(tangent), function(x)
        for inputs in (x, x.clone().requires_grad_()):
            with forward_ad.dual_level():
                y = forward_ad.unpack_dual(function(forward_ad.make_dual(inputs, tangent)))
            assert y.tangent is not None, name
            assert_same(y.primal.detach(), there, name)
            assert_same(y.tangent.detach(), expected, name)
            assert y.primal.requires_grad == inputs.requires_grad, name
        y, dy = torch.func.jvp(function, (x,), (tangent,))
        assert_same(y, there, name)
        assert_same(dy, expected, name)

        def loss(x: torch.Tensor, function: Any = function) -> torch.Tensor:
            return (function(x) ** 3).sum()

        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        assert_same(torch.func.grad(loss)(x), first.detach(), name)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone().requires_grad_(), tangent)
            (gradient,) = torch.autograd.grad(loss(dual), dual)
            found = forward_ad.unpack_dual(gradient).tangent
        # the Hessian is symmetric only where backward is the transpose
        slope, along = torch.func.jvp(torch.func.grad(loss), (x,), (tangent,))
        assert_same(slope, first.detach(), name)
        assert_same(found, along, name)
        if name in ("all_to_all", "list", "all_gather", "in flight", "reduce_scatter"):
            (second,) = torch.autograd.grad((first * tangent).sum(), leaf)
            torch.testing.assert_close(along, second, msg=lambda text, name=name: f"{name}: {text}")
    ints = torch.arange(3)
    with forward_ad.dual_level():
        assert spar.all_gather(ints, group).shape == (3 * world,)
        x = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        if world > 1:
            with pytest.raises(ValueError, match="None where input_ has a tangent"):
                spar.all_gather(x, group, out=torch.empty(2 * world))


@pytest.mark.one_transport
@pytest.mark.parametrize("world", [1, 3])
def test_forward_mode_is_exact(ranks: Ranks, world: int) -> None:
    ranks(world, check_forward_mode)
