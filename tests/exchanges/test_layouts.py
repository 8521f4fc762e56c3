# SPDX-License-Identifier: Apache-2.0
"""Zigzag and packed splits and gathers on real ranks, to the bit: eager, compiled, and of many sequences."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS, WORLDS, Ranks
from helpers.reference import assert_same, cells, in_runs, joined, owned, packed, rule, zigzag
from helpers.tables import KINDS, draw_layout

import spar
from spar._exchange import layouts

pytestmark = [pytest.mark.long, pytest.mark.quick_ranks]

Group = dist.ProcessGroup
DTYPES = (torch.bfloat16, torch.float32, torch.complex64, torch.int64, torch.uint8)

# extents around the cut dim, the dim, chunks of each rank
ZIGZAGS: list[tuple[tuple[int, ...], int, int]] = [
    ((), 0, 3),
    ((5,), 0, 2),
    ((3,), -1, 1),
    ((2, 3), 1, 4),
    ((2,), 1, 0),
]
# extents, the dim, the lengths of the sequences
PACKS: list[tuple[tuple[int, ...], int, list[int]]] = [
    ((), 0, [13]),
    ((3,), 0, [5, 0, 1, 22, 7]),
    ((2, 3), -2, [4, 9]),
    ((2,), 1, [1, 1, 1]),
    ((2,), 0, [0, 0]),
    ((2,), 0, []),
    ((0, 2), 2, [3, 5]),
]


def inserted(extents: tuple[int, ...], dim: int, total: int) -> tuple[int, ...]:
    at = dim % (len(extents) + 1)
    return (*extents[:at], total, *extents[at:])


def wholes(world: int) -> list[tuple[tuple[int, ...], int, list[int], Any]]:
    """Return (shape, dim, owner of each index, lengths or None for zigzag)."""
    found: list[tuple[tuple[int, ...], int, list[int], Any]] = []
    for extents, dim, chunk in ZIGZAGS:
        total = 2 * world * chunk
        found.append((inserted(extents, dim, total), dim, zigzag(total, world), None))
    for extents, dim, lengths in PACKS:
        found.append((inserted(extents, dim, sum(lengths)), dim, packed(lengths, world), lengths))
    return found


def split(x: torch.Tensor, group: Group | None, dim: int, lengths: Any) -> torch.Tensor:
    if lengths is None:
        return spar.load_balanced_split_forward_gather_backward(x, group, dim)
    return spar.packed_data_split_forward_gather_backward(x, group, lengths, dim)


def gather(x: torch.Tensor, group: Group | None, dim: int, lengths: Any, world: int) -> torch.Tensor:
    if lengths is None:
        return spar.load_balanced_gather_forward_split_backward(x, group, dim)
    sizes = spar.cal_split_sizes_multi(lengths, world)
    return spar.packed_data_gather_forward_split_backward(x, sizes, group, dim)


def check_forward(rank: int, world: int, group: Group) -> None:
    for shape, dim, owners, lengths in wholes(world):
        for dtype in DTYPES:
            whole = cells(shape, dtype)
            for x in (whole, whole.mT.contiguous().mT if whole.dim() > 1 else whole):
                own = split(x.detach(), group, dim, lengths)
                assert_same(own, owned(whole, owners, dim, rank), (shape, dim, lengths))
                assert world == 1 or own.is_contiguous()
                again = gather(own, group, dim, lengths, world)
                assert_same(again, whole, (shape, dim, lengths))
                assert world == 1 or again.is_contiguous()
        if world == 1:
            assert split(whole, group, dim, lengths) is whole
            assert gather(whole, group, dim, lengths, world) is whole


@pytest.mark.parametrize("world", WORLDS)
def test_forward(ranks: Ranks, world: int) -> None:
    ranks(world, check_forward)


def check_gradients(rank: int, world: int, group: Group) -> None:
    for shape, dim, owners, lengths in wholes(world):
        for dtype in DTYPES[:3]:
            x = cells(shape, dtype).requires_grad_()
            part = split(x, group, dim, lengths)
            grads = [owned(cells(shape, dtype, salt=p), owners, dim, p) for p in range(world)]
            part.backward(grads[rank])
            assert x.grad is not None
            assert_same(x.grad, joined(grads, owners, dim) / world if world > 1 else grads[0])
            own = owned(x.detach(), owners, dim, rank).contiguous().requires_grad_()
            grad = cells(shape, dtype, salt=7)
            gather(own, group, dim, lengths, world).backward(grad)
            assert own.grad is not None
            expected = owned(grad, owners, dim, rank)
            assert_same(own.grad, expected * world if world > 1 else expected)


@pytest.mark.parametrize("world", WORLDS)
def test_gradients(ranks: Ranks, world: int) -> None:
    ranks(world, check_gradients)


def check_adjoint(rank: int, world: int, group: Group) -> None:
    """Compare <v, J w>, summed over ranks, for a gather's derivative and its derivative, in ints."""
    for shape, dim, owners, lengths in wholes(world):
        w = owned(cells(shape, torch.float64), owners, dim, rank) * 64
        v = cells(shape, torch.float64, salt=3) * 64  # the same on all ranks
        x = w.clone().requires_grad_()
        v2 = v.clone().requires_grad_()
        (back,) = torch.autograd.grad(gather(x, group, dim, lengths, world), x, v2, create_graph=True)
        sums = torch.stack(
            [(back * w).sum() / world, (gather(w, group, dim, lengths, world) * v).sum() / world]
        )
        dist.all_reduce(sums, group=group)
        assert torch.equal(sums[0], sums[1]), sums  # each of `world` ranks holds the whole second tensor
        (twice,) = torch.autograd.grad(back, v2, w)
        assert_same(twice, gather(w, group, dim, lengths, world))


