# SPDX-License-Identifier: Apache-2.0
"""Gradients that an exchange writes side by side, as columns of one: on each rank that can take them so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from torch import Tensor

import spar
from spar import _C, SequenceLayout
from spar._exchange import fused_gradients as joining
from spar._group.registry import group_of
from spar.integrations._transformers.tokens import Tokens
from spar.ops import columns

Group = dist.ProcessGroup
HEADS, WIDTH = 4, 6


def layouts(world: int, rank: int, group: Group) -> dict[str, SequenceLayout]:
    return {
        "even": SequenceLayout.even(8 * world, group),
        "uneven": SequenceLayout.even(8 * world + 1, group),
        "zigzag": SequenceLayout.zigzag(4 * world, group),
        "packed": SequenceLayout.packed([2 * world, 7, 3 * world], group),
        "a rank without tokens": SequenceLayout.from_local(0 if rank == world - 1 else 5, group),
    }


def mixed(v: Tensor, q: Tensor, k: Tensor, gate: Tensor) -> Tensor:
    """A function of whole sequences; key heads may be fewer."""
    q, k = [x.repeat_interleave(v.size(2) // x.size(2), 2) for x in (q, k)]
    return v.cumsum(1) * k.sin() + q * gate[..., None]


def of_packed(layout: SequenceLayout, tensors: list[Tensor]) -> Tensor:
    parts = zip(*[x.split(list(layout.lengths), 1) for x in tensors], strict=True)
    return torch.cat([mixed(*part) for part in parts], 1)


@contextmanager
def watched() -> Iterator[list[bool]]:
    """Yield a list that grows by whether the gradients of a joined tensor already are its columns."""
    found: list[bool] = []

    def are_columns(*arguments: Any) -> bool:
        found.append(were(*arguments))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        were = joining.are_columns
        patch.setattr(joining, "are_columns", are_columns)
        patch.setattr(columns, "_LARGE", 0)
        yield found


def cut(x: Tensor, keys: int) -> list[Tensor]:
    """Return values, queries and keys as a layer cuts them from the result of a convolution."""
    q, k, v = x.split([keys * WIDTH, keys * WIDTH, HEADS * WIDTH], 2)
    return [part.unflatten(2, (-1, WIDTH)) for part in (v, q, k)]


def check(
    layout: SequenceLayout, batch: int = 2, keys: int = HEADS, gate: torch.dtype = torch.float64
) -> list[bool]:
    """Compare gradients with those of one process; return what was watched."""
    generator = torch.Generator().manual_seed(layout.total + batch)
    channels = (2 * keys + HEADS) * WIDTH
    whole = torch.randn(batch, layout.total, channels, generator=generator, dtype=torch.float64)
    gates = torch.randn(batch, layout.total, HEADS, generator=generator).to(gate)
    upper = torch.randn(batch, layout.total, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    own = layout.index()
    leaves = [x.clone().requires_grad_() for x in (whole, gates)]
    expected = torch.autograd.grad(of_packed(layout, [*cut(leaves[0] * 2, keys), leaves[1]]), leaves, upper)
    leaves = [x[:, own].clone().requires_grad_() for x in (whole, gates)]
    with watched() as found:
        y = Tokens(layout).by_heads(mixed, [*cut(leaves[0] * 2, keys), leaves[1]])
        gradients = torch.autograd.grad(y, leaves, upper[:, own])
    torch.testing.assert_close(gradients[0], expected[0][:, own])
    torch.testing.assert_close(gradients[1], expected[1][:, own], rtol=1e-4, atol=1e-4)
    return found


def check_layouts(rank: int, world: int, group: Group) -> None:
    for name, layout in layouts(world, rank, group).items():
        for batch in (1, 2):
            joins = 1 if len(layout.index()) else 0
            assert check(layout, batch) == [takes_columns(group)] * joins, (name, batch)
            # Heads that ranks share are several inputs, whose gradients autograd adds.
            is_written = takes_columns(group) and 2 % world == 0
            assert check(layout, batch, 2) == [is_written] * joins, (name, batch)
        # Moved as items of another dtype.
        assert check(layout, gate=torch.float32) == [False] * joins, name


def takes_columns(group: Group) -> bool:
    spar.init(group, "cpu")
    return group_of(group).channels["cpu"].name in ("shm", "tcp")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gradients_lie_side_by_side(ranks: Ranks, world: int) -> None:
    ranks(world, check_layouts)


def check_one_copies(rank: int, world: int, group: Group) -> None:
    """No rank needs to know which of the others have memory for columns."""
    layout = SequenceLayout.even(8 * world, group)
    for copies in range(world):
        with pytest.MonkeyPatch.context() as patch:
            if rank == copies:
                patch.setattr(joining, "_reused", lambda like, rows: None)
            assert check(layout) == [rank != copies]
        with pytest.MonkeyPatch.context() as patch:
            if rank == copies:
                patch.setattr(group_of(group).channels["cpu"], "takes_columns", False)
            assert check(layout) == [rank != copies]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:  # to memory that peers cannot write to, and that the exchange then copies to
            patch.setattr(_C, "arena_take", lambda size: torch.empty(size, dtype=torch.uint8))
        assert check(layout) == [True]


@pytest.mark.one_transport
def test_each_rank_decides_for_itself(ranks: Ranks) -> None:
    ranks(3, check_one_copies)


def check_failure(rank: int, world: int, group: Group) -> None:
    """Calls that differ write no columns; their memory is used again once no peer can write to it."""
    layout = SequenceLayout.even(8 * world, group)
    x = torch.randn(1, 8, 3 * HEADS * WIDTH, requires_grad=True)
    gate = torch.randn(1, 8, HEADS)
    for _ in range(3):
        with watched() as found:
            y = Tokens(layout).by_heads(mixed, [*cut(x * 2, HEADS), gate])
            before = _C.arena_stats()[2]
            with pytest.raises(spar.MismatchError, match="calls differ"):
                if rank == 0:
                    spar.all_to_all(y, group)
                    spar.all_to_all(y, group)
                else:
                    torch.autograd.grad(y.sum(), x)
        assert not found
        del y
        assert check(layout) == [True]
        _C.arena_trim()
        assert _C.arena_stats()[4] == 0 and _C.arena_stats()[2] <= before


@pytest.mark.one_transport
def test_calls_that_differ_write_no_columns(ranks: Ranks) -> None:
    ranks(2, check_failure)


def check_uses(rank: int, world: int, group: Group) -> None:
    """What others hold of the gradients: twice the same graph, a gradient of columns alone, a second one."""
    layout = SequenceLayout.even(8 * world, group)
    leaf = torch.randn(1, 8, 3 * HEADS * WIDTH, dtype=torch.float64, requires_grad=True)
    gate = torch.randn(1, 8, HEADS, dtype=torch.float64)
    with watched() as found:
        base = leaf * 2
        parts = columns.with_one_gradient(cut(base, HEADS), group)
        y = spar.by_heads(mixed, [*parts, gate], layout)
        upper = torch.randn_like(y)
        (first,) = torch.autograd.grad(y, leaf, upper, retain_graph=True)
        kept = first.clone()
        (again,) = torch.autograd.grad(y, leaf, upper, retain_graph=True)
        assert found == [True, True] and torch.equal(first, kept) and torch.equal(again, kept)
        assert first.data_ptr() != again.data_ptr()
        of_parts = torch.autograd.grad(y, parts, upper, retain_graph=True)
        joined = torch.cat([of_parts[i].flatten(2) for i in (1, 2, 0)], 2)
        (of_base,) = torch.autograd.grad(y, base, upper, retain_graph=True)
        torch.testing.assert_close(of_base, joined)  # the parts' own gradients stay as they were
        (recorded,) = torch.autograd.grad(y, leaf, upper, create_graph=True)
        torch.testing.assert_close(recorded, kept)
        assert recorded.requires_grad and len(found) == 3


@pytest.mark.one_transport
def test_gradients_are_nobody_elses(ranks: Ranks) -> None:
    ranks(2, check_uses)
