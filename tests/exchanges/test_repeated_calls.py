# SPDX-License-Identifier: Apache-2.0
"""Calls that repeat: what a group and autograd remember of a call serves equal calls alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.reference import assert_same

import spar
from spar._group.queue import Queue
from spar._group.registry import group_of

Group = dist.ProcessGroup


def check_repeated(rank: int, world: int, group: Group) -> None:
    """What a group remembers of a call is used for an equal call alone."""
    x = torch.arange(6.0 * world).view(3, 2 * world) + 100 * rank
    whole = torch.cat([torch.arange(6.0 * world).view(3, 2 * world) + 100 * p for p in range(world)])
    wanted = whole.tensor_split(world, 1)[rank]
    arguments: list[tuple[Any, Any, Any]] = [(1, 0, None), (-1, 0, None), (1, -2, 3 * world)]
    for dims in arguments * 3:
        assert_same(spar.all_to_all(x, group, *dims), wanted)
    assert_same(spar.all_to_all(x.double(), group, 1, 0), wanted.double())
    assert_same(spar.all_to_all(x.t().contiguous().t(), group, 1, 0), wanted)
    assert_same(spar.all_to_all(x[:, :world], group, 1, 0), whole[:, rank : rank + 1])
    for dims, error in (
        ((True, 0, None), TypeError),  # equal to those above
        ((1, False, None), TypeError),
        ((1.0, 0, None), TypeError),
        ((1, 0, 3.0 * world), TypeError),
        ((1, 0, 3 * world + world), ValueError),
        ((0, 0, None), ValueError),
    ):
        with pytest.raises(error, match=r"all_to_all on rank"):
            spar.all_to_all(x, group, *dims)
        dist.barrier(group)
    assert spar.all_to_all(x.to("meta"), group, 1, 0).shape == wanted.shape
    learned = x.clone().requires_grad_()
    spar.all_to_all(learned, group, 1, 0).sum().backward()
    assert learned.grad is not None
    assert_same(learned.grad, torch.ones_like(x))
    for extra in range(300):  # more than it remembers
        assert spar.all_to_all(x, group, 1, 0, 3 * world).shape == wanted.shape
        y = x.new_ones(1, world * (extra + 1))
        assert spar.all_to_all(y, group, 1, 0).shape == (world, extra + 1)
    for rows in range(300):  # of one exchange
        assert spar.all_to_all(x.new_ones(1, world, rows), group, 1, 0).shape == (world, 1, rows)
    assert len(group_of(group).exchanges) < 300


def check_refused_repeat(rank: int, world: int, group: Group) -> None:
    """A tensor as large as that of the call before, which the checks refuse."""
    spar.reduce_scatter(torch.ones(world, 6), group)
    rows = torch.nested.nested_tensor([torch.ones(6)] * world)
    with pytest.raises(TypeError, match="input_ is a nested tensor"):
        spar.reduce_scatter(rows, group)


class _Forgetful(Queue):
    """While calls in flight are counted, another thread lets the group forget its exchanges."""

    def __init__(self, exchanges: dict[Any, Any]) -> None:
        super().__init__()
        self._exchanges = exchanges

    def count(self) -> int:
        self._exchanges.clear()
        return super().count()


def check_forgotten_exchange(rank: int, world: int, group: Group) -> None:
    """A call keeps the exchange that it repeats."""
    x, state = torch.arange(4.0 * world).view(2, 2 * world) + 100 * rank, group_of(group)
    wanted = spar.all_to_all(x, group, 1, 0)
    assert state.exchanges
    state.queue = _Forgetful(state.exchanges)
    found = spar.all_to_all(x, group, 1, 0)
    state.queue = None
    assert_same(found, wanted)
    assert not state.exchanges


@pytest.mark.parametrize("world", [1, 2])
def test_repeated_calls(ranks: Ranks, world: int) -> None:
    ranks(world, check_repeated)


def test_refused_repeat(ranks: Ranks) -> None:
    ranks(2, check_refused_repeat)


@pytest.mark.one_transport
def test_repeated_call_of_an_exchange_that_is_forgotten(ranks: Ranks) -> None:
    ranks(2, check_forgotten_exchange)


def check_repeated_lists(rank: int, world: int, group: Group) -> None:
    """Lists of tensors of equal and other shapes, between single ones and calls that autograd records."""
    x = torch.arange(12.0 * world).view(3, 2 * world, 2) + 100 * rank
    y = x[:, :world].contiguous()
    for dtype in (torch.float32, torch.int16) * 2:
        a, b = x.to(dtype), y.to(dtype)
        lists: list[list[torch.Tensor]] = [[a, a], [a, b], [b, a], [a, a, b], [a], [a.mT, a]]
        for tensors in lists:
            for dims in ((1, 0), (1, 2), (-2, 0)):
                separate = [spar.all_to_all(each.clone(), group, *dims) for each in tensors]
                for together in (tensors, tuple(tensors)):
                    found = spar.all_to_all(together, group, *dims)
                    assert type(found) is list
                    for one, other in zip(found, separate, strict=True):
                        assert_same(one, other)
    with pytest.raises(ValueError, match="empty list"):
        spar.all_to_all([], group, 1, 0)
    dist.barrier(group)
    with pytest.raises(TypeError, match=r"input_\[1\] is of torch.float64"):
        spar.all_to_all([x, x.double()], group, 1, 0)
    dist.barrier(group)
    with pytest.raises(TypeError, match=r"input_\[1\] is a int"):
        spar.all_to_all([x, 3], group, 1, 0)  # type: ignore[list-item]
    dist.barrier(group)
    learned = x.clone().requires_grad_()
    found = spar.all_to_all([x, learned], group, 1, 0)  # one of the two is recorded
    found[1].sum().backward()
    assert learned.grad is not None
    assert_same(learned.grad, torch.ones_like(x))


@pytest.mark.parametrize("world", [1, 2])
def test_repeated_lists(ranks: Ranks, world: int) -> None:
    ranks(world, check_repeated_lists)


def check_repeated_gradients(rank: int, world: int, group: Group) -> None:
    """Calls that autograd records, between those that it does not, or that a tracer must see."""
    x = (torch.arange(12.0 * world).view(3, 2 * world, 2) + 100 * rank).requires_grad_()
    weight = torch.arange(12.0 * world).view(3 * world, 2, 2) + rank
    own = torch.full((3, 2 * world, 2), sum(range(world + 1)))
    ups = torch.full((3, 2 * world, 2), float(world))
    shares = torch.cat([torch.full((3, 2, 2), p + 1.0) for p in range(world)], 1)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return spar.gather_forward_split_backward(x, group, 0)

    calls: list[tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, torch.Tensor]] = [
        # the operation, the gradient of its output, and that of its input
        (lambda x: spar.all_to_all(x, group, 1, 0), weight, spar.all_to_all(weight, group, 0, 1)),
        (lambda x: spar.all_to_all([x, 2 * x], group, 1, 0)[0], weight, spar.all_to_all(weight, group, 0, 1)),
        (lambda x: spar.all_gather(x, group), torch.full((3 * world, 2 * world, 2), rank + 1.0), own),
        (scaled, torch.ones(3 * world, 2 * world, 2), ups),
        (lambda x: spar.reduce_scatter(x, group, 1), torch.full((3, 2, 2), rank + 1.0), shares),
    ]
    for call, upper, gradient in calls:
        output = call(x.detach())
        for _ in range(3):
            with torch.no_grad():
                assert not call(x).requires_grad
            assert not call(x.detach()).requires_grad
            y = call(x)
            assert_same(y.detach(), output)
            assert_same(torch.autograd.grad(y, x, upper)[0], gradient.to(x.dtype))
            assert call(x.detach().double().requires_grad_()).dtype == torch.float64
            with torch.profiler.profile():
                assert_same(call(x).detach(), output)
            if call is scaled:  # the same call but for the dtype
                small = x.detach().to(torch.float8_e4m3fn).requires_grad_()
                with pytest.raises(TypeError, match="whose gradient is to be scaled"):
                    call(small)
                dist.barrier(group)
            twice = torch.autograd.grad((call(x) * upper).sum(), x, create_graph=True)[0]
            assert_same(twice.detach(), gradient.to(x.dtype))


def test_repeated_gradients(ranks: Ranks) -> None:
    ranks(2, check_repeated_gradients)


def check_repeated_gathers(rank: int, world: int, group: Group) -> None:
    x = torch.arange(6.0).view(2, 3) + 100 * rank
    parts = [torch.arange(6.0).view(2, 3) + 100 * p for p in range(world)]
    gather, scaled = spar.all_gather, spar.gather_forward_split_backward
    zigzag = spar.SequenceLayout.zigzag(4 * world, group)
    whole = torch.arange(4.0 * world)
    calls: list[Callable[[], Any]] = [
        lambda: assert_same(gather(x, group), torch.cat(parts)),
        lambda: assert_same(gather(x, group.group_name), torch.cat(parts)),
        lambda: assert_same(gather(x, group, -1), torch.cat(parts, 1)),
        lambda: assert_same(gather(x.bool(), group), torch.cat(parts).bool()),
        lambda: assert_same(gather(x.t(), group, 1), torch.cat(parts).t().contiguous()),
        lambda: assert_same(gather(x[:1], group), torch.cat([part[:1] for part in parts])),
        lambda: assert_same(gather(x, group, 0, [2] * world), torch.cat(parts)),
        lambda: assert_same(gather([x, x], group)[1], torch.cat(parts)),
        lambda: assert_same(scaled(x, group, 0), torch.cat(parts)),
        lambda: assert_same(scaled(x, group, 1, None, 0.5), torch.cat(parts, 1)),
        lambda: assert_same(scaled(x, group, 0, [2] * world, "up"), torch.cat(parts)),
        lambda: assert_same(gather(zigzag.shard(whole, 0), group), torch.cat(shards(whole, world))),
        lambda: assert_same(gather(zigzag.shard(whole, 0), group, layout=zigzag), whole),
    ]
    for _ in range(3):
        for call in calls:
            call()
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: gather(x, group, False), TypeError, "dim"),  # equal to those above
        (lambda: gather(x, group, 0.0), TypeError, "dim"),  # type: ignore[call-overload]
        (lambda: gather(x, group, 2), ValueError, "dim"),
        (lambda: gather(x, group, 0, [3] * world), ValueError, "sizes"),
        (lambda: gather(x, group, 0, [2] * world, layout=zigzag), ValueError, "expected one of them"),
        (lambda: scaled(x, group, False), TypeError, "dim"),
        (lambda: scaled(x, group, 0, None, True), TypeError, "grad_scale"),
        (lambda: scaled(x, group, 0, None, "twice"), ValueError, "grad_scale"),
    ]
    for each, error, text in wrong:
        with pytest.raises(error, match=text):
            each()
        dist.barrier(group)
    assert gather(x.to("meta"), group).shape == (2 * world, 3)
    learned = x.clone().requires_grad_()
    (gather(learned, group) * (rank + 1)).sum().backward()
    assert learned.grad is not None
    assert_same(learned.grad, torch.full_like(x, sum(range(world + 1))))


def shards(whole: torch.Tensor, world: int) -> list[torch.Tensor]:
    """Return each rank's two chunks of a sequence."""
    chunks = whole.chunk(2 * world)
    return [torch.cat((chunks[p], chunks[-1 - p])) for p in range(world)]


