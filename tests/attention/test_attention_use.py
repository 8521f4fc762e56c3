# SPDX-License-Identifier: Apache-2.0
"""spar.attention in use: compiled, checkpointed, under autocast, with own kernels, across two sequences."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.whole_attention import METHODS, error_of, expected_of, inputs, whole_attention
from test_attention import DOCUMENTS
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import spar
from spar import SequenceLayout
from spar._attention import attention as attention_module

pytestmark = [pytest.mark.one_transport, pytest.mark.long]

Group = dist.ProcessGroup


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
        # ulysses: both ranks need the one key head
        whole = inputs(total, 4, 1 if method == "ulysses" else 2, torch.float32)
        results = []
        for run in (attend, compiled):
            *leaves, upper = [x[:, layout.index()].requires_grad_() for x in whole]
            y = run(*leaves, layout)
            results.append([y, *torch.autograd.grad(y, leaves, upper)])
        for eager, other in zip(*results, strict=True):
            torch.testing.assert_close(other, eager, rtol=1e-5, atol=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert graphs in ((1, 2) if rank == 0 else (0,)), graphs


# packed documents: rank 0 needs none of the keys that others send
@pytest.mark.compiler
@pytest.mark.parametrize(("method", "kind"), [("ulysses", "zigzag"), ("ring", "zigzag"), ("ring", "packed")])
def test_five_lengths_compile_twice(ranks: Ranks, method: str, kind: str) -> None:
    ranks(3 if (method, kind) == ("ring", "zigzag") else 2, check_compiled, method, kind, timeout=280)


def check_marked(rank: int, world: int, group: Group) -> None:
    """docs/compile.md: how to have one graph, and why not by mark_dynamic."""
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError  # imports sympy

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> Tensor:
        return spar.attention(q, k, v, layout, causal=True)

    def given(total: int) -> tuple[list[Tensor], SequenceLayout]:
        layout = SequenceLayout.even(total, group)
        return [x[:, layout.index()] for x in inputs(total, 4, 2, torch.float32)[:3]], layout

    graphs = torch._dynamo.utils.counters["stats"]
    for dynamic, mark, expected in ((True, None, 1), (None, torch._dynamo.maybe_mark_dynamic, 2)):
        torch._dynamo.reset()
        before = graphs["unique_graphs"]
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for total in (24, 29, 41, 50):
            leaves, layout = given(total)
            for x in leaves if rank == 0 and mark else ():
                mark(x, 1)
            y = (compiled if rank == 0 else attend)(*leaves, layout)
            torch.testing.assert_close(y, attend(*leaves, layout))
        assert graphs["unique_graphs"] - before == (expected if rank == 0 else 0), dynamic
    if rank == 0:  # it fails before an exchange
        torch._dynamo.reset()
        leaves, layout = given(24)
        torch._dynamo.mark_dynamic(leaves[0], 1)
        with pytest.raises(ConstraintViolationError, match="use maybe_mark_dynamic"):
            torch.compile(attend, fullgraph=True, backend="aot_eager")(*leaves, layout)


@pytest.mark.compiler
def test_marked_lengths_are_as_the_page_says(ranks: Ranks) -> None:
    ranks(2, check_marked, timeout=280)


def check_compiled_queries(rank: int, world: int, group: Group) -> None:
    """Rank 1 compiles a ring, needs no gradient of its keys and no key of rank 2: it makes all exchanges."""
    layout = SequenceLayout.even(4 * world, group)
    attend = partial(spar.attention, layout=layout, causal=True, method="ring")
    results = []
    for run in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager") if rank == 1 else attend):
        q, k, v, upper = [x[:, layout.index()] for x in inputs(layout.total, 2, 1, torch.float32)]
        y = run(q.requires_grad_(), k, v)
        results.append((y, *torch.autograd.grad(y, q, upper)))
        assert spar.all_gather(torch.tensor([rank]), group).tolist() == list(range(world)), "in step"
    torch.testing.assert_close(*results)


@pytest.mark.compiler
def test_compiled_ring_makes_all_exchanges(ranks: Ranks) -> None:
    ranks(3, check_compiled_queries, timeout=280)


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
    """Rotary embeddings and norms leave q and k in float32 beside a v of 16 bits, as torch's kernel takes."""
    layout = SequenceLayout.even(16, group)
    own = layout.index()
    *whole, upper = inputs(16, 4, 2, torch.float32)
    added = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).masked_fill_(
        ~torch.ones(16, 16, dtype=torch.bool).tril(), torch.finfo(torch.float32).min
    )
    for kind, narrow in itertools.product((torch.bfloat16, torch.float16), ((), (2,), (0, 1))):
        given = [x.to(kind) if i in narrow else x for i, x in enumerate(whole)]
        all_leaves = [x.clone().requires_grad_() for x in given]
        with torch.autocast("cpu", dtype=kind):
            q, k, v = (x.transpose(1, 2) for x in all_leaves)
            expected = scaled_dot_product_attention(q, k, v, attn_mask=added, enable_gqa=True).transpose(1, 2)
        wanted = torch.autograd.grad(expected, all_leaves, upper.to(kind))
        for method in METHODS:
            leaves = [x[:, own].clone().requires_grad_() for x in given]
            with torch.autocast("cpu", dtype=kind):
                y = spar.attention(*leaves, layout, mask=added, method=method)
            assert y.dtype == kind
            grads = torch.autograd.grad(y, leaves, upper[:, own].to(kind))
            for found, of_whole in zip((y, *grads), (expected, *wanted), strict=True):
                close = torch.finfo(kind).eps * 8
                torch.testing.assert_close(found, of_whole[:, own], rtol=close, atol=close)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = spar.attention(*[x[:, own].double() for x in whole], layout, mask=added.double())
        assert y.dtype == torch.float64, "autocast leaves float64"
        with pytest.raises(TypeError, match=r"v is of torch\.float64 on cpu; expected torch\.bfloat16"):
            spar.attention(*[x[:, own] for x in whole[:2]], whole[2][:, own].double(), layout)


