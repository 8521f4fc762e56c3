# SPDX-License-Identifier: Apache-2.0
"""SequenceLayout.rows: rows of any index, their sums at the owners, and tables, beside one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.reference import assert_same, cells, in_runs, owned, rule
from helpers.tables import MAKERS
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import spar
from spar import SequenceLayout
from spar._exchange.row_exchange import RowMaps

Group = dist.ProcessGroup
KINDS = ("any", "of two dims", "empty", "one rank has all", "one row", "own", "padding", "all")


def index_of(kind: str, rank: int, world: int, owners: list[int]) -> Tensor:
    """Return what a rank wants of rows with these owners."""
    total, generator = len(owners), torch.Generator().manual_seed(rank)
    least = -1 if kind == "padding" else 0
    if kind == "all":
        return torch.randperm(total, generator=generator)
    if kind == "own":
        return torch.tensor([i for i, owner in enumerate(owners) if owner == rank], dtype=torch.int64)
    if kind == "one rank has all" and rank == world - 1:
        return torch.arange(total, dtype=torch.int32)
    if kind in ("empty", "one rank has all") or total + least <= least:
        return torch.empty(0, dtype=torch.int64)
    if kind == "one row":
        return torch.full((9,), total // 2)
    shape = (3 + rank, 2) if kind == "of two dims" else (7 + 5 * rank,)
    return torch.randint(least, total, shape, generator=generator)


def of_whole(whole: Tensor, index: Tensor, dim: int) -> Tensor:
    """Return the rows of one process; zeros where the index is -1."""
    flat = index.reshape(-1).long()
    zeros = whole.narrow(dim, 0, 0).new_zeros([1 if d == dim else n for d, n in enumerate(whole.shape)])
    rows = torch.cat([whole, zeros], dim).index_select(dim, flat % (whole.size(dim) + 1))
    return rows.reshape([*whole.shape[:dim], *index.shape, *whole.shape[dim + 1 :]])


def check_index(layout: SequenceLayout, owners: list[int], kind: str, rank: int, world: int) -> None:
    """Values, gradients, second derivatives, the transpose with its gradient, and the table."""
    indexes = [index_of(kind, r, world, owners) for r in range(world)]
    index, text = indexes[rank], (layout, kind)
    rows = layout.rows(index, padding=kind == "padding")
    assert sum(rows.sizes[rank]) == rows.received and all(rows.sizes[r][r] == 0 for r in range(world))
    for shape, dim in (((len(owners), 3), 0), ((2, len(owners), 3), -2)):
        at = dim % len(shape)
        whole = cells(shape, torch.float64).requires_grad_()
        wanted = [of_whole(whole, each, at) for each in indexes]
        # A loss that is another one on each rank; in one process their sum.
        weights = [cells(tuple(each.shape), torch.float64, 7 + r) for r, each in enumerate(wanted)]
        losses = [(w * each.pow(3)).sum() for w, each in zip(weights, wanted, strict=True)]
        (first,) = torch.autograd.grad(torch.stack(losses).sum(), whole, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), whole, retain_graph=True)
        x = owned(whole.detach(), owners, at, rank).requires_grad_()
        y = rows.gather(x, dim)
        assert_same(y.detach(), wanted[rank].detach(), text)
        (grad,) = torch.autograd.grad((weights[rank] * y.pow(3)).sum(), x, create_graph=True)
        torch.testing.assert_close(grad, owned(first, owners, at, rank), rtol=1e-12, atol=1e-9)
        (again,) = torch.autograd.grad(grad.square().sum(), x)
        torch.testing.assert_close(again, owned(second, owners, at, rank), rtol=1e-12, atol=1e-6)

        table = rows.table(x, dim)
        assert table.size(dim) == rows.own + rows.received + (kind == "padding")
        assert_same(table.narrow(at, 0, rows.own).detach(), x.detach(), text)
        found = table.index_select(dim, rows.local.flatten())
        assert_same(found.reshape(y.shape).detach(), y.detach(), text)
        (of_table,) = torch.autograd.grad((weights[rank].reshape(found.shape) * found.pow(3)).sum(), x)
        torch.testing.assert_close(of_table, grad.detach(), rtol=1e-12, atol=1e-9)

        z = weights[rank].clone().requires_grad_()
        sums = rows.add(z, dim)
        (expected,) = torch.autograd.grad(wanted, whole, weights)
        torch.testing.assert_close(sums.detach(), owned(expected, owners, at, rank), rtol=1e-12, atol=1e-9)
        (back,) = torch.autograd.grad(sums, z, x.detach())
        assert_same(back, y.detach(), text)


def check_layouts(rank: int, world: int, group: Group) -> None:
    kinds = itertools.cycle(KINDS)
    for maker in MAKERS.values():
        for given in maker.examples(world):
            layout, owners = maker.make(group, *given), list(maker.owners(world, *given))
            check_index(layout, owners, next(kinds), rank, world)
    sizes = [0, *rule(17, max(world - 1, 1))][:world] if world > 1 else [17]
    uneven = SequenceLayout.from_local(sizes[rank], group)
    for kind in KINDS:
        check_index(uneven, in_runs(sizes), kind, rank, world)
    # A rank without rows passes them in any order of dims, too.
    whole = cells((17, 4, 3), torch.float32)
    x = owned(whole, in_runs(sizes), 0, rank).mT
    assert_same(uneven.rows(torch.tensor([16])).gather(x), whole[16:].mT)


@pytest.mark.one_transport
@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_layout_and_index_beside_one_process(ranks: Ranks, world: int) -> None:
    ranks(world, check_layouts)


def check_transport(rank: int, world: int, group: Group) -> None:
    layout, owners = SequenceLayout.even(19, group), in_runs(rule(19, world))
    for kind in KINDS:
        check_index(layout, owners, kind, rank, world)


@pytest.mark.parametrize("world", [3, 4])
def test_each_transport(ranks: Ranks, world: int) -> None:
    ranks(world, check_transport)


# ---- what travels ----


def check_bytes(rank: int, world: int, group: Group) -> None:
    total, near = 60, torch.arange(-4, 5)
    layout = SequenceLayout.even(total, group)
    own = layout.index()
    line = layout.rows((own[:, None] + near).clamp(0, total - 1))
    assert line.received == (4 if rank in (0, world - 1) else 8)
    repeated = layout.rows(torch.full((3, 50), (own[-1].item() + 1) % total))
    assert repeated.received == 1 and repeated.local.eq(repeated.own).all()
    assert layout.rows(own).sizes == ((0,) * world,) * world
    # Where ranks want nearly all, shards travel whole, owners in order behind this rank.
    most = layout.rows(torch.arange(3, total))
    assert most.received == total - most.own
    table = most.table(own)
    assert_same(table, torch.arange(total).roll(-int(own[0])))
    assert_same(table[most.local], torch.arange(3, total))


@pytest.mark.one_transport
def test_each_row_travels_once(ranks: Ranks) -> None:
    ranks(3, check_bytes)


# ---- errors ----


def check_errors(rank: int, world: int, group: Group) -> None:
    layout, wrong = SequenceLayout.even(20, group), rank == world - 1
    fine = torch.tensor([0, 19])
    cases: list[tuple[Any, type[Exception], str]] = [
        (torch.tensor([3, 20]), ValueError, "values from 3 to 20; expected rows from 0 to 19"),
        (torch.tensor([-1, 2]), ValueError, r"values from -1 to 2; .*padding=True lets it have -1"),
        (torch.tensor([1.0]), TypeError, "index is a tensor of torch.float32; expected torch.int64"),
        (torch.tensor(1), ValueError, "index is a 0-dim tensor"),
        ([1, 2], TypeError, "index is a list; expected a tensor"),
        (fine.to("meta"), ValueError, "a tensor on meta without values"),
    ]
    for index, kind, text in cases:
        with pytest.raises(kind if wrong else spar.MismatchError, match=f"on rank {world - 1} .*{text}"):
            layout.rows(index if wrong else fine)
    with pytest.raises(
        ValueError if wrong else spar.MismatchError, match=r"from -2 to 1; expected .* from -1"
    ):
        layout.rows(torch.tensor([-2 if wrong else -1, 1]), padding=True)
    rows, own = layout.rows(fine), len(layout.index())
    x = torch.ones(own, 2)
    calls: list[tuple[Any, Any, type[Exception], str]] = [
        (rows.gather, (x[:1],), ValueError, f"input_ is of size 1 in dim 0; expected {own}, rank"),
        (rows.table, (x, 2), ValueError, "dim is 2; expected -2 to 1"),
        (rows.table, (x.to_sparse(),), TypeError, "expected a strided tensor"),
        (rows.add, (x[:1],), ValueError, r"of shape \[1, 2\]; expected the index's \[2\] from dim 0 on"),
        (rows.add, (x[:2].to(torch.float8_e5m2),), TypeError, "expected a dtype that torch adds"),
        (rows.gather, ([x, x.double()],), TypeError, r"input_\[1\] is of torch.float64"),
        (rows.gather, ([x, x[1:]],), ValueError, r"input_\[1\] is of size"),
    ]
    for call, given, kind, text in calls:
        with pytest.raises(kind if wrong else spar.MismatchError, match=text):
            call(*given) if wrong else call(x[:2] if call == rows.add else x)
    first = torch.tensor([sum(layout.sizes[:r]) for r in range(world)])
    mine = [layout.rows(index) for index in (first, first + 1)][rank > 0]  # of equal sizes
    with pytest.raises(spar.MismatchError, match=r"calls differ .* in plan of call"):
        mine.gather(layout.shard(torch.zeros(layout.total), 0))
    with pytest.raises(spar.MismatchError, match="calls differ"):
        layout.rows(torch.arange(4 if wrong else 2)).gather(x) if wrong else rows.gather(x)
    assert_same(rows.gather(layout.index()), fine)


@pytest.mark.parametrize("world", [2])
def test_wrong_arguments_of_one_rank_raise_on_all(ranks: Ranks, world: int) -> None:
    ranks(world, check_errors)


def check_failure_in_flight(rank: int, world: int, group: Group) -> None:
    """What fails on the group's thread before the exchange is an error of all ranks."""
    layout = SequenceLayout.even(20, group)
    rows, x = layout.rows(torch.arange(10) + 10 * (rank == 0)), torch.ones(10, 2)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(RowMaps, "sent", lambda *_: torch.empty(2**62))
        _, work = rows.gather(x, async_op=True)
        expected = (spar.MismatchError, "rank 1 failed: RuntimeError") if rank == 0 else (RuntimeError, None)
        with pytest.raises(expected[0], match=expected[1]):
            work.wait()
    assert_same(rows.gather(x), torch.ones(10, 2))