@pytest.mark.parametrize("world", [1, 2])
def test_repeated_gathers(ranks: Ranks, world: int) -> None:
    ranks(world, check_repeated_gathers)


def check_list_gradients(
    x: torch.Tensor, whole: torch.Tensor, layout: spar.SequenceLayout, world: int
) -> None:
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    gathered = spar.all_gather([a, b], None, layout=layout)
    (gathered[0] + 2 * gathered[1]).sum().backward()
    assert_same(a.grad, torch.full_like(x, world))
    assert_same(b.grad, torch.full_like(x, 2 * world))
    c = whole.clone().requires_grad_()
    summed = spar.reduce_scatter([c, 2 * c], None, layout=layout)
    summed[1].sum().backward()
    assert_same(c.grad, torch.full_like(whole, 2.0))
    d = x.clone().requires_grad_()
    heads = spar.all_to_all([d, x], None, 1, 0, layout=layout)
    heads[0].sum().backward()
    assert_same(d.grad, torch.ones_like(x))


def check_repeated_layouts(rank: int, world: int, group: Group) -> None:
    """Calls by sizes and layouts, equal but for one of them, or for what a value means."""
    total = 4 * world + 1
    whole = torch.arange(total * 6.0).view(total, 6)
    kinds = (spar.SequenceLayout.zigzag, spar.SequenceLayout.even)
    packed = spar.SequenceLayout.packed
    for _ in range(3):
        made = [kind(total, group) for kind in kinds]
        made += [packed([3, total - 3], group), packed([total - 2, 2], group)]
        for layout in [*made, packed([1] * total, group)]:
            x = whole[layout.index()]
            assert_same(spar.all_gather(x, group, layout=layout), whole)
            assert_same(layout.gather(x, 0, backward="sum"), whole)
            assert_same(spar.all_gather([x, x], None, layout=layout)[1], whole)
            assert_same(layout.gather([x, x.int()[:, :0].float()], 0)[0], whole)
            assert_same(spar.reduce_scatter(whole, None, layout=layout), x * world)
            assert_same(layout.reduce_scatter([whole, -whole], 0)[1], x * -world)
            heads = whole.tensor_split(world, 1)[rank]
            assert_same(spar.all_to_all(x, group, 1, 0, layout=layout), heads)
            both = spar.all_to_all([x, -x], group, 1, 0, layout=[layout, layout])
            assert_same(both[1], -heads)
            assert_same(spar.all_to_all(heads, None, 0, 1, gather_size=6, scatter_layout=layout), x)
            for grad_scale, factor in ((None, 1.0), ("up", world), (0.5, 0.5)):
                learned = x.clone().requires_grad_()
                layout.gather(learned, 0, grad_scale).sum().backward()
                assert_same(learned.grad, torch.full_like(x, factor))
            if world > 1:  # lists that autograd records
                check_list_gradients(x, whole, layout, world)
        sizes = list(made[1].sizes)
        x = whole[made[1].index()]
        first = [6] + [0] * (world - 1)
        for form in (list, tuple):
            given: Any = form(sizes)
            assert_same(spar.all_gather(x, group, 0, given), whole)
            assert_same(spar.all_gather([x, x], group, 0, [given, given])[1], whole)
            assert_same(spar.reduce_scatter(whole, group, 0, given), x * world)
            scattered = spar.all_to_all(x, group, 1, 0, scatter_sizes=first, gather_sizes=given)
            assert_same(scattered, whole if rank == 0 else whole[:, :0])
    foreign = kinds[1](total, dist.group.WORLD)
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: spar.all_gather([x], group, 0, sizes), ValueError, "sizes"),  # those of a tensor
        (lambda: spar.all_gather(x, group, 0, [float(size) for size in sizes]), ValueError, "sizes"),
        (lambda: spar.all_gather(x, group, 0, sizes, layout=made[1]), ValueError, "expected one of them"),
        (lambda: spar.all_gather(x, group, layout=foreign), ValueError, "of another group"),
        (lambda: spar.all_gather(x, group, layout=kinds[1](total + 2 * world, group)), ValueError, "of size"),
        (lambda: spar.all_to_all(x, group, 1, 0, layout=3), TypeError, "layout"),  # type: ignore[call-overload]
        (lambda: made[1].gather(x, 0, True), TypeError, "grad_scale"),
        (lambda: made[1].gather(x, False), TypeError, "dim"),
    ]
    for each, error, text in wrong:
        with pytest.raises(error, match=text):
            each()
        dist.barrier(group)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_repeated_layouts(ranks: Ranks, world: int) -> None:
    ranks(world, check_repeated_layouts)


