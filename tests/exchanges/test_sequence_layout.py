# SPDX-License-Identifier: Apache-2.0
"""SequenceLayout: each maker against lists of owners in plain Python, and what moves data by a layout."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.orders import ORDERS
from helpers.processes import finish, start
from helpers.reference import assert_same, cells, joined, owned, rule, zigzag
from helpers.tables import MAKERS, TOTALS
from helpers.traffic import exchanges

import spar
from spar import SequenceLayout, parallel_state
from spar.parallel_state import ParallelState, Topology, init_parallel_state

pytestmark = pytest.mark.quick_ranks

Group = dist.ProcessGroup
WORLDS = (1, 2, 3, 4)


def layouts(group: Group) -> list[tuple[SequenceLayout, list[int], list[int]]]:
    """Return layouts, the owner of each token, and the lengths between which positions restart."""
    world = group.size()
    return [
        (maker.make(group, *given), list(maker.owners(world, *given)), maker.documents(*given))
        for maker in MAKERS.values()
        for given in maker.examples(world)
    ]


def check_numbers(layout: SequenceLayout, owners: list[int], lengths: list[int], rank: int) -> None:
    index = [i for i, owner in enumerate(owners) if owner == rank]
    documents = [i for length in lengths for i in range(length)]
    assert layout.total == len(owners)
    assert layout.sizes == tuple(owners.count(p) for p in range(layout.group.size()))
    assert layout.index().dtype == layout.positions().dtype == torch.int64
    assert layout.index().tolist() == index
    assert layout.positions().tolist() == [documents[i] for i in index]
    assert layout.cu_seqlens().dtype == torch.int32
    assert layout.cu_seqlens().tolist() == [0, *accumulate(lengths)]


def check_moves(layout: SequenceLayout, owners: list[int], rank: int) -> None:
    """Shard, gather and their exact forms, forward and backward, in any dim."""
    world, total = layout.group.size(), len(owners)
    for shape, dim in (((total, 3), 0), ((2, total, 3), -2), ((3, total), 1)):
        whole = cells(shape, torch.float64).requires_grad_()
        uppers = [cells(shape, torch.float64, salt=p + 1) for p in range(world)]
        own = layout.shard(whole, dim, None)
        assert_same(own.detach(), owned(whole.detach(), owners, dim, rank), layout)
        own.backward(owned(uppers[rank], owners, dim, rank))
        assert whole.grad is not None
        grads = [owned(upper, owners, dim, p) for p, upper in enumerate(uppers)]
        assert_same(whole.grad, joined(grads, owners, dim), layout)
        x = own.detach().requires_grad_()
        for exact in (False, True):
            y = layout.gather(x, dim, backward="sum") if exact else layout.gather(x, dim, None)
            assert_same(y.detach(), whole.detach(), layout)
            x.grad = None
            y.backward(uppers[rank])
            upper = torch.stack(uppers).sum(0) if exact else uppers[rank]
            assert x.grad is not None
            assert_same(x.grad, owned(upper, owners, dim, rank), layout)
        summed = uppers[rank].requires_grad_()
        z = layout.reduce_scatter(summed, dim)
        assert_same(z.detach(), owned(torch.stack(uppers).sum(0).detach(), owners, dim, rank), layout)
        z.backward(x.detach())
        assert summed.grad is not None
        assert_same(summed.grad, whole.detach(), layout)


def check_makers(rank: int, world: int, group: Group) -> None:
    for layout, owners, lengths in layouts(group):
        check_numbers(layout, owners, lengths, rank)
        check_moves(layout, owners, rank)


@pytest.mark.one_transport
@pytest.mark.parametrize("world", WORLDS)
def test_makers(ranks: Ranks, world: int) -> None:
    ranks(world, check_makers)


def check_all_to_all(rank: int, world: int, group: Group) -> None:
    """Tokens land in natural order as heads are scattered, and come from it on the way back."""
    heads = rule(5, world)
    begin = sum(heads[:rank])
    for layout, owners, _ in layouts(group):
        whole = cells((2, len(owners), 5, 3), torch.float64)
        x = owned(whole, owners, 1, rank).requires_grad_()
        y = spar.all_to_all(x, None, 2, 1, layout=layout)
        assert_same(y.detach(), whole[:, :, begin : begin + heads[rank]], layout)
        z = spar.all_to_all(y, None, 1, 2, gather_size=5, scatter_layout=layout)
        assert_same(z.detach(), x.detach(), layout)
        upper = cells(z.shape, torch.float64, salt=rank)
        (grad,) = torch.autograd.grad(z, x, upper)
        assert_same(grad, upper, layout)
    other = SequenceLayout.packed([4, 3], group)
    x, y = (owned(cells((37, 4), torch.int32), zigzag(37, world), 0, rank), torch.ones(other.sizes[rank], 4))
    zigzag_layout = SequenceLayout.zigzag(37, group)
    one, two = spar.all_to_all([x, y.int()], group, 1, 0, layout=[zigzag_layout, other])
    share = slice(sum(rule(4, world)[:rank]), sum(rule(4, world)[: rank + 1]))
    assert_same(one, cells((37, 4), torch.int32)[:, share])
    assert two.shape == (7, share.stop - share.start)
    one, two = spar.all_to_all([x, x], group, 1, 0, layout=zigzag_layout)
    assert_same(two, one)


@pytest.mark.one_transport
@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all_by_layout(ranks: Ranks, world: int) -> None:
    ranks(world, check_all_to_all)


def check_lists_and_scales(rank: int, world: int, group: Group) -> None:
    layout, owners = SequenceLayout.zigzag(13, group), zigzag(13, world)
    wholes = [cells((13, 2), torch.float32), cells((13,), torch.float32, salt=1)]
    own = layout.shard(wholes, 0)
    before = exchanges()
    again = layout.gather(tuple(own), 0)
    assert exchanges() == before + (world > 1) and isinstance(own, list) and isinstance(again, list)
    for x, part, y in zip(wholes, own, again, strict=True):
        assert_same(part, owned(x, owners, 0, rank))
        assert_same(y, x)
    for grad_scale, factor in (("up", world), ("down", 1 / world), (None, 1), (0.25, 0.25)):
        x = wholes[0].clone().requires_grad_()
        layout.shard(x, 0, grad_scale).sum().backward()
        part = own[0].clone().requires_grad_()
        layout.gather(part, 0, grad_scale).sum().backward()
        assert x.grad is not None and part.grad is not None
        assert_same(x.grad, torch.full_like(x, factor), grad_scale)
        assert_same(part.grad, torch.full_like(part, factor), grad_scale)
    part = SequenceLayout.even(13, group).shard(wholes[0], 0)
    assert part.untyped_storage().data_ptr() == wholes[0].untyped_storage().data_ptr(), "a view"


@pytest.mark.parametrize("world", WORLDS)
def test_lists_and_gradient_scales(ranks: Ranks, world: int) -> None:
    ranks(world, check_lists_and_scales)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Causal attention of the queries at these places in the sequence."""
    hidden = places[:, None] < torch.arange(len(k))
    return (q @ k.T).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def check_keys_and_values(rank: int, world: int, group: Group) -> None:
    """Own queries, all keys and values: gradients of weights, summed over ranks, are those of one process."""
    torch.manual_seed(0)
    x, target = torch.randn(2, 11, 4, dtype=torch.float64)
    weights = torch.randn(3, 4, 4, dtype=torch.float64)
    reference = weights.clone().requires_grad_()
    (attend(*(x @ reference), torch.arange(11)) - target).square().sum().backward()
    layout, found = SequenceLayout.zigzag(11, group), []
    for gather in (layout.all_gather, partial(layout.gather, grad_scale=None)):
        leaf = weights.clone().requires_grad_()
        q, k, v = layout.shard(x, 0) @ leaf
        y = attend(q, *gather([k, v], 0), layout.index())
        (y - layout.shard(target, 0)).square().sum().backward()
        dist.all_reduce(leaf.grad, group=group)
        found.append(leaf.grad)
    torch.testing.assert_close(found[0], reference.grad)
    assert reference.grad is not None and found[1] is not None
    assert torch.allclose(found[1], reference.grad) == (world == 1), "a slice loses other queries' gradients"


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_of_gathered_keys_and_values(ranks: Ranks, world: int) -> None:
    ranks(world, check_keys_and_values)