@pytest.mark.one_transport
def test_failure_in_flight_is_reported(ranks: Ranks) -> None:
    ranks(2, check_failure_in_flight)


# ---- derivatives, lists, calls in flight, compiled code ----


def lists(rows: spar.Rows, x: Tensor) -> list[Tensor]:
    """Return results of all operations."""
    both = rows.gather([x, x.sin()])
    return [*both, rows.table(x), *rows.add([y * 2 for y in both]), *rows.table([x.cos(), x[:, :1]])]


def waited(rows: spar.Rows, x: Tensor) -> list[Tensor]:
    """Return the same from calls in flight."""
    both, first = rows.gather([x, x.sin()], async_op=True)
    table, second = rows.table(x, async_op=True)
    second.wait()
    assert first.wait()
    sums, first = rows.add([y * 2 for y in both], async_op=True)
    tables, second = rows.table([x.cos(), x[:, :1]], async_op=True)
    first.wait()
    second.wait()
    return [*both, table, *sums, *tables]


def plans(layout: SequenceLayout, rank: int) -> list[spar.Rows]:
    """Return one by which rows travel, and one by which shards do."""
    total, generator = layout.total, torch.Generator().manual_seed(rank)
    return [layout.rows(torch.randint(total, (4, 2), generator=generator)), layout.rows(torch.arange(total))]