def test_autocast_casts_before_it_exchanges(ranks: Ranks) -> None:
    ranks(2, check_autocast)


def check_second_derivative(rank: int, world: int, group: Group) -> None:
    """Of a kernel that can be differentiated twice, and in forward mode, by ulysses; the ring refuses."""
    layout = SequenceLayout.even(6, group)

    def twice(function: Callable[..., Tensor], own: Tensor) -> Tensor:
        q, k, v, upper = [x[:, own].requires_grad_() for x in inputs(6, 2, 2, torch.float64)]
        (grad,) = torch.autograd.grad(function(q, k, v), q, upper, create_graph=True)
        (again,) = torch.autograd.grad(grad.square().sum(), k)
        return again

    expected = twice(whole_attention, torch.arange(6))
    exact = partial(spar.attention, layout=layout, method="ulysses", kernel=whole_attention)
    found = twice(exact, layout.index())
    assert torch.allclose(found, expected[:, layout.index()])
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, x + 1) for x in inputs(6, 2, 2, torch.float64)[:3]]
        tangent = forward_ad.unpack_dual(whole_attention(*duals)).tangent
        own = [x[:, layout.index()] for x in duals]
        assert torch.allclose(forward_ad.unpack_dual(exact(*own)).tangent, tangent[:, layout.index()])
        with pytest.raises(NotImplementedError, match=r"attention: .*no forward-mode derivative"):
            spar.attention(*own, layout, method="ring")  # type: ignore[call-arg]
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        twice(partial(spar.attention, layout=layout, causal=True, method="ring"), layout.index())


def test_second_derivative_and_forward_mode(ranks: Ranks) -> None:
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
            partial(spar.attention, layout=layout, causal=True, method=method, kernel=kernel),
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
        way = partial(spar.attention, layout=layout, method=method, kernel=whole_attention)
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


def check_ambiguous_dims(rank: int, world: int, group: Group) -> None:
    """Of 4 tokens and 4 heads no shape tells which is which: the first call without dims warns."""
    layout = SequenceLayout.even(8, group)
    x, few = torch.zeros(1, 4, 4, 8), torch.zeros(1, 4, 2, 8)
    with mock.patch.object(attention_module, "_warned", False), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        spar.attention(x, few, few, layout)  # key heads tell
        spar.attention(x, x, x, layout, seq_dim=2, head_dim=1)
        spar.attention(x, x, x, layout, seq_dim=1, head_dim=2)
        assert not seen
        for causal in (False, True):
            spar.attention(x, x, x, layout, causal=causal)
    (warning,) = seen
    assert "q is of shape [1, 4, 4, 8] and read as [B, S, H, D]" in str(warning.message)
    assert warning.filename == __file__


def test_dims_that_no_shape_tells_are_a_warning(ranks: Ranks) -> None:
    ranks(2, check_ambiguous_dims)


def check_dropout(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.zigzag(64, group)
    torch.manual_seed(rank)
    q, k, v = [x[:, layout.index()] for x in inputs(64, 8, 4, torch.float32)[:3]]
    for method in ("ulysses", "gather"):
        y = spar.attention(q, k, torch.ones_like(v), layout, causal=True, dropout_p=0.25, method=method)
        assert abs(float(y.mean()) - 1) < 0.15 and float(y.std()) > 0.05, (method, y.mean(), y.std())


def test_dropout_keeps_the_mean(ranks: Ranks) -> None:
    ranks(2, check_dropout)
