"""spar.attention against one process: every method, layout, mask and number of heads."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS, Ranks
from helpers.whole_attention import whole_attention
from test_faults import finish, start
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import spar
from spar import SequenceLayout
from spar._attention import kernels, ring
from spar._attention.heads import heads_of_ranks
from spar.parallel_state import init_parallel_state

Group = dist.ProcessGroup
METHODS = ("ulysses", "gather", "ring")
DOCUMENTS = [5, 0, 9, 1, 4]
LAYOUTS: dict[str, Callable[[Group], SequenceLayout]] = {
    "even": lambda group: SequenceLayout.even(13, group),
    "zigzag": lambda group: SequenceLayout.zigzag(23, group),
    "packed": lambda group: SequenceLayout.packed(DOCUMENTS, group),
    "joint": lambda group: SequenceLayout.joint(7, 12, group),
    "few tokens": lambda group: SequenceLayout.even(2, group),
    "holes": lambda group: SequenceLayout("local", (*(0, 5, 0, 2)[: group.size() - 1], 6), group),
}


@pytest.fixture
def ranks(pool: Ranks) -> Ranks:
    """Run over one transport: exchanges over each are tested by themselves."""
    pool.transport = TRANSPORTS[0]
    return pool


@pytest.fixture(scope="module")
def all_worlds() -> Iterator[Ranks]:
    pool = Ranks(tuple(range(1, 8)))
    yield pool
    pool.stop()


def inputs(tokens: int, heads: int, key_heads: int, dtype: torch.dtype, width: int = 8) -> list[Tensor]:
    """Return q, k, v and the gradient of the output, the same on all ranks."""
    generator = torch.Generator().manual_seed(tokens * 100 + heads * 10 + key_heads)
    shapes = [(2, tokens, n, width) for n in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def masks(tokens: int, heads: int, dtype: torch.dtype) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(tokens)
    random = torch.rand(2, heads, tokens, tokens, generator=generator)
    found = {"none": None, "bool": random[:1] > 0.4, "added": (4 * random[:, :1]).to(dtype)}
    if tokens != 2:  # the batch's size: it could be either
        found["keys"] = random[:, 0, 0] > 0.4
    return found


def error_of(
    function: Callable[..., Tensor], whole: list[Tensor], expected: list[Tensor], own: Tensor
) -> float:
    """Return the largest error of this rank's output and gradients."""
    *leaves, upper = [x[:, own].clone() for x in whole]
    for leaf in leaves:
        leaf.requires_grad_()
    y = function(*leaves)
    found = [y.detach(), *torch.autograd.grad(y, leaves, upper)]
    assert y.is_contiguous() and [x.dtype for x in found] == [leaves[0].dtype] * 4
    errors = [(x - e[:, own]).abs().max() for x, e in zip(found, expected, strict=True) if x.numel()]
    return float(max(errors, default=0.0))


def expected_of(whole: list[Tensor], **arguments: Any) -> list[Tensor]:
    *leaves, upper = [x.clone() for x in whole]
    for leaf in leaves:
        leaf.requires_grad_()
    y = whole_attention(*leaves, **arguments)
    return [y.detach(), *torch.autograd.grad(y, leaves, upper)]


def check_method(
    rank: int, world: int, group: Group, method: str | None, dtype: torch.dtype, limit: float
) -> None:
    for kind, causal in itertools.product(LAYOUTS, (False, True)):
        layout = LAYOUTS[kind](group)
        documents = DOCUMENTS if kind == "packed" else None
        for heads, key_heads in ((4, 2), (3, 1)):
            whole = inputs(layout.total, heads, key_heads, dtype)
            for name, mask in masks(layout.total, heads, dtype).items():
                if name != "none" and kind not in ("zigzag", "packed"):
                    continue
                expected = expected_of(whole, causal=causal, mask=mask, documents=documents)
                error = error_of(
                    partial(spar.attention, layout=layout, causal=causal, mask=mask, method=method),
                    whole,
                    expected,
                    layout.index(),
                )
                assert error < limit, (kind, causal, heads, name, error)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("method", [*METHODS, None])
def test_method_matches_one_process(ranks: Ranks, world: int, method: str | None) -> None:
    ranks(world, check_method, method, torch.float32, 2e-5)