def check_use(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.zigzag(13, group)
    own = len(layout.index())
    x, tangent = cells((own, 3), torch.float64, rank).requires_grad_(), cells((own, 3), torch.float64, 9)
    for rows in plans(layout, rank):
        expected = lists(rows, x)
        loss = torch.stack([y.pow(3).sum() for y in expected]).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(grad, x, tangent)
        for _ in range(2):
            found = waited(rows, x)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            loss = torch.stack([y.pow(3).sum() for y in found]).sum()
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            torch.testing.assert_close(first, grad)
            torch.testing.assert_close(torch.autograd.grad(first, x, tangent)[0], second)
        with torch.no_grad(), torch.inference_mode():
            for run in (lists, waited):
                found = run(rows, x.detach().clone())
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        again = checkpoint(lambda x, rows=rows: lists(rows, x), x, use_reentrant=False)
        (first,) = torch.autograd.grad(torch.stack([y.pow(3).sum() for y in again]).sum(), x)
        torch.testing.assert_close(first, grad.detach())

        # Forward mode, and functorch's transforms.
        def loss_of(x: Tensor, rows: spar.Rows = rows) -> Tensor:
            return torch.stack([y.pow(3).sum() for y in lists(rows, x)]).sum()

        _, slope = torch.func.jvp(loss_of, (x.detach(),), (tangent,))
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(loss_of(forward_ad.make_dual(x.detach(), tangent)))
        torch.testing.assert_close(dual.tangent, slope)
        both = spar.all_gather(torch.stack([slope, (grad.detach() * tangent).sum()])[None], group).sum(0)
        torch.testing.assert_close(both[0], both[1])
        torch.testing.assert_close(torch.func.grad(loss_of)(x.detach()), grad.detach())

        for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float8_e5m2):
            plain = cells((13, 3), dtype)[layout.index()]
            assert_same(rows.table(plain)[rows.local], rows.gather(plain))
        conjugate = torch.randn(own, 3, dtype=torch.complex64).conj()
        assert_same(rows.gather(conjugate), rows.gather(conjugate.resolve_conj()))
        assert_same(rows.table(conjugate.imag), rows.table(conjugate.imag.resolve_neg()))
        meta = rows.gather(torch.empty(2, own, device="meta"), 1)
        assert meta.is_meta and meta.shape == (2, *rows.local.shape)
        many = rows.gather([x.detach() + i for i in range(20)])
        assert all(torch.equal(y, many[0] + i) for i, y in enumerate(many))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.one_transport
