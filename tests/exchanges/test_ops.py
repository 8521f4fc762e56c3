# SPDX-License-Identifier: Apache-2.0
"""The operations on real ranks, to the bit: forward, backward, all dtypes, strides and uneven pieces."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import WORLDS, Ranks
from helpers.reference import assert_same, cells, part, rule, scaled

import spar
from spar._transports import torch as torch_transport

pytestmark = [pytest.mark.long, pytest.mark.quick_ranks]

Group = dist.ProcessGroup

# (global shape, scatter, gather): even and uneven, empty pieces, 2 to 7 dims, negative dims, any order
EXCHANGES: list[tuple[tuple[int, ...], int, int]] = [
    ((84, 84), 0, 1),
    ((84, 84), 1, 0),
    ((2, 84, 84, 4), 2, 1),
    ((2, 13, 5, 3), 2, 1),
    ((13, 3, 5), 0, 2),
    ((3, 13, 5), 1, 2),
    ((2, 11, 3, 9), 1, 3),
    ((2, 11, 3, 9), -1, -3),
    ((6, 2, 3, 1, 11), 4, 0),
    ((2, 5, 1, 7, 3, 2), 3, 1),
    ((1, 2, 3, 2, 2, 5, 2), 5, 2),
    ((2, 3, 2), 1, 2),  # more ranks than elements: empty pieces
    ((0, 6, 6), 1, 2),
    ((4, 0, 6), 1, 2),
    ((4, 6, 0), 1, 2),
    ((1, 1), 0, 1),
]
# (global shape, dim, sizes): None is the size rule
CUTS: list[tuple[tuple[int, ...], int, str]] = [
    ((84,), 0, "rule"),
    ((13,), 0, "rule"),
    ((84, 3), 0, "rule"),
    ((3, 84, 2), 1, "rule"),
    ((5, 13), -1, "rule"),
    ((2, 3, 11, 2), -2, "ramp"),
    ((2, 3, 11, 2), 2, "last"),
    ((2, 1, 3, 2, 12), 4, "ramp"),
    ((2, 2), 1, "rule"),
    ((0, 5), 1, "rule"),
    ((5, 0), 1, "rule"),
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


def all_dtypes() -> list[torch.dtype]:
    """Return every dtype that a strided tensor can have."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    found = {dtype for dtype in found if not str(dtype).startswith(("torch.q", "torch.Q"))}  # see BAD
    held = []
    for dtype in sorted(found, key=str):
        try:
            cells((4,), dtype)
        except (RuntimeError, NotImplementedError):
            continue
        held.append(dtype)
    return held


def sizes_of(kind: str, total: int, world: int) -> list[int]:
    if kind == "rule":
        return rule(total, world)
    if kind == "last":  # all on the last rank
        return [0] * (world - 1) + [total]
    first = min(total, world)
    return [first, *rule(total - first, world - 1)] if world > 1 else [total]


def strided(x: torch.Tensor, how: str) -> torch.Tensor:
    """Return the same values with other strides."""
    if how == "transposed":
        dims = list(range(x.dim()))[::-1]
        return x.permute(dims).contiguous().permute(dims)
    if how == "sliced":
        wide = torch.zeros([2 * n + 1 for n in x.shape], dtype=x.dtype)
        view = wide[tuple(slice(1, 2 * n + 1, 2) for n in x.shape)]
        view.copy_(x)
        return view
    return x.contiguous()


# ---- forward ----


def check_all_to_all(rank: int, world: int, group: Group, how: str, dtypes: list[torch.dtype]) -> None:
    for shape, scatter, gather in EXCHANGES:
        for dtype in dtypes:
            whole = cells(shape, dtype)
            x = strided(part(whole, rule(shape[gather], world), gather, rank), how)
            before = x.clone()
            y = spar.all_to_all(x, group, scatter, gather, shape[gather])
            assert_same(y, part(whole, rule(shape[scatter], world), scatter, rank), (shape, scatter, gather))
            assert_same(x, before)
            assert world == 1 or y.is_contiguous()
            assert world == 1 or y.data_ptr() != x.data_ptr() or not y.numel()
            back = spar.all_to_all(y, group, gather, scatter, shape[scatter])
            assert_same(back, before, "and back")
    assert world == 1 or spar.transport(group).name == os.environ["SPAR_TRANSPORT"]


