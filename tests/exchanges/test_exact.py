# SPDX-License-Identifier: Apache-2.0
"""all_to_all by any sizes and of lists, all_gather, reduce_scatter: against references, with derivatives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.adjoints import check_derivative, inner, same_derivative
from helpers.reference import assert_same, cells, in_runs, joined, owned, part, rule, same_bits, zigzag
from helpers.traffic import exchanges
from helpers.wrapped import Wrapped
from test_ops import sizes_of, strided

import spar
from spar import SequenceLayout

pytestmark = [pytest.mark.long, pytest.mark.quick_ranks]

Group = dist.ProcessGroup
WORLDS = (1, 2, 3, 4)
# (global shape, scatter, gather, sizes of the scattered dim, of the gathered dim); None: the size rule
TRANSPOSES: list[tuple[tuple[int, ...], int, int, str | None, str | None]] = [
    ((2, 13, 5, 3), 2, 1, "ramp", "last"),
    ((2, 13, 5, 3), 2, 1, None, "holes"),
    ((2, 13, 5, 3), -2, -3, "holes", None),
    ((13, 6), 0, 1, "last", "last"),
    ((13, 6), 1, 0, "holes", "ramp"),
    ((3, 2, 11), 2, 0, "ramp", None),
    ((0, 6), 1, 0, "ramp", "last"),
    ((4, 0, 3), 0, 1, "holes", "holes"),
]
SIZES = ("rule", "ramp", "last", "holes")
HOWS = ("contiguous", "transposed", "sliced")  # inputs lie: over the numbers of ranks, each case has all


def sizes(kind: str | None, total: int, world: int) -> list[int]:
    """Return sizes that sum to the total; "holes": 0 on each second rank."""
    if kind == "holes":
        held = iter(rule(total, (world + 1) // 2))
        return [next(held) if rank % 2 == 0 else 0 for rank in range(world)]
    return sizes_of(kind or "rule", total, world)


# ---- all_to_all by sizes ----


def check_names_of_the_group(rank: int, world: int, group: Group) -> None:
    x = cells((2, world, 3), torch.float32, salt=rank)
    wanted = spar.all_to_all(x, group, 1, 0)
    assert_same(spar.all_to_all(x, scatter_dim=1, gather_dim=0, group=group), wanted)
    if rank == 0:
        with pytest.raises(TypeError, match="process_group and group are passed; expected one of them"):
            spar.all_to_all(x, group, 1, 0, group=group)
    else:
        with pytest.raises(spar.MismatchError, match="rank 0 failed: TypeError"):
            spar.all_to_all(x, group, 1, 0)
    assert_same(spar.all_to_all(x, group, 1, 0), wanted)


def test_all_to_all_accepts_group_by_the_name_of_other_exchanges(ranks: Ranks) -> None:
    ranks(2, check_names_of_the_group)


def check_sizes(rank: int, world: int, group: Group) -> None:
    forms: list[Callable[[list[int]], Any]] = [list, tuple, torch.tensor]
    for i, ((shape, scatter, gather, to, of), form) in enumerate(zip(TRANSPOSES, itertools.cycle(forms))):
        how = HOWS[(i + i // 3 + world) % 3]  # each with each form, and on other ranks
        whole, upstream = cells(shape, torch.float32), cells(shape, torch.float32, salt=1)
        there, here = sizes(to, shape[scatter], world), sizes(of, shape[gather], world)
        x = strided(part(whole, here, gather, rank), how).detach().requires_grad_()
        y = spar.all_to_all(
            x,
            group,
            scatter,
            gather,
            scatter_sizes=None if to is None else form(there),
            gather_sizes=form(here),
        )
        assert_same(y.detach(), part(whole, there, scatter, rank), (shape, to, of))
        y.backward(part(upstream, there, scatter, rank))
        assert x.grad is not None
        assert_same(x.grad, part(upstream, here, gather, rank), (shape, to, of))


@pytest.mark.parametrize("world", [*WORLDS, 7])
def test_all_to_all_by_sizes(ranks: Ranks, world: int) -> None:
    ranks(world, check_sizes)


# ---- lists ----

HEADS = ((8, 4), (2, 4), (3, 6))  # of Q, K and V: how many, and their dim
SEQUENCE = 13


def shards(rank: int, world: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return this rank's Q, K and V: heads of unequal numbers and dims."""
    here = sizes("ramp", SEQUENCE, world)
    whole = [cells((2, SEQUENCE, *head), dtype, salt) for salt, head in enumerate(HEADS)]
    return [part(x, here, 1, rank).clone() for x in whole]