# ---- the value ----


def check_value(rank: int, world: int, group: Group) -> None:
    other = dist.new_group(list(range(7)))
    if rank >= world:
        return
    made = [layout for layout, _, _ in layouts(group)]
    again = [layout for layout, _, _ in layouts(group)]
    assert made == again and len({*made, *again}) == len(set(made)) == len(made)
    assert [hash(layout) for layout in made] == [hash(layout) for layout in again]
    assert SequenceLayout.even(8, group) != SequenceLayout.even(8, other)
    assert SequenceLayout.even(8, group) != SequenceLayout.zigzag(8, group) != 8
    assert SequenceLayout.packed([1, 2], group) != SequenceLayout.joint(1, 2, group)
    for layout in made:
        for same in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout), copy.copy(layout)):
            assert same == layout and same.group is layout.group
    with pytest.raises(dataclasses.FrozenInstanceError):
        made[0].kind = "zigzag"  # type: ignore[misc]


def check_forms(rank: int, world: int, group: Group) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    three: Any = numpy.int16(3)
    lengths = [1, 2, 3]
    expected = SequenceLayout.packed(lengths, group)
    short = torch.tensor(lengths, dtype=torch.int16)
    for given in (tuple(lengths), torch.tensor(lengths), short, [1, 2, three]):
        assert SequenceLayout.packed(given, group) == expected
    assert SequenceLayout.even(three, group) == SequenceLayout.even(3, group)
    assert SequenceLayout.even(torch.tensor(3), group) == SequenceLayout.even(3, group)  # type: ignore[arg-type]
    mesh = DeviceMesh("cpu", list(range(world)), mesh_dim_names=("sp",))
    for named in (mesh, (mesh, "sp"), mesh.get_group().group_name):
        assert SequenceLayout.even(3, named).group is mesh.get_group()
    assert SequenceLayout.even(3).group is dist.group.WORLD
    shown = {
        "SequenceLayout.even(3, 7 ranks)": SequenceLayout.even(3, group),
        "SequenceLayout.zigzag(37, 7 ranks)": SequenceLayout.zigzag(37, group),
        "SequenceLayout.packed([1, 2, 3], 7 ranks)": expected,
        "SequenceLayout.packed([], 7 ranks)": SequenceLayout.packed([], group),
        f"SequenceLayout.packed([{'4, ' * 16}...], 7 ranks)": SequenceLayout.packed([4] * 17, group),
        "SequenceLayout.joint(7, 25, 7 ranks)": SequenceLayout.joint(7, 25, group),
        f"SequenceLayout.from_local(sizes={list(range(7))}, 7 ranks)": SequenceLayout.from_local(rank, group),
    }
    for text, layout in shown.items():
        assert repr(layout) == text