def check_split_gather(rank: int, world: int, group: Group, how: str, dtypes: list[torch.dtype]) -> None:
    for shape, dim, kind in CUTS:
        for dtype in dtypes:
            sizes = sizes_of(kind, shape[dim], world)
            whole = strided(cells(shape, dtype), how)
            own = part(whole, sizes, dim, rank)
            given = None if kind == "rule" else sizes
            y = spar.split_forward_gather_backward(whole, group, dim, given)
            assert_same(y, own, (shape, dim, sizes))
            assert world == 1 or y.is_contiguous()
            z = spar.gather_forward_split_backward(strided(own, how), group, dim, sizes)
            assert_same(z, whole, (shape, dim, sizes))
            if len(set(sizes)) == 1:
                assert_same(spar.gather_forward_split_backward(own, group, dim), whole)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("how", ["contiguous", "transposed", "sliced"])
def test_forward(ranks: Ranks, world: int, how: str) -> None:
    ranks(world, check_all_to_all, how, [torch.float32])
    ranks(world, check_split_gather, how, [torch.float32])


def check_every_dtype(rank: int, world: int, group: Group, torch_packs: bool) -> int:
    dtypes = all_dtypes()
    original = torch_transport.packer
    if torch_packs:
        torch_transport.packer = lambda device, rank: torch_transport.TorchPacker(rank)
    try:
        for dtype in dtypes:
            whole = cells((2, 9, 5, 3), dtype)
            x = part(whole, rule(9, world), 1, rank)
            y = spar.all_to_all(x, group, 2, 1, 9)
            assert_same(y, part(whole, rule(5, world), 2, rank), dtype)
            assert_same(spar.gather_forward_split_backward(y, group, 2, rule(5, world)), whole, dtype)
            part_of = spar.split_forward_gather_backward(whole, group, 1)
            assert_same(part_of, x, dtype)
    finally:
        torch_transport.packer = original
    return len(dtypes)


