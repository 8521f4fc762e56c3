# SPDX-License-Identifier: Apache-2.0
"""roll: this rank's shard of torch.roll of the whole sequence, or of each document."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.reference import assert_same, cells, owned
from helpers.tables import MAKERS

import spar
from spar import SequenceLayout

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
SHIFTS = (1, -1, 0, 4, -40, 123)


def rolled(whole: torch.Tensor, lengths: list[int], shifts: int, dim: int) -> torch.Tensor:
    return torch.cat([document.roll(shifts, dim) for document in whole.split(lengths, dim)], dim)


def check_layouts(rank: int, world: int, group: Group) -> None:
    for name, maker in MAKERS.items():
        for given in maker.examples(world):
            layout, owners = maker.make(group, *given), list(maker.owners(world, *given))
            documents = maker.documents(*given) or [0]
            for shifts in SHIFTS:
                for shape, dim in (((2, len(owners), 3), 1), ((len(owners), 2), -2)):
                    whole = cells(shape, torch.float64)
                    x = owned(whole, owners, dim, rank).requires_grad_()
                    y = spar.roll(x, shifts, layout, dim)
                    expected = owned(rolled(whole, documents, shifts, dim), owners, dim, rank)
                    assert_same(y.detach(), expected, (name, given, shifts))
                    upper = cells(shape, torch.float64, 7)
                    y.backward(owned(upper, owners, dim, rank))
                    assert x.grad is not None
                    back = owned(rolled(upper, documents, -shifts, dim), owners, dim, rank)
                    assert_same(x.grad, back, (name, given, shifts))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_layout_beside_torch(ranks: Ranks, world: int) -> None:
    ranks(world, check_layouts)


def check_use(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.zigzag(13, group)
    own = layout.index()
    for dtype in (torch.bool, torch.int64, torch.bfloat16):
        assert_same(spar.roll(own.to(dtype), 3, layout, 0), torch.arange(13).roll(3)[own].to(dtype))
    x = own.double().requires_grad_()
    value, tangent = torch.func.jvp(lambda x: spar.roll(x, 3, layout, 0), (x.detach(),), (own.double() * 2,))
    assert_same(tangent, value * 2)
    (grad,) = torch.autograd.grad(spar.roll(x, 3, layout, 0).pow(3).sum(), x, create_graph=True)
    grad.sum().backward()
    assert x.grad is not None
    assert_same(x.grad, own.double() * 6)
    assert spar.roll(torch.empty(2, len(own), device="meta"), 3, layout).shape == (2, len(own))
    with pytest.raises(ValueError, match=f"roll on rank {rank} of 2: input_ is of size 1 in dim 0; expected"):
        spar.roll(own[:1], 3, layout, 0)
    with pytest.raises(TypeError, match=r"roll on rank \d of 2: shifts is 1.5; expected an int"):
        spar.roll(own, 1.5, layout, 0)  # type: ignore[arg-type]
    with pytest.raises(spar.MismatchError, match="offset -16, around"):
        spar.roll(own, 3 + 13 * rank, layout, 0)
    with pytest.raises(TypeError, match="layout is None; expected a SequenceLayout"):
        spar.roll(own, 3, None, 0)  # type: ignore[arg-type]


def test_derivatives_dtypes_and_errors(ranks: Ranks) -> None:
    ranks(2, check_use)


def check_compiled(rank: int, world: int, group: Group) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(spar.roll, fullgraph=True, backend="aot_eager")
    for total in (13, 17):
        for layout in (SequenceLayout.even(total, group), SequenceLayout.packed([4, total - 4], group)):
            x = layout.index().double().requires_grad_()
            for function in (compiled, spar.roll) if rank else (spar.roll, compiled):
                y = function(x, 3, layout, 0)
                assert_same(y.detach(), spar.roll(layout.index(), 3, layout, 0).double())
                (grad,) = torch.autograd.grad(y, x, x.detach())
                assert_same(grad, spar.roll(x.detach(), -3, layout, 0))


@pytest.mark.compiler
def test_compiled_equals_eager(ranks: Ranks) -> None:
    ranks(2, check_compiled, timeout=200)