def test_equality_hash_and_pickling(ranks: Ranks) -> None:
    ranks(7, check_value)


def test_arguments_and_repr(ranks: Ranks) -> None:
    ranks(7, check_forms)


def check_reduction_is_named(rank: int, world: int, group: Group) -> None:
    """Where a gradient is recorded, grad_scale must be given, also for lists, repeated and on one rank."""
    layout = SequenceLayout.even(6, group)
    whole, own = torch.ones(6, 2), torch.ones(layout.sizes[rank], 2)
    calls = {
        "shard": (whole, '"down" if the input is computed from parameters', layout.shard),
        "gather": (own, '"up" if all ranks compute one loss', layout.gather),
    }
    for name, (x, cases, call) in calls.items():
        where = (
            f"SequenceLayout.{name} on rank {rank} of {world}: a gradient is recorded, and grad_scale is not"
        )
        for _ in range(2):
            call(x, 0)  # kept for repeated calls
            for inputs in (x.clone().requires_grad_(), [x, x.clone().requires_grad_()]):
                with pytest.raises(ValueError, match=re.escape(where)) as caught:
                    call(inputs, 0)
                assert cases in str(caught.value)
            learned = x.clone().requires_grad_()
            with torch.no_grad():
                call(learned, 0)
            call(learned.detach(), 0)
            for scale in ("up", "down", None, 0.5):
                call(learned, 0, scale).sum().backward()
    with pytest.raises(ValueError, match='grad_scale is None; expected none with backward="sum"'):
        layout.gather(own, 0, None, backward="sum")
    with pytest.raises(ValueError, match='backward is \'mean\'; expected "slice" or "sum"'):
        layout.gather(own, 0, backward="mean")  # type: ignore[call-overload]
    if world == 1:
        return
    way: dict[str, Any] = {"grad_scale": None} if rank else {"backward": "sum"}
    with pytest.raises(spar.MismatchError, match="in the gradient: summed on rank 0; recorded on rank 1"):
        layout.gather(own.requires_grad_(), 0, **way)