@pytest.mark.parametrize("torch_packs", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_every_dtype(ranks: Ranks, world: int, torch_packs: bool) -> None:
    counts = ranks(world, check_every_dtype, torch_packs)
    assert min(counts) >= 20, "torch has more dtypes than that"


def check_torch_packer(rank: int, world: int, group: Group) -> None:
    original = torch_transport.packer
    torch_transport.packer = lambda device, rank: torch_transport.TorchPacker(rank)
    try:
        for how in ("contiguous", "transposed", "sliced"):
            check_all_to_all(rank, world, group, how, [torch.float64])
            check_split_gather(rank, world, group, how, [torch.float64])
        check_gradients(rank, world, group, [torch.float32] if world > 3 else FLOATS)
    finally:
        torch_transport.packer = original


@pytest.mark.parametrize("world", [2, 4])
def test_packing_with_torch_copies(pool: Ranks, world: int) -> None:
    """The torch transport's packing for other devices than the CPU, on CPU tensors."""
    pool.transport = "torch"
    pool(world, check_torch_packer)


def check_lazy_views(rank: int, world: int, group: Group) -> None:
    whole = cells((3, 8, 5), torch.complex64)
    own = part(whole, rule(8, world), 1, rank)
    views = {
        "conj": (own.conj(), whole.conj()),
        "neg": (own.conj().imag, whole.conj().imag),
        "conj of a transposed": (strided(own, "transposed").conj(), whole.conj()),
    }
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):  # zeros without memory
        zeros = torch._efficientzerotensor(own.shape, dtype=dtype)
        views[f"zeros of {dtype}"] = zeros, torch.zeros(whole.shape, dtype=dtype)
    for name, (x, all_of_it) in views.items():
        y = spar.all_to_all(x, group, 2, 1, 8)
        assert_same(y, part(all_of_it, rule(5, world), 2, rank), name)
        z = spar.gather_forward_split_backward(x, group, 1, rule(8, world))
        assert_same(z, all_of_it, name)
        assert_same(spar.split_forward_gather_backward(all_of_it, group, 1), x, name)
    expanded = part(cells((3, 8, 1), torch.float32), rule(8, world), 1, rank).expand(-1, -1, 5)
    y = spar.all_to_all(expanded, group, 2, 1, 8)
    assert_same(y, cells((3, 8, 1), torch.float32).expand(3, 8, len(range(rank, 5, world))))
    x = own.real.clone().requires_grad_()
    size = spar.all_to_all(x, group, 2, 1, 8).abs().sum()
    (sign,) = torch.autograd.grad(size, x, create_graph=True)
    sign.sum().backward()  # the derivative of a sign is such zeros
    assert_same(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_lazy_and_expanded_views(ranks: Ranks, world: int) -> None:
    ranks(world, check_lazy_views)


# ---- gradients ----


def check_gradients(rank: int, world: int, group: Group, dtypes: list[torch.dtype]) -> None:
    for dtype in dtypes:
        for shape, scatter, gather in EXCHANGES:
            mine = rule(shape[gather], world)
            x = part(cells(shape, dtype), mine, gather, rank).clone().requires_grad_()
            y = spar.all_to_all(x, group, scatter, gather, shape[gather])
            upstream = cells(shape, dtype, salt=1)
            y.backward(part(upstream, rule(shape[scatter], world), scatter, rank))
            assert x.grad is not None
            assert_same(x.grad, part(upstream, mine, gather, rank), (dtype, shape))
        for shape, dim, kind in CUTS:
            sizes = sizes_of(kind, shape[dim], world)
            upstream = cells(shape, dtype, salt=2)
            for grad_scale in ("up", "down", None, 0.3):
                if dtype.is_complex and not isinstance(grad_scale, str) and grad_scale is not None:
                    grad_scale = 0.25
                x = cells(shape, dtype).requires_grad_()
                given = None if kind == "rule" else sizes
                y = spar.split_forward_gather_backward(x, group, dim, given, grad_scale)
                y.backward(part(upstream, sizes, dim, rank))
                expected = scaled(upstream, grad_scale, world)
                assert x.grad is not None
                assert_same(x.grad, expected, ("split", dtype, shape, grad_scale))
                x = part(cells(shape, dtype), sizes, dim, rank).clone().requires_grad_()
                y = spar.gather_forward_split_backward(x, group, dim, sizes, grad_scale)
                y.backward(upstream)
                expected = scaled(part(upstream, sizes, dim, rank), grad_scale, world)
                assert x.grad is not None
                assert_same(x.grad, expected, ("gather", dtype, shape, grad_scale))


@pytest.mark.parametrize("world", WORLDS)
def test_gradients(ranks: Ranks, world: int) -> None:
    ranks(world, check_gradients, FLOATS if world == 3 else [torch.float32])


def check_default_scales(rank: int, world: int, group: Group) -> None:
    x = torch.ones(world * 2, requires_grad=True)
    spar.split_forward_gather_backward(x, group, 0).sum().backward()
    assert_same(x.grad, torch.full((world * 2,), 1 / world))
    x = torch.ones(2, requires_grad=True)
    spar.gather_forward_split_backward(x, group, 0).sum().backward()
    assert_same(x.grad, torch.full((2,), float(world)))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_split_divides_and_gather_multiplies_by_default(ranks: Ranks, world: int) -> None:
    ranks(world, check_default_scales)


def check_expanded_gradient(rank: int, world: int, group: Group) -> None:
    """The gradient of sum() has stride 0; that of a transposed use is not contiguous."""
    x = torch.ones(2, 6, 8, requires_grad=True)
    spar.all_to_all(x, group, 2, 1).sum().backward()
    assert_same(x.grad, torch.ones(2, 6, 8))
    x.grad = None
    y = spar.all_to_all(x, group, 2, 1).transpose(0, 2)
    weight = cells(tuple(y.shape), torch.float32)
    (y * weight).sum().backward()
    assert x.grad is not None
    back = spar.all_to_all(weight.transpose(0, 2).contiguous(), group, 1, 2, 8)
    assert_same(x.grad, back)


def test_gradients_with_other_strides(ranks: Ranks) -> None:
    ranks(2, check_expanded_gradient)


def dot(a: torch.Tensor, b: torch.Tensor, group: Group) -> float:
    total = (a.double() * b.double()).sum()
    dist.all_reduce(total, group=group)
    return total.item()


def replicated(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check_double_backward(rank: int, world: int, group: Group) -> None:
    """Check <v, J w> = <J' v, w>, summed over ranks, for the operation and for its backward."""
    split, gather = spar.split_forward_gather_backward, spar.gather_forward_split_backward
    whole, half = (3, 11, 5), rule(11, world)
    mine = (3, half[rank], 5)
    cases: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], bool, bool]] = {
        # forward, input shape, output shape, and which of the two is replicated
        "all_to_all": (
            lambda x: spar.all_to_all(x, group, 2, 1, 11),
            mine,
            (3, 11, rule(5, world)[rank]),
            False,
            False,
        ),
        "split": (lambda x: split(x, group, 1), whole, mine, True, False),
        "gather": (lambda x: gather(x, group, 1, half), mine, whole, False, True),
    }
    for name, (function, shape, out_shape, equal_in, equal_out) in cases.items():

        def draw(shape: tuple[int, ...], equal: bool, seed: int) -> torch.Tensor:
            return replicated(shape, seed if equal else seed + 1000 * (rank + 1))

        x = draw(shape, equal_in, 1).requires_grad_()
        v = draw(out_shape, equal_out, 2).requires_grad_()
        w = draw(shape, equal_in, 3)
        (pulled,) = torch.autograd.grad(function(x), x, v, create_graph=True)
        assert dot(v.detach(), function(w), group) == pytest.approx(dot(pulled.detach(), w, group)), name
        # the derivative of v -> J' v, applied to w, is J w
        (again,) = torch.autograd.grad(pulled, v, w, create_graph=True)
        assert dot(v.detach(), again.detach(), group) == pytest.approx(dot(pulled.detach(), w, group)), name
        # the third derivative
        u = draw(shape, equal_in, 4).requires_grad_()
        (pulled,) = torch.autograd.grad(function(u * u), u, v, create_graph=True)
        (third,) = torch.autograd.grad(pulled, v, u.detach(), create_graph=True)
        assert_same(third.detach(), function(2 * u.detach() * u.detach()), name)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_double_backward(ranks: Ranks, world: int) -> None:
    ranks(world, check_double_backward)