def test_derivatives_lists_and_calls_in_flight(ranks: Ranks, world: int) -> None:
    ranks(world, check_use)


def check_many_plans(rank: int, world: int, group: Group) -> None:
    """The next plan may get the memory, and so the id, of one that died."""
    for size in range(1, 30):
        layout = SequenceLayout.even(30 + size, group)
        x = layout.index().double()[:, None]
        index = torch.arange(size) + rank
        rows = layout.rows(index)
        assert_same(rows.gather(x)[:, 0], index.double())
        other = layout.rows(index.flip(0) + 1)
        for plan, expected in ((other, index.flip(0) + 1), (rows, index)):
            assert_same(plan.table(x)[plan.local, 0], expected.double())
        del rows, other, plan


@pytest.mark.one_transport
def test_plans_that_die_and_plans_in_turn(ranks: Ranks) -> None:
    ranks(2, check_many_plans)


def check_compiled(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.zigzag(13, group)
    x = cells((len(layout.index()), 3), torch.float64, rank).requires_grad_()
    for turn, (rows, backend) in enumerate(zip(plans(layout, rank), ("inductor", "aot_eager"), strict=True)):

        def eager(x: Tensor, rows: spar.Rows = rows) -> Tensor:
            return rows.add(rows.gather(x.sin()) * rows.table(x)[rows.local])

        torch._dynamo.reset()
        expected = eager(x)
        (grad,) = torch.autograd.grad(expected, x, expected)
        # Ranks may mix compiled and eager code: each compiles one plan.
        function = torch.compile(eager, fullgraph=True, backend=backend) if turn == rank else eager
        found = function(x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, x, expected), (grad,))
    with pytest.raises(Exception, match="cannot be made in compiled code"):
        torch.compile(layout.rows, backend="eager", fullgraph=True)(torch.tensor([1]))


@pytest.mark.compiler
@pytest.mark.one_transport
def test_compiled_equals_eager(ranks: Ranks) -> None:
    ranks(2, check_compiled, timeout=200)