@pytest.mark.parametrize("world", [1, 2])
def test_recorded_gradients_need_a_grad_scale(ranks: Ranks, world: int) -> None:
    ranks(world, check_reduction_is_named)


# ---- by a parallel state ----


def check_orders(rank: int, folder: Path) -> None:
    for name, (make, inner) in ORDERS.items():
        with Topology():
            state = make()
            for total in TOTALS:
                layout = SequenceLayout.hybrid(total)
                assert layout == SequenceLayout.hybrid(total, state) and layout.group is state.get_group("cp")
                owners = zigzag(total, 2, inner)
                check_numbers(layout, owners, [total], rank)
                check_moves(layout, owners, rank)
            place = state.get_rank("ring"), state.get_rank("ulysses")
            assert place == (divmod(rank, 2) if inner < 0 else divmod(rank, 2)[::-1]), name
            neighbours = " neighbours" if inner < 0 else ""
            assert repr(layout) == f"SequenceLayout.hybrid(0, ulysses=2{neighbours}, 4 ranks)"
            layout = SequenceLayout.hybrid(16)
            assert pickle.loads(pickle.dumps(layout)) == layout
            x = cells((16, 2), torch.float32)
            assert_same(layout.shard(x, 0), spar.split_forward_gather_backward_with_cp(x, 0))
        dist.barrier()


def test_hybrid_in_both_orders(tmp_path: Path) -> None:
    ranks = start(check_orders, 4, tmp_path)
    assert finish(ranks, 120) == [0] * 4


def check_hybrid(rank: int, folder: Path) -> None:
    state = init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2)
    del state._meshes["cp"]
    with pytest.raises(ValueError, match="has no cp group of ring x ulysses in which the ring or"):
        SequenceLayout.hybrid(8)
    parallel_state.destroy_parallel_state()
    state = init_parallel_state(ring_attention_size=4)
    assert SequenceLayout.hybrid(9) == SequenceLayout.zigzag(9, state.get_group("ring"))
    parallel_state.destroy_parallel_state()
    state = init_parallel_state(ulysses_parallel_size=4)
    assert SequenceLayout.hybrid(9) == SequenceLayout.even(9, state.get_group("ulysses"))
    parallel_state.destroy_parallel_state()


def check_unsharded(rank: int, folder: Path) -> None:
    """Without ring and ulysses ranks, a sequence is not sharded over the ranks of something else."""
    state = init_parallel_state(data_parallel_size=2)
    layout = SequenceLayout.hybrid(9)
    assert layout.sizes == (9,) and layout.group is state.get_group("ulysses")
    ring = ParallelState({"ring": state._meshes["ring"]})
    assert SequenceLayout.hybrid(9, ring).group is state.get_group("ring")
    with pytest.raises(ValueError, match="the parallel state has no ring or ulysses group; create it with"):
        SequenceLayout.hybrid(9, ParallelState())


def test_hybrid(tmp_path: Path) -> None:
    ranks = start(check_hybrid, 4, tmp_path)
    assert finish(ranks, 90) == [0] * 4


def test_hybrid_without_sharding(tmp_path: Path) -> None:
    assert finish(start(check_unsharded, 2, tmp_path), 60) == [0] * 2