# ---- a group of one; views; integers ----


def check_alone(rank: int, world: int, group: Group) -> None:
    x = torch.ones(3, 4, requires_grad=True)
    assert spar.all_to_all(x, group, 0, 1) is x
    assert spar.split_forward_gather_backward(x, group, 0) is x
    assert spar.gather_forward_split_backward(x, group, 0, [3], "down") is x
    assert spar.gather_forward_split_backward(x.detach(), group, 0, None, 0.5).grad_fn is None
    y = spar.gather_forward_split_backward(x, group, 0, None, 0.5)
    assert y.grad_fn is not None
    y.sum().backward()
    assert_same(x.grad, torch.full((3, 4), 0.5))
    with pytest.raises(ValueError, match="gather_size is 9"):
        spar.all_to_all(x, group, 0, 1, 9)
    assert spar.transport(group).name is None


def test_group_of_one_returns_its_input(ranks: Ranks) -> None:
    ranks(1, check_alone)


def check_views(rank: int, world: int, group: Group) -> None:
    x = torch.zeros(world * 3, 5)
    first = spar.split_forward_gather_backward(x, group, 0)
    assert first.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    x = torch.zeros(2, world * 3)
    copy = spar.split_forward_gather_backward(x, group, 1)
    assert copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert copy.is_contiguous()
    tokens = spar.split_forward_gather_backward(torch.arange(world * 2), group, 0)
    assert tokens.tolist() == [2 * rank, 2 * rank + 1]
    fp8 = torch.zeros(world * 2).to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        spar.split_forward_gather_backward(fp8, group, 0)
    y = spar.split_forward_gather_backward(fp8, group, 0, None, None)
    y.backward(torch.ones(2).to(torch.float8_e4m3fn))
    assert fp8.grad is not None
    assert_same(fp8.grad.float(), torch.ones(world * 2))


def test_views_and_dtypes_without_arithmetic(ranks: Ranks) -> None:
    ranks(2, check_views)


# ---- second derivatives of a whole model ----


def check_gradient_penalty(rank: int, world: int, group: Group, grad_scale: tuple[Any, Any]) -> torch.Tensor:
    """Compare dR/dtheta with one process, for R = |dL/dx|^2 and L = sum(theta * x^2)."""
    down, up = grad_scale
    x = replicated((12,), 5).requires_grad_()
    theta = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    part_of = spar.split_forward_gather_backward(x, group, 0, None, down)
    loss = spar.gather_forward_split_backward(theta * part_of**2, group, 0, rule(12, world), up).sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.testing.assert_close(slope.detach(), 2 * 1.5 * x.detach())
    (slope**2).sum().backward()
    assert theta.grad is not None
    return theta.grad


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("grad_scale", "reduce"), [(("down", "up"), "mean"), ((None, None), "sum")])
def test_gradient_penalty(ranks: Ranks, world: int, grad_scale: Any, reduce: str) -> None:
    """Default scales need averaged gradients, None needs sums, also for second derivatives."""
    grads = torch.stack(ranks(world, check_gradient_penalty, grad_scale))
    total = grads.mean() if reduce == "mean" else grads.sum()
    assert total.item() == pytest.approx(8 * 1.5 * (replicated((12,), 5) ** 2).sum().item())


def check_profiled(rank: int, world: int, group: Group) -> None:
    x = torch.ones(2 * world, 3, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        half = spar.split_forward_gather_backward(x, group, 0)
        spar.all_to_all(half, group, 1, 0, 2 * world).sum().backward()
    calls = {event.key: event.count for event in profile.key_averages()}
    for name in ("all_to_all", "backward of all_to_all", "backward of split_forward_gather_backward"):
        assert calls[f"spar::{name}"] == 1, calls
    assert calls["SparExchangeBackward"] == 2, calls


def test_profiler_shows_op_names(ranks: Ranks) -> None:
    ranks(2, check_profiled)