@pytest.mark.parametrize("method", METHODS)
def test_method_is_exact_in_float64(ranks: Ranks, method: str) -> None:
    ranks(3, check_method, method, torch.float64, 1e-13)


def check_16_bits(rank: int, world: int, group: Group) -> None:
    """Its error is that of one process."""
    layout = SequenceLayout.zigzag(64, group)
    whole = inputs(64, 4, 2, torch.float64, 32)
    expected = expected_of(whole, causal=True)
    short = [x.bfloat16() for x in whole]

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).contiguous()

    alone = error_of(sdpa, short, expected, torch.arange(64))
    for method in METHODS:
        error = error_of(
            partial(spar.attention, layout=layout, causal=True, method=method),
            short,
            expected,
            layout.index(),
        )
        assert error < 1.5 * alone, (method, error, alone)


def test_16_bits_are_as_exact_as_in_one_process(ranks: Ranks) -> None:
    ranks(3, check_16_bits)


def check_heads(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.zigzag(9, group)
    for heads in range(1, 13):
        for key_heads in [n for n in range(1, heads + 1) if heads % n == 0]:
            whole = inputs(9, heads, key_heads, torch.float32, 4)
            error = error_of(
                partial(spar.attention, layout=layout, causal=True, method="ulysses"),
                whole,
                expected_of(whole, causal=True),
                layout.index(),
            )
            assert error < 2e-5, (heads, key_heads, error)


@pytest.mark.parametrize("world", range(1, 8))
def test_any_number_of_heads(all_worlds: Ranks, world: int) -> None:
    all_worlds.transport = TRANSPORTS[0]
    all_worlds(world, check_heads)


def test_a_rank_receives_the_key_heads_that_its_queries_need() -> None:
    for heads, world in itertools.product(range(1, 13), range(1, 8)):
        for key_heads in [n for n in range(1, heads + 1) if heads % n == 0]:
            plan, at = heads_of_ranks(heads, key_heads, world), 0
            for own, first, count in zip(*plan, strict=True):
                needed = sorted({head * key_heads // heads for head in range(at, at + own)})
                assert list(range(first, first + count)) == (needed or []), (heads, key_heads, world)
                at += own
            assert at == heads


def check_two_levels(rank: int, folder: Path) -> None:
    state = init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2)
    for total, (heads, key_heads), causal in itertools.product(
        (23, 16, 3), ((4, 2), (3, 3), (1, 1)), (False, True)
    ):
        layout = SequenceLayout.hybrid(total, state)
        whole = inputs(total, heads, key_heads, torch.float32)
        for name, mask in masks(total, heads, torch.float32).items():
            expected = expected_of(whole, causal=causal, mask=mask)
            for method in (None, *METHODS):
                error = error_of(
                    partial(spar.attention, layout=layout, causal=causal, mask=mask, method=method),
                    whole,
                    expected,
                    layout.index(),
                )
                assert error < 2e-5, (total, heads, causal, name, method, error)
    dist.barrier()


def test_ring_across_ulysses_groups(tmp_path: Path) -> None:
    assert finish(start(check_two_levels, 4, tmp_path), 150) == [0] * 4


# ---- work and memory ----


class Counting:
    """A kernel that counts the multiply-adds of its scores."""

    def __init__(self) -> None:
        self.count = 0

    def refuses(self, *arguments: Any) -> str:
        return ""

    def forward(self, q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        self.count += q.numel() * k.size(2)
        return kernels.BLOCKWISE.forward(q, k, *rest)

    def backward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return kernels.BLOCKWISE.backward(*arguments)


def check_balance(rank: int, world: int, group: Group, method: str) -> list[int]:
    counts, flash = [], kernels.FLASH["cpu"]
    try:
        for make in (SequenceLayout.zigzag, SequenceLayout.even):
            kernels.FLASH["cpu"] = counting = Counting()
            layout = make(16 * world, group)
            whole = inputs(layout.total, 2, 1, torch.float32)
            spar.attention(*[x[:, layout.index()] for x in whole[:3]], layout, causal=True, method=method)
            counts.append(counting.count)
    finally:
        kernels.FLASH["cpu"] = flash
    return counts


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_zigzag_balances_the_work(ranks: Ranks, method: str) -> None:
    """Blocks that the causal mask empties are not computed: zigzag's are the same on every rank."""
    zigzag, even = zip(*ranks(4, check_balance, method), strict=True)
    assert len(set(zigzag)) == 1
    assert even == tuple(sorted(even)) and even[3] == 4 * even[0]
    full = 2 * 2 * 64 * 64 * 8  # batch, heads, queries, keys, width
    assert sum(zigzag) < 0.63 * full


def check_memory(rank: int, world: int, group: Group) -> None:
    """At most two shards of K are alive at a time, in forward and backward."""
    received: list[Any] = []
    most, sending = [0], ring._Sending

    class Counted(sending):  # type: ignore[misc,valid-type]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            gc.collect()
            received.append(weakref.ref(self.received[0]))
            most[0] = max(most[0], sum(each() is not None for each in received))

    layout = SequenceLayout.even(8 * world, group)
    q, k, v, upper = [x[:, layout.index()] for x in inputs(layout.total, 2, 2, torch.float32)]
    ring._Sending = Counted  # type: ignore[misc]
    try:
        q.requires_grad_()
        y = spar.attention(q, k, v, layout, method="ring")
        assert len(received) == world - 1 and most[0] <= 2, most
        received.clear()
        most[0] = 0
        y.backward(upper)
        assert len(received) == 2 * world - 1 and most[0] <= 4, most  # two of K, and two of its gradient
    finally:
        ring._Sending = sending  # type: ignore[misc]


def test_ring_holds_two_shards(ranks: Ranks) -> None:
    ranks(4, check_memory)


# ---- around it ----


def check_compiled(rank: int, world: int, group: Group, method: str | None, kind: str) -> None:
    make: dict[str, Callable[[int], SequenceLayout]] = {
        "zigzag": lambda n: SequenceLayout.zigzag(n, group),
        "packed": lambda n: SequenceLayout.packed([3, n - 3], group),
    }

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> Tensor:
        return spar.attention(q * 2, k, v, layout, causal=True, method=method)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager") if rank == 0 else attend
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for total in (24, 29, 32, 41, 50):
        layout = make[kind](total)
        whole = inputs(total, 4, 2, torch.float32)
        results = []
        for run in (attend, compiled):
            *leaves, upper = [x[:, layout.index()].requires_grad_() for x in whole]
            y = run(*leaves, layout)
            results.append([y, *torch.autograd.grad(y, leaves, upper)])
        for eager, other in zip(*results, strict=True):
            torch.testing.assert_close(other, eager, rtol=1e-5, atol=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert graphs in ((1, 2) if rank == 0 else (0,)), graphs


# packed documents: rank 0 needs none of the keys that rank 1 sends
@pytest.mark.parametrize(("method", "kind"), [*((m, "zigzag") for m in METHODS), ("ring", "packed")])
def test_five_lengths_compile_twice(ranks: Ranks, method: str, kind: str) -> None:
    ranks(2, check_compiled, method, kind, timeout=280)


def check_checkpoint(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.zigzag(16, group)
    for method, reentrant in itertools.product(METHODS, (False, True)):
        attend = partial(spar.attention, causal=True, method=method)
        results = []
        for function in (attend, partial(checkpoint, attend, use_reentrant=reentrant)):
            *leaves, upper = [x[:, layout.index()].requires_grad_() for x in inputs(16, 4, 2, torch.float32)]
            y = function(*leaves, layout)
            y.backward(upper)
            results.append([y, *[leaf.grad for leaf in leaves]])
        for plain, other in zip(*results, strict=True):
            assert torch.equal(plain, other), (method, reentrant)


def test_checkpoint_recomputes_it(ranks: Ranks) -> None:
    ranks(2, check_checkpoint)


def check_checkpoint_without_heads(rank: int, world: int, group: Group) -> None:
    """A rank without heads, or without tokens, recomputes its exchanges, too."""
    few = SequenceLayout("local", (4, 0, 5), group)
    for layout, heads, method in ((SequenceLayout.even(9, group), 1, "ulysses"), (few, 2, "gather")):
        attend = partial(spar.attention, causal=True, method=method)
        leaves = [x[:, layout.index()].requires_grad_() for x in inputs(9, heads, 1, torch.float32)[:3]]
        results = []
        for function in (attend, partial(checkpoint, attend, use_reentrant=False)):
            y = function(*leaves, layout)
            results.append(torch.autograd.grad((y * 2).sum(), leaves))
        for plain, other in zip(*results, strict=True):
            assert torch.equal(plain, other), method


def test_checkpoint_recomputes_a_rank_without_heads(ranks: Ranks) -> None:
    ranks(3, check_checkpoint_without_heads)


def check_strides(rank: int, world: int, group: Group) -> None:
    """Tensors whose last dim is not contiguous: a kernel must not read other memory."""
    layout = SequenceLayout.zigzag(16, group)
    whole = inputs(16, 2, 2, torch.float32)
    expected = expected_of(whole, causal=True)
    for method in METHODS:

        def strided(q: Tensor, k: Tensor, v: Tensor, method: str = method) -> Tensor:
            q, k, v = torch.stack((q, k, v), -1).unbind(-1)
            assert q.stride(-1) == 3
            return spar.attention(q, k, v, layout, causal=True, method=method)

        assert error_of(strided, whole, expected, layout.index()) < 2e-5, method


def test_strides(ranks: Ranks) -> None:
    ranks(2, check_strides)


def check_lowest_masks(rank: int, world: int, group: Group) -> None:
    """A query whose keys all have the lowest value receives zeros; with -1e9 a mean, as in one process."""
    layout = SequenceLayout.even(8, group)
    q, k, v, _ = inputs(8, 2, 2, torch.float32)
    own = layout.index()
    for value in (torch.finfo(torch.float32).min, -1e9):
        mask = torch.zeros(1, 1, 8, 8)
        mask[:, :, 3] = value
        expected = whole_attention(q, k, v, mask=mask)
        if value < -1e30:
            expected[:, 3] = 0
        for method in ("gather", "ring"):
            y = spar.attention(q[:, own], k[:, own], v[:, own], layout, mask=mask, method=method)
            assert torch.allclose(y, expected[:, own], atol=1e-5), (value, method)


def test_lowest_masks(ranks: Ranks) -> None:
    ranks(2, check_lowest_masks)


def check_autocast(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.even(16, group)
    q, k, v, upper = [x[:, layout.index()].requires_grad_() for x in inputs(16, 4, 2, torch.float32)]
    for method in METHODS:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = spar.attention(q, k, v, layout, causal=True, method=method)
        assert y.dtype == torch.bfloat16
        grads = torch.autograd.grad(y, [q, k, v], upper.bfloat16())
        assert {grad.dtype for grad in grads} == {torch.float32}


def test_autocast_exchanges_16_bits(ranks: Ranks) -> None:
    ranks(2, check_autocast)


def check_second_derivative(rank: int, world: int, group: Group) -> None:
    """Of a kernel that can be differentiated twice, through ulysses; the ring refuses."""
    layout = SequenceLayout.even(6, group)

    def twice(function: Callable[..., Tensor], own: Tensor) -> Tensor:
        q, k, v, upper = [x[:, own].requires_grad_() for x in inputs(6, 2, 2, torch.float64)]
        (grad,) = torch.autograd.grad(function(q, k, v), q, upper, create_graph=True)
        (again,) = torch.autograd.grad(grad.square().sum(), k)
        return again

    expected = twice(whole_attention, torch.arange(6))
    found = twice(
        partial(spar.attention, layout=layout, method="ulysses", attend=whole_attention),
        layout.index(),
    )
    assert torch.allclose(found, expected[:, layout.index()])
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        twice(partial(spar.attention, layout=layout, causal=True, method="ring"), layout.index())


def test_second_derivative(ranks: Ranks) -> None:
    ranks(2, check_second_derivative)


def check_own_kernel(rank: int, world: int, group: Group) -> None:
    """A causal kernel that aligns the last query with the last key, as flash_attn does."""

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert q.size(2) == k.size(2) == v.size(2)
        lower = torch.ones(q.size(1), k.size(1), dtype=torch.bool).tril(k.size(1) - q.size(1))
        return whole_attention(q, k, v, mask=lower[None, None])

    for make, method in itertools.product(
        (SequenceLayout.zigzag, SequenceLayout.even), ("ulysses", "gather")
    ):
        layout = make(13, group)
        whole = inputs(13, 4, 2, torch.float64)
        error = error_of(
            partial(spar.attention, layout=layout, causal=True, method=method, attend=kernel),
            whole,
            expected_of(whole, causal=True),
            layout.index(),
        )
        assert error < 1e-13, (method, error)


def check_own_kernel_of_documents(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.packed(DOCUMENTS, group)
    whole = inputs(layout.total, 2, 2, torch.float64)
    expected = expected_of(whole, documents=DOCUMENTS)
    for method in ("ulysses", "gather"):
        way = partial(spar.attention, layout=layout, method=method, attend=whole_attention)
        assert error_of(way, whole, expected, layout.index()) < 1e-13, method


def test_own_kernel_has_one_document_at_a_time(ranks: Ranks) -> None:
    ranks(2, check_own_kernel_of_documents)


def test_own_kernel(ranks: Ranks) -> None:
    ranks(3, check_own_kernel)


def check_cross_attention(rank: int, world: int, group: Group) -> None:
    """Keys of another length, sharded or whole on every rank; and other orders of dims."""
    layout, other = SequenceLayout.zigzag(13, group), SequenceLayout.even(7, group)
    q, *_, upper = inputs(13, 4, 4, torch.float64)
    _, k, v, _ = inputs(7, 4, 2, torch.float64)
    mask = torch.rand(1, 1, 13, 7, generator=torch.Generator().manual_seed(1)) > 0.3
    own = layout.index()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = whole_attention(*leaves, mask=mask)
    grads = torch.autograd.grad(expected, leaves, upper)
    for method in ("ulysses", "gather"):
        mine = [
            q[:, own].requires_grad_(),
            k[:, other.index()].requires_grad_(),
            v[:, other.index()].requires_grad_(),
        ]
        y = spar.attention(*mine, (layout, other), mask=mask, method=method)
        assert torch.allclose(y, expected[:, own])
        found = torch.autograd.grad(y, mine, upper[:, own])
        for one, grad, index in zip(found, grads, (own, other.index(), other.index()), strict=True):
            assert torch.allclose(one, grad[:, index]), method
    mine = [q[:, own].requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_()]
    y = spar.attention(*mine, (layout, None), mask=mask)
    assert torch.allclose(y, expected[:, own])
    found = list(torch.autograd.grad(y, mine, upper[:, own]))
    found[1:] = [sum(spar.all_gather(grad[None], group)) for grad in found[1:]]
    for one, grad, index in zip(found, grads, (own, slice(None), slice(None)), strict=True):
        assert torch.allclose(one, grad[:, index])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = whole_attention(*leaves, causal=True)  # the last queries attend to all keys
    grads = torch.autograd.grad(expected, leaves, upper)
    for method in ("ulysses", "gather"):
        mine = [
            q[:, own].requires_grad_(),
            k[:, other.index()].requires_grad_(),
            v[:, other.index()].requires_grad_(),
        ]
        y = spar.attention(*mine, (layout, other), causal=True, method=method)
        assert torch.allclose(y, expected[:, own]), method
        found = list(torch.autograd.grad(y, mine, upper[:, own]))
        for one, grad, index in zip(found, grads, (own, other.index(), other.index()), strict=True):
            assert torch.allclose(one, grad[:, index]), method
    for method, order in itertools.product(METHODS, ((0, 2, 1, 3), (1, 0, 2, 3))):
        x = [t[:, own].permute(order) for t in inputs(13, 4, 4, torch.float64)[:3]]
        dims = {"seq_dim": order.index(1), "head_dim": order.index(2)}
        y = spar.attention(*x, layout, causal=True, method=method, **dims)
        plain = spar.attention(
            *[t.permute([order.index(i) for i in range(4)]) for t in x], layout, causal=True
        )
        assert torch.allclose(y, plain.permute(order)), (method, order)


def test_cross_attention_and_dims(ranks: Ranks) -> None:
    ranks(3, check_cross_attention)


def check_dropout(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.zigzag(64, group)
    torch.manual_seed(rank)
    q, k, v = [x[:, layout.index()] for x in inputs(64, 8, 4, torch.float32)[:3]]
    for method in ("ulysses", "gather"):
        y = spar.attention(q, k, torch.ones_like(v), layout, causal=True, dropout_p=0.25, method=method)
        assert abs(float(y.mean()) - 1) < 0.15 and float(y.std()) > 0.05, (method, y.mean(), y.std())


def test_dropout_keeps_the_mean(ranks: Ranks) -> None:
    ranks(2, check_dropout)