def check_repeated_sums(rank: int, world: int, group: Group) -> None:
    x = torch.arange(4.0 * world).view(2 * world, 2)
    for _ in range(3):
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.complex64):
            wanted = x.chunk(world)[rank] * world
            assert_same(spar.reduce_scatter(x.to(dtype), group), wanted.to(dtype))
        assert_same(spar.reduce_scatter(x[:, ::2], group, 0), x[:, ::2].chunk(world)[rank] * world)
    with pytest.raises(TypeError, match="a dtype that torch adds"):  # its other arguments are those above
        spar.reduce_scatter(x.to(torch.float8_e4m3fn), group)
    dist.barrier(group)
    learned = x.clone().requires_grad_()
    spar.reduce_scatter(learned, group).sum().backward()
    assert learned.grad is not None
    assert_same(learned.grad, torch.ones_like(x))


def test_repeated_sums(ranks: Ranks) -> None:
    ranks(2, check_repeated_sums)


def check_repeated_calls(rank: int, world: int, group: Group) -> None:
    """Repeat calls that differ by grad_scale or the group alone, and one of layouts too long to be kept."""
    factors = [(None, 1.0), ("up", world), (3.0, 3.0), ("down", 1 / world), (0.0, 0.0), (-0.0, 0.0)]
    for _ in range(2):
        for grad_scale, factor in factors:
            x = torch.ones(2, 3, requires_grad=True)
            spar.gather_forward_split_backward(x, group, 0, grad_scale=grad_scale).sum().backward()
            assert_same(x.grad, torch.full_like(x, factor))
            assert x.grad is not None and not x.grad.signbit().any()
        dist.barrier(group)  # a peer may be in its last call
        spar.close(group)
    lengths = [world] * 300
    for _ in range(2):
        x = torch.ones(sum(lengths), requires_grad=True)
        spar.packed_data_split_forward_gather_backward(x, group, lengths).sum().backward()
        assert_same(x.grad, torch.full_like(x, 1 / world))


def test_gradients_of_repeated_calls(ranks: Ranks) -> None:
    ranks(2, check_repeated_calls)