@pytest.mark.parametrize("world", [2, 3])
def test_backward_is_the_adjoint(ranks: Ranks, world: int) -> None:
    ranks(world, check_adjoint)


def check_table(rank: int, world: int, group: Group) -> None:
    """Any size of each sequence on each rank, as a tensor or a nested list."""
    table = [[(5 * p + 3 * s) % 4 for s in range(6)] for p in range(world)]
    owners = [rank for s in range(6) for rank in in_runs([row[s] for row in table])]
    whole = cells((len(owners), 3), torch.float32)
    own = owned(whole, owners, 0, rank).requires_grad_()
    for sizes in (table, torch.tensor(table), torch.tensor(table, dtype=torch.int32)):
        y = spar.packed_data_gather_forward_split_backward(own, sizes, group)
        assert_same(y.detach(), whole)
    grad = cells((len(owners), 3), torch.float32, salt=5)
    y.backward(grad)
    assert own.grad is not None
    assert_same(own.grad, owned(grad, owners, 0, rank) * world)


@pytest.mark.parametrize("world", [2, 3, 7])
def test_arbitrary_size_tables(ranks: Ranks, world: int) -> None:
    ranks(world, check_table)


def check_many(rank: int, world: int, group: Group, count: int) -> list[float]:
    lengths = [(7 * s) % 23 for s in range(count)]
    whole = cells((sum(lengths), 8), torch.float32).requires_grad_()
    table = spar.cal_split_sizes_multi(lengths, world)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        own = spar.packed_data_split_forward_gather_backward(whole, group, lengths)
        y = spar.packed_data_gather_forward_split_backward(own, table, group)
        y.backward(torch.ones_like(y))
        times.append(time.perf_counter() - begin)
    assert_same(y.detach(), whole.detach())
    return times


def test_many_short_sequences(ranks: Ranks) -> None:
    """10,000 sequences take two exchanges and two copies, whatever their number."""
    times = [min(of_rank[1:]) for of_rank in ranks(2, check_many, 10_000)]
    print(f"{max(times) * 1e3:.1f} ms")
    assert max(times) < 0.5, "forward and backward; a cost per sequence in Python would be seconds"


def check_errors(rank: int, world: int, group: Group) -> None:
    bad: list[tuple[Any, type[Exception], str]] = [
        (lambda: split(torch.zeros(6), group, 0, None), ValueError, "6 to split; expected a multiple of 4"),
        (lambda: gather(torch.zeros(3), group, 0, None, 2), ValueError, "a total of 6"),
        (lambda: split(torch.zeros(6), group, 1, None), ValueError, "dim is 1; expected -1 to 0"),
        (
            lambda: split(torch.zeros(6), group, 0, [1, 2]),
            ValueError,
            "sums to 3; expected lengths that sum",
        ),
        (
            lambda: split(torch.zeros(6), group, 0, [8, -2]),
            ValueError,
            "contains -2; expected lengths of at least 0",
        ),
        (
            lambda: split(torch.zeros(6), group, 0, [1.5, 4.5]),
            TypeError,
            "a list, tuple or 1-D",
        ),
        (lambda: split(torch.zeros(6), group, 0, 6), TypeError, "a list, tuple or 1-D"),
        (lambda: split(torch.zeros(6), group, 0, torch.zeros(2)), TypeError, "a 1-D int tensor"),
        (lambda: gather(torch.zeros(6), group, 0, [3, 4], 2), ValueError, f"row {rank} sums to {4 - rank}"),
        (lambda: gather(torch.zeros(6), group, 0, [3, 4], 3), ValueError, "a row for each of 2 ranks"),
        (
            lambda: spar.packed_data_gather_forward_split_backward(torch.zeros(2), "ab", group),
            TypeError,
            "table",
        ),
        (
            lambda: spar.packed_data_gather_forward_split_backward(torch.zeros(2), [[3, -1]] * 2, group),
            ValueError,
            "contains -1",
        ),
        (
            lambda: spar.packed_data_split_forward_gather_backward([1], group, [1]),  # type: ignore[arg-type]
            TypeError,
            "hidden_states is a list",
        ),
    ]
    for call, kind, text in bad:
        with pytest.raises(kind) as caught:
            call()
        assert text in str(caught.value), caught.value
    assert_same(gather(torch.ones(1), group, 0, [2], 2), torch.ones(2))