def check_list(rank: int, world: int, group: Group) -> None:
    """A list is one exchange, and equals single calls to the bit, also in gradients of any of its tensors."""
    here = sizes("ramp", SEQUENCE, world)
    to = [None, sizes("last", 2, world), sizes("holes", 3, world)]
    for requires in ((True, True, True), (False, True, False), (False, False, False)):
        single, listed = shards(rank, world), shards(rank, world)
        for x, wants in zip(single + listed, requires * 2, strict=True):
            x.requires_grad_(wants)
        expected = [
            spar.all_to_all(x, group, scatter_sizes=own, gather_sizes=here)
            for x, own in zip(single, to, strict=True)
        ]
        before = exchanges()
        found = spar.all_to_all(listed, group, scatter_sizes=to, gather_sizes=[here] * 3)
        assert exchanges() == before + (world > 1)
        assert isinstance(found, list)
        for a, b in zip(found, expected, strict=True):
            assert_same(a.detach(), b.detach())
        if any(requires):
            before = exchanges()
            torch.stack([(y * y).sum() for y in found]).sum().backward()  # type: ignore[no-untyped-call]
            assert exchanges() == before + (world > 1)
            torch.stack([(y * y).sum() for y in expected if y.requires_grad]).sum().backward()  # type: ignore
        for a, b, wants in zip(listed, single, requires, strict=True):
            assert (a.grad is None) == (not wants)
            if wants:
                assert a.grad is not None and b.grad is not None
                assert_same(a.grad, b.grad)


def check_list_forms(rank: int, world: int, group: Group) -> None:
    whole = [cells((6, 12), torch.int32), cells((4, 12), torch.int32, 1)]
    own = [part(x, rule(12, world), 1, rank) for x in whole]
    for given in (own, tuple(own)):
        found = spar.all_to_all(given, group, 0, 1, 12)
        assert isinstance(found, list)
        for y, x in zip(found, whole, strict=True):
            assert_same(y, part(x, rule(x.size(0), world), 0, rank))
    (alone,) = spar.all_to_all(own[:1], group, 0, 1, 12)
    assert_same(alone, part(whole[0], rule(6, world), 0, rank))
    many = spar.all_to_all([x + i for i, x in enumerate(own[:1] * 16)], group, 0, 1, 12)
    for i, y in enumerate(many):
        assert_same(y, alone + i)
    lazy = [own[0].to(torch.complex64), (own[1] * 1j).conj()]
    plain = spar.all_to_all([x.resolve_conj() for x in lazy], group, 0, 1, 12)
    for a, b in zip(spar.all_to_all(lazy, group, 0, 1, 12), plain, strict=True):
        assert_same(a, b)
    metas = spar.all_to_all([x.to("meta") for x in own], group, 0, 1, 12)
    assert [y.shape for y in metas] == [y.shape for y in found] and all(y.is_meta for y in metas)


@pytest.mark.parametrize("world", WORLDS)
def test_list_equals_single_calls(ranks: Ranks, world: int) -> None:
    ranks(world, check_list)
    ranks(world, check_list_forms)


def check_list_of_subclasses(rank: int, world: int, group: Group) -> None:
    """Any tensor of a list may be of a subclass that intercepts operators, not only the first."""
    x = cells((2, 6), torch.float32)
    expected = spar.all_to_all(x, group, 1, 0)
    for given in ([x, Wrapped(x)], [Wrapped(x), x]):
        for call in (spar.all_to_all, spar.all_gather):
            arguments = (1, 0) if call is spar.all_to_all else ()
            found = call(given, group, *arguments)
            wanted = expected if call is spar.all_to_all else spar.all_gather(x, group)
            for y in found:
                assert_same(y.held if isinstance(y, Wrapped) else y, wanted)


def test_list_of_subclasses(ranks: Ranks) -> None:
    ranks(2, check_list_of_subclasses)


# ---- derivatives ----


def check_second_derivatives(rank: int, world: int, group: Group) -> None:
    """First and second derivatives of sums over all ranks, against differences."""
    here, to = sizes("ramp", 5, world), sizes("last", 2, world)
    weight = 1 + torch.arange(5.0, dtype=torch.float64)[:, None] / (rank + 2)
    shape = (here[rank], 2)

    def exchanged(x: torch.Tensor) -> torch.Tensor:
        y, z = spar.all_to_all([x, x[:, :1]], group, 1, 0, scatter_sizes=[to, None], gather_sizes=[here] * 2)
        return (weight * y.sin()).sum() + (weight * z * z).sum()

    def gathered(x: torch.Tensor) -> torch.Tensor:
        y, z = spar.all_gather([x, x * x], group, 0, [here, here])
        return (weight * y.sin()).sum() + (weight * z * z).sum()

    def summed(x: torch.Tensor) -> torch.Tensor:
        y, z = spar.reduce_scatter([x * weight, x.T.sin()], group, -1, [to, sizes("holes", 5, world)])
        return y.sin().sum() + (rank + 1) * (z * z).sum()

    for name, function, extents in (
        ("all_to_all", exchanged, shape),
        ("all_gather", gathered, shape),
        ("reduce_scatter", summed, (5, 2)),
    ):
        x = torch.linspace(-1, 1, extents[0] * extents[1], dtype=torch.float64).reshape(extents) + rank / 8
        check_derivative(name, function, x, group)
        check_derivative(f"{name} twice", same_derivative(function), x, group)


