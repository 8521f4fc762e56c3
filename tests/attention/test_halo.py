# SPDX-License-Identifier: Apache-2.0
"""SequenceLayout.halo and shift against the whole sequence: values, gradients and bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.tables import MAKERS
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import spar
from spar import MismatchError, SequenceLayout
from spar._exchange.exchange import Exchange
from spar._exchange.layouts import pieces
from spar.sequence_layout import numbers_of

Group = dist.ProcessGroup
TOTAL = 23
DOCUMENTS = [7, 0, 1, 1, 14]
LAYOUTS: dict[str, Callable[[Group], SequenceLayout]] = {
    **{name: partial(maker.of_total, TOTAL) for name, maker in MAKERS.items() if name != "packed"},
    "packed": lambda group: SequenceLayout.packed(DOCUMENTS, group),
    "few tokens": lambda group: SequenceLayout.even(2, group),
    # Documents in any cut; refined as ring x ulysses are, where ranks allow it.
    "even, documents": lambda group: SequenceLayout.even(TOTAL, group).with_documents(DOCUMENTS),
    "zigzag, documents": lambda group: SequenceLayout.zigzag(TOTAL, group).with_documents(DOCUMENTS),
    "joint, documents": lambda group: SequenceLayout.joint(9, TOTAL - 9, group).with_documents(DOCUMENTS),
    "hybrid, documents": lambda group: SequenceLayout(
        "hybrid", (2 - group.size() % 2, TOTAL), group
    ).with_documents(DOCUMENTS),
    "few documents": lambda group: SequenceLayout.even(2, group).with_documents([0, 1, 0, 1]),
    "holes": lambda group: SequenceLayout("local", (*(0, 5, 0, 2)[: group.size() - 1], 6), group),
}


def owners(layout: SequenceLayout) -> Tensor:
    """Return the document of each place of the sequence."""
    lengths = layout.lengths
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def at(x: Tensor, layout: SequenceLayout, places: Tensor, of: Tensor, fill: float = 0) -> Tensor:
    """Return x [B, S, C] at places, where they are in the same documents as the places `of`."""
    document = owners(layout)
    inside = (places >= 0) & (places < layout.total)
    inside &= document[places.clamp(0, layout.total - 1)] == document[of]
    values = x[:, places.clamp(0, layout.total - 1)]
    return torch.where(inside[:, None], values, torch.full_like(values, fill))


def expected_halo(x: Tensor, layout: SequenceLayout, rank: int, before: int, after: int) -> Tensor:
    parts = [x[:, :0]]
    for start, size, _ in pieces(numbers_of(layout, 0), layout.group.size(), rank):
        if size:
            places = torch.arange(start - before, start + size + after)
            of = places.clamp(start, start + size - 1)
            parts.append(at(x, layout, places, of))
    return torch.cat(parts, 1)


def check_halo(rank: int, world: int, group: Group) -> None:
    for kind, make in LAYOUTS.items():
        layout = make(group)
        whole = torch.randn(
            2, layout.total, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        for before, after in ((3, 0), (0, 2), (1, 1), (9, 4), (0, 0), (50, 50)):
            wholes, leaf = whole.clone().requires_grad_(), whole[:, layout.index()].clone().requires_grad_()
            expected = expected_halo(wholes, layout, rank, before, after)
            found = layout.halo(leaf, before, 1, after)
            assert torch.equal(found, expected), (kind, before, after)

            # Both derivatives of a function that is not linear: the second one is not 0. Losses are summed
            # over the ranks, as is what is differentiated again.
            def weighed(y: Tensor) -> Tensor:
                return (torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view(y.shape) * y.pow(3)).sum()

            one = torch.autograd.grad(weighed(found), leaf, create_graph=True)[0]
            second = torch.autograd.grad(one.pow(2).sum(), leaf)[0]
            of_ranks = [expected_halo(wholes, layout, peer, before, after) for peer in range(world)]
            loss = sum([weighed(y) for y in of_ranks], wholes.sum() * 0)
            first = torch.autograd.grad(loss, wholes, create_graph=True)[0]
            twice = torch.autograd.grad(first.pow(2).sum(), wholes)[0]
            torch.testing.assert_close(one, first[:, layout.index()])
            torch.testing.assert_close(second, twice[:, layout.index()])
            kept = layout.drop_halo(found, before, 1, after)
            assert torch.equal(kept, leaf), (kind, before, after)


@pytest.mark.one_transport
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_halo_matches_the_whole_sequence(ranks: Ranks, world: int) -> None:
    ranks(world, check_halo)


def check_shift(rank: int, world: int, group: Group) -> None:
    for kind, make in LAYOUTS.items():
        layout = make(group)
        whole = torch.arange(2 * layout.total).view(2, layout.total, 1)
        own = layout.index()
        for n in (1, -1, 3, 0, -40):
            found = layout.shift(whole[:, own], n, fill=-100)
            assert torch.equal(found, at(whole, layout, own + n, own, -100)), (kind, n)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shift_matches_the_whole_sequence(ranks: Ranks, world: int) -> None:
    ranks(world, check_shift)


def check_compiled(rank: int, world: int, group: Group, kind: str) -> None:
    def run(x: Tensor, layout: SequenceLayout) -> Tensor:
        y = layout.halo(x * 2, 3, 2)
        return layout.drop_halo(y.cumsum(2), 3, 2)

    make = {
        "even": lambda n: SequenceLayout.even(n, group),
        "zigzag": lambda n: SequenceLayout.zigzag(n, group),
        "packed": lambda n: SequenceLayout.packed([n - 9, 9], group),
    }[kind]
    # Compiling takes seconds: for each kind another rank does, whose calls match the others' eager ones.
    compiles = rank == ("even", "zigzag", "packed").index(kind)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager") if compiles else run
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for total in (40, 47, 53, 64):
        layout, results = make(total), []
        x = torch.randn(2, 3, total, dtype=torch.float64)[:, :, layout.index()]
        for function in (run, compiled, lambda x, layout: checkpoint(run, x, layout, use_reentrant=False)):
            leaf = x.clone().requires_grad_()
            y = function(leaf, layout)
            y.square().sum().backward()
            results.append((y, leaf.grad))
        for other in results[1:]:
            torch.testing.assert_close(other, results[0])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert graphs in ((1, 2) if compiles else (0,)), graphs


@pytest.mark.compiler
@pytest.mark.one_transport
@pytest.mark.parametrize("kind", ["even", "zigzag", "packed"])
def test_halo_compiles(ranks: Ranks, kind: str) -> None:
    ranks(3, check_compiled, kind, timeout=280)


def check_bytes(rank: int, world: int, group: Group) -> None:
    sent: list[int] = []

    def counted(exchange: Exchange, tensors: list[Tensor], *more: Any) -> Any:
        sent.extend(x.numel() for x in tensors)
        return run(exchange, tensors, *more)

    run = Exchange.run

    for total in (40, 4000):
        for layout, boundaries in (
            (SequenceLayout.even(total, group), world - 1),
            # The last rank holds two chunks that adjoin.
            (SequenceLayout.zigzag(total, group), 2 * world - 2),
            (SequenceLayout.packed([total // 2, total // 2], group), 2 * (world - 1)),
        ):
            sent.clear()
            x = torch.ones(2, layout.sizes[rank], 5)
            with mock.patch.object(Exchange, "run", counted):
                layout.halo(x, 3)
            counts: list[Any] = [None] * world
            dist.all_gather_object(counts, sent, group=group)
            assert sum(map(sum, counts)) == 3 * 2 * 5 * boundaries, (total, layout)


@pytest.mark.one_transport
def test_halo_moves_the_tokens_before_each_boundary_alone(ranks: Ranks) -> None:
    ranks(3, check_bytes)


def check_errors(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.even(10, group)
    x = torch.zeros(1, layout.sizes[rank], 2)
    with pytest.raises(ValueError, match=r"before is -1"):
        layout.halo(x, -1)
    with pytest.raises(TypeError, match=r"after is 1.5"):
        layout.halo(x, 1, 1, 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"y is of size {layout.sizes[rank]} in dim 1; expected"):
        layout.drop_halo(x, 2)
    with pytest.raises(ValueError, match=r"input_ is of size 10 in dim 1; expected 5"):
        layout.halo(torch.zeros(1, 10, 2), 2)
    with pytest.raises(MismatchError):
        layout.halo(x, 1 + rank)
    with pytest.raises(ValueError, match=r"SequenceLayout.drop_halo: before is -1"):
        layout.drop_halo(x, -1)


def check_errors_of_one_rank(rank: int, world: int, group: Group) -> None:
    """Peers raise at once: in the call, or in the next one if the rank has made its exchange."""
    layout = SequenceLayout.even(10, group)
    x = torch.zeros(1, layout.sizes[rank], 2)
    wrong: list[tuple[Callable[[], Tensor], Callable[[], Tensor]]] = [
        (lambda: layout.halo(x, -1), lambda: layout.halo(x, 1)),
        (lambda: layout.halo(x, 1, after=1.5), lambda: layout.halo(x, 1)),  # type: ignore[arg-type]
        (lambda: layout.shift(x, "1"), lambda: layout.shift(x, 1)),  # type: ignore[arg-type]
        # Only the last rank fills.
        (lambda: layout.shift(x, 1, fill=None), lambda: layout.gather(layout.shift(x, 1), 1)),  # type: ignore[arg-type]
    ]
    for fails, right in wrong:
        with pytest.raises(MismatchError if rank == 0 else (ValueError, TypeError, RuntimeError)):
            right() if rank == 0 else fails()
        assert spar.all_gather(torch.tensor([rank]), group).tolist() == [0, 1]


@pytest.mark.one_transport
def test_errors_of_halo_are_reported(ranks: Ranks) -> None:
    ranks(2, check_errors_of_one_rank, timeout=20)


@pytest.mark.one_transport
def test_errors_of_halo(ranks: Ranks) -> None:
    ranks(2, check_errors)