def test_bad_arguments_raise(pool: Ranks) -> None:
    pool.transport = "torch"
    pool(2, check_errors)


def check_disagreement(rank: int, world: int, group: Group) -> None:
    """Different sequences with equal totals: the message shows the difference."""
    lengths = [4, 8] if rank == 0 else [8, 4]
    with pytest.raises(spar.MismatchError) as caught:
        gather(torch.zeros(6), group, 0, lengths, 2)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 2 and lines[1].count("(packed [8, 4])") == 1, caught.value
    assert_same(gather(torch.ones(1), group, 0, [2], 2), torch.ones(2))


def test_different_sequence_lengths_raise_mismatch(ranks: Ranks) -> None:
    ranks(2, check_disagreement)


def check_compiled(rank: int, world: int, group: Group) -> None:
    """One rank compiles; its calls match the other's eager ones."""

    def step(x: torch.Tensor, lengths: list[int] | None) -> torch.Tensor:
        part = split(x * 2, group, 0, lengths)
        if lengths is None:
            return spar.load_balanced_gather_forward_split_backward(part.sin(), group, 0)
        table = [[len(range(p, n, world)) for n in lengths] for p in range(world)]
        return spar.packed_data_gather_forward_split_backward(part.sin(), table, group, 0)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager") if rank == 0 else step
    for total in (4 * world, 8 * world, 10 * world):
        for lengths in (None, [3, 0, total - 3]):
            results = []
            for function in (step, compiled):
                x = (torch.arange(total * 3.0).reshape(total, 3) / 8).requires_grad_()
                y = function(x, lengths)
                (y * torch.arange(total)[:, None]).sum().backward()
                results.append((y.detach(), x.grad))
            torch.testing.assert_close(results[0], results[1])


@pytest.mark.compiler
def test_compiled_equals_eager(pool: Ranks) -> None:
    pool.transport = TRANSPORTS[0]  # a graph is the same for each
    pool(2, check_compiled)


def test_reorder_output() -> None:
    for world in (1, 2, 3, 4, 7):
        for shape, dim in (
            ((2 * world * 3,), 0),
            ((2, 2 * world), 1),
            ((2, 4 * world, 3), -2),
            ((2 * world, 0), 0),
        ):
            natural = cells(shape, torch.float32)
            owners = zigzag(shape[dim], world)
            lying = torch.cat([owned(natural, owners, dim, rank) for rank in range(world)], dim)
            for rank in range(world):
                assert_same(spar.reorder_output(lying, rank, world, None, dim), natural)
    x = torch.zeros(8, requires_grad=True)
    spar.reorder_output(x, 0, 2, None).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and x.grad.sum() == 8
    for arguments, text in (
        ((torch.zeros(6), 0, 2, None), "6 in dim 0; expected a multiple of 4"),
        ((torch.zeros(6), 0, 0, None), "cp_size is 0"),
        ((torch.zeros(6), 0, 1, None, 1), "dim is 1"),
    ):
        with pytest.raises(ValueError, match=text):
            spar.reorder_output(*arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_in_python_match_the_owners(kind: str) -> None:
    """What traces with symbolic sizes: extents, runs and selections."""
    draw = random.Random(kind).randint
    for _ in range(200):
        world, total = draw(1, 8), draw(0, 40)
        layout, owners = draw_layout(draw, kind, 0, total, world)
        assert layouts.total_of(layout) == total
        for rank in range(world):
            own = [index for index, owner in enumerate(owners) if owner == rank]
            assert layouts.extent(layout, world, rank) == len(own), layout
            runs = layouts.pieces(layout, world, rank)
            assert [index for start, size, _ in runs for index in range(start, start + size)] == own, layout
            assert layouts.shards(layout, world)[rank] == runs
            part = layouts.select(torch.arange(total), layout, world, rank)
            part = layouts.listed_index(layout, world, rank) if part is None else part
            assert part.tolist() == own, layout


def test_packed_split_by_index_select() -> None:
    """Devices whose memory C cannot access use index_select."""
    from spar._exchange.layouts import listed_index, packed as packed_layout

    for ring in (1, 2, 3):
        for inner in (1, 2, 3):
            for lengths in ([7, 0, 2, 11], [], [0], [5]):
                owners = packed(lengths, ring, inner)
                table = [part for length in lengths for part in [rule(length, ring)]]
                flat = [sizes[rank] for rank in range(ring) for sizes in table]
                for rank in range(ring * inner):
                    expected = [i for i, owner in enumerate(owners) if owner == rank]
                    for numbers in (lengths, flat):
                        layout = packed_layout(0, len(lengths), numbers, inner)
                        assert listed_index(layout, ring * inner, rank).tolist() == expected