@pytest.mark.one_transport
@pytest.mark.parametrize("world", [1, 2, 3])
def test_first_and_second_derivatives(ranks: Ranks, world: int) -> None:
    ranks(world, check_second_derivatives)


# ---- all_gather and reduce_scatter ----

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
INTS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_transpose(rank: int, world: int, group: Group) -> None:
    """Both against a reference, and <A x, y> = <x, A^T y> over all ranks, exactly."""
    for i, (kind, dim) in enumerate(itertools.product(SIZES, (0, 1, -1))):
        shape, how = (3, 11, 2), HOWS[(i + i // 3 + world) % 3]
        by_rank = sizes(kind, shape[dim], world)
        given = None if len(set(by_rank)) == 1 else by_rank
        whole = cells(shape, torch.float64)
        x = strided(part(whole, by_rank, dim, rank), how).detach().requires_grad_()
        assert_same(spar.all_gather(x.detach(), group, dim, given), whole, (kind, dim))
        ys = [cells(shape, torch.float64, salt=1 + p) for p in range(world)]
        expected = part(torch.stack(ys).sum(0), by_rank, dim, rank)
        y = strided(ys[rank], how).requires_grad_()
        z = spar.reduce_scatter(y, group, dim, by_rank)
        assert_same(z.detach(), expected, (kind, dim))
        if kind == "rule":
            assert_same(spar.reduce_scatter(ys[rank], group, dim), expected)
        gathered = spar.all_gather(x, group, dim, by_rank)
        gathered.backward(ys[rank])
        z.backward(x.detach())
        assert x.grad is not None and y.grad is not None
        assert_same(x.grad, expected, "the gradient of a gather is a sum")
        assert_same(y.grad, whole, "the gradient of a sum is a gather")
        assert inner(gathered, y, group) == inner(x, z, group)


@pytest.mark.parametrize("world", [*WORLDS, 7])
def test_all_gather_and_reduce_scatter_are_transposes(ranks: Ranks, world: int) -> None:
    ranks(world, check_transpose)


def check_dtypes(rank: int, world: int, group: Group) -> None:
    by_rank = sizes("ramp", 9, world)
    for dtype in (*FLOATS, *INTS):
        summands = [cells((9, 2), dtype, salt=p) for p in range(world)]
        wide = torch.int64 if dtype in INTS else dtype
        total = torch.stack([x.to(wide) for x in summands]).sum(0)
        expected = (total > 0) if dtype == torch.bool else total.to(dtype)
        if dtype not in (torch.float16, torch.bfloat16):  # see check_rounding
            found = spar.reduce_scatter(summands[rank], group, 0, by_rank)
            assert_same(found, part(expected, by_rank, 0, rank), dtype)
        found = spar.all_gather(part(summands[0], by_rank, 0, rank), group, 0, by_rank)
        assert_same(found, summands[0], dtype)
    eighth = cells((9, 2), torch.uint8).view(torch.float8_e4m3fn)
    assert_same(spar.all_gather(part(eighth, by_rank, 0, rank), group, 0, by_rank), eighth)
    for dtype in (torch.float8_e4m3fn, torch.uint16):
        with pytest.raises(
            TypeError, match=f"input_ is a tensor of {dtype}; expected a dtype that torch adds"
        ):
            spar.reduce_scatter(torch.zeros(9, dtype=dtype), group)
    with pytest.raises(TypeError, match="float8_e4m3fn whose gradients are to be summed; expected a dtype"):
        spar.all_gather(eighth.clone().requires_grad_(), group)


def check_rounding(rank: int, world: int, group: Group) -> None:
    """Sums of 16-bit floats run in float32, in the order of the ranks; each run gives the same bits."""
    kinds = (
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.complex32, torch.complex64),
    )
    for dtype, wide in kinds:
        torch.manual_seed(5)
        scale = 10.0 ** torch.randint(-3, 4, (world, 400, 1))
        summands = (torch.randn(world, 400, 2) * scale).to(wide).to(dtype)
        expected, otherwise = summands[0].to(wide), summands[0]
        for x in summands[1:]:
            expected = expected + x.to(wide)
            otherwise = (otherwise.to(wide) + x.to(wide)).to(dtype)
        assert same_bits(otherwise.view(torch.int16), expected.to(dtype).view(torch.int16)) == (world < 3)
        for _ in range(2):
            found = spar.reduce_scatter(summands[rank], group)
            wanted = part(expected.to(dtype), rule(400, world), 0, rank)
            assert_same(found.view(torch.int16), wanted.view(torch.int16), dtype)
        torch.manual_seed(6)
        values = torch.randn(world, 300).double()
        expected = values[0]
        for x in values[1:]:
            expected = expected + x
        assert_same(spar.reduce_scatter(values[rank], group), part(expected, rule(300, world), 0, rank))


def check_long_parts(rank: int, world: int, group: Group) -> None:
    """Parts of 300 KB, which peers write with non-temporal stores: each in one run, and each in 100."""
    for shape, dim in (((world * 150_001,), 0), ((100, world * 1_501), 1)):
        summands = [cells(shape, torch.int16, salt=p) for p in range(world)]
        total = torch.stack(summands).sum(0, dtype=torch.int16)
        found = spar.reduce_scatter(summands[rank], group, dim)
        assert_same(found, part(total, rule(shape[dim], world), dim, rank), shape)


@pytest.mark.parametrize("world", WORLDS)
def test_dtypes_of_sums(ranks: Ranks, world: int) -> None:
    ranks(world, check_dtypes)
    ranks(world, check_rounding)
    ranks(world, check_long_parts)


def check_several(rank: int, world: int, group: Group) -> None:
    """Several tensors are one exchange; the gradient of all of them is one, too."""
    wholes = [cells((5, 4), torch.float32), cells((5,), torch.float32, 1)]
    by_rank = [sizes(kind, 5, world) for kind in ("ramp", "last")]
    own = [part(x, s, 0, rank).clone().requires_grad_() for x, s in zip(wholes, by_rank, strict=True)]
    before = exchanges()
    found = spar.all_gather(own, group, 0, by_rank)
    for y, x in zip(found, wholes, strict=True):
        assert_same(y.detach(), x)
    first, second = torch.autograd.grad(found[0].sum(), own, materialize_grads=True)
    assert exchanges() == before + 2 * (world > 1)
    assert_same(first, torch.full_like(own[0], world))
    assert_same(second, torch.zeros_like(own[1]), "an output without a gradient")
    sums = spar.reduce_scatter(tuple(wholes), group, 0, [None, by_rank[1]])
    for y, x, s in zip(sums, wholes, (rule(5, world), by_rank[1]), strict=True):
        assert_same(y, part(x * world, s, 0, rank))
    assert all(y.is_meta for y in spar.reduce_scatter([x.to("meta") for x in wholes], group))
    conj = (cells((6,), torch.complex64) * 1j).conj()
    summed = part(conj.resolve_conj() * world, rule(6, world), 0, rank)
    assert_same(spar.reduce_scatter(conj, group).resolve_conj(), summed)


@pytest.mark.parametrize("world", WORLDS)
def test_several_tensors(ranks: Ranks, world: int) -> None:
    ranks(world, check_several)


def check_advice(rank: int, world: int, group: Group) -> None:
    with pytest.raises(spar.MismatchError) as caught:
        spar.all_gather(torch.zeros(2, 4 - rank), group, 1)
    assert f"The ranks hold {[4, 3, 2][:world]} of dim 1: pass sizes={[4, 3, 2][:world]}" in str(caught.value)
    assert spar.all_gather(torch.zeros(4 - rank), group, 0, [4, 3, 2][:world]).shape == (7,)


def test_all_gather_names_the_sizes_to_pass(ranks: Ranks) -> None:
    ranks(2, check_advice)


def check_zigzag(rank: int, world: int, group: Group) -> None:
    """A layout moves between natural order and its own inside the exchange."""
    layout, owners = SequenceLayout.zigzag(37, group), zigzag(37, world)
    whole = cells((2, 37), torch.float64)
    own = owned(whole, owners, 1, rank)
    assert_same(spar.all_gather(own, dim=1, layout=layout), whole)
    assert_same(spar.reduce_scatter(whole, group, 1, layout=layout), own * world)
    (again,) = spar.all_gather([own], dim=-1, layout=layout)
    assert_same(again, joined([owned(whole, owners, 1, p) for p in range(world)], owners, 1))
    assert_same(again, spar.all_gather(own, dim=1, layout=layout))
    assert len(in_runs(layout.sizes)) == 37
    heads = own[..., None].expand(-1, -1, world)
    y = spar.all_to_all(heads, group, 2, 1, layout=layout)
    assert_same(y, whole[..., None])
    assert_same(
        spar.all_to_all(heads, group, 2, 1, layout=layout, out=torch.empty(y.shape, dtype=y.dtype)), y
    )
    z, work = spar.all_to_all(heads, group, 2, 1, layout=layout, async_op=True)
    assert work.wait()
    assert_same(z, y)


@pytest.mark.parametrize("world", WORLDS)
def test_layout_argument(ranks: Ranks, world: int) -> None:
    ranks(world, check_zigzag)
