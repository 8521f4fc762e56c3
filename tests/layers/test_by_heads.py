# SPDX-License-Identifier: Apache-2.0
"""spar.by_heads against one process: dtypes, grouped heads, parameters, documents, ranks without heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import spar
from spar import MismatchError, SequenceLayout
from spar._group.registry import group_of

# Exchanges over each transport are tested by other modules.
pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
TOTAL = 23
DOCUMENTS = [7, 0, 1, 15]
LAYOUTS: dict[str, Callable[[Group], SequenceLayout]] = {
    "even": lambda group: SequenceLayout.even(TOTAL, group),
    "zigzag": lambda group: SequenceLayout.zigzag(TOTAL, group),
    "packed": lambda group: SequenceLayout.packed(DOCUMENTS, group),
    "balanced": lambda group: SequenceLayout.balanced(DOCUMENTS, group),
    "even, documents": lambda group: SequenceLayout.even(TOTAL, group).with_documents(DOCUMENTS),
    "zigzag, documents": lambda group: SequenceLayout.zigzag(TOTAL, group).with_documents(DOCUMENTS),
    "joint, documents": lambda group: SequenceLayout.joint(9, TOTAL - 9, group).with_documents(DOCUMENTS),
    "few tokens": lambda group: SequenceLayout.even(2, group),
}


def recurrence(v: Tensor, k: Tensor, gate: Tensor, decay: Tensor | None) -> Tensor:
    """A linear attention, token by token: v [B, S, H, D], k [B, S, K, D], gate [B, S, H], decay [H]."""
    k = k.repeat_interleave(v.size(2) // k.size(2), 2)
    state, outputs = v.new_zeros(v.size(0), v.size(2), v.size(3)), []
    for i in range(v.size(1)):
        state = state * torch.sigmoid(gate[:, i, :, None]).to(v.dtype)
        if decay is not None:
            state = state * decay[:, None].to(v.dtype)
        state = state + v[:, i] * k[:, i]
        outputs.append(state.sin())
    return torch.stack(outputs, 1) if outputs else v


def whole(v: Tensor, k: Tensor, gate: Tensor, decay: Tensor, documents: list[int]) -> Tensor:
    parts = [x.split(documents, 1) for x in (v, k, gate)]
    return torch.cat([recurrence(*part, decay) for part in zip(*parts, strict=True)], 1)


def check(rank: int, world: int, group: Group, heads: int, key_heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    for kind, make in LAYOUTS.items():
        layout = make(group)
        total = layout.total
        documents = DOCUMENTS if layout.is_packed else [total]
        shapes = (2, total, heads, 6), (2, total, key_heads, 6), (2, total, heads), (heads,)
        inputs = [torch.randn(shape, generator=generator) for shape in shapes]
        for dtypes in ((torch.float64,) * 4, (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)):
            values = [x.to(dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
            leaves = [x.clone().requires_grad_() for x in values]
            expected = whole(*leaves, documents)  # type: ignore[arg-type]
            upper = torch.randn(expected.shape, generator=generator).to(dtypes[0])
            gradients = torch.autograd.grad(expected, leaves, upper)
            own = layout.index()
            mine = [x[:, own].clone().requires_grad_() for x in values[:3]]
            decay = values[3].clone().requires_grad_()

            run = partial(spar.by_heads, recurrence, layout=layout, parameters=[decay])
            for function in (run, partial(checkpoint, run, use_reentrant=False)):
                y = function(mine)
                found = torch.autograd.grad(y, [*mine, decay], upper[:, own].to(y.dtype))
                assert y.is_contiguous() and y.dtype == dtypes[0]
                sums = found[3].double()
                dist.all_reduce(sums, group=group)
                limit = 1e-10 if dtypes[0] == torch.float64 else 0.02
                pairs = [(y, expected[:, own]), (sums, gradients[3])]
                pairs += [(x, g[:, own]) for x, g in zip(found[:3], gradients[:3], strict=True)]
                for x, e in pairs:
                    if x.numel():
                        x, e = x.detach().double(), e.detach().double()
                        scale = max(1.0, float(e.abs().max()))
                        assert float((x - e).abs().max()) / scale < limit, (kind, dtypes)


@pytest.mark.parametrize(
    ("world", "heads", "key_heads"),
    [*((world, 4, 2) for world in (1, 2, 3, 4)), (2, 3, 1), (3, 3, 1), (3, 2, 2), (4, 6, 3)],
)
def test_by_heads_matches_one_process(ranks: Ranks, world: int, heads: int, key_heads: int) -> None:
    ranks(world, check, heads, key_heads)


def masked(q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
    k = k.repeat_interleave(q.size(2) // k.size(2), 2)
    return torch.where(keep, q * k.cumsum(1), 0.0).to(q.dtype)


def check_dtypes(rank: int, world: int, group: Group, kept: torch.dtype) -> None:
    """Gradients of a wide key head that several ranks need, beside narrow queries and a narrower mask."""
    layout = SequenceLayout.zigzag(TOTAL, group)
    own = layout.index()
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, TOTAL, n, 3, generator=generator) for n in (4, 1))
    keep = (torch.rand(2, TOTAL, 4, 1, generator=generator) > 0.5).to(kept)
    for dtypes in ((torch.float32, torch.float64), (torch.bfloat16, torch.float32)):
        leaves = [x.to(dtype).requires_grad_() for x, dtype in zip((q, k), dtypes, strict=True)]
        expected = masked(*leaves, keep.bool())
        gradients = torch.autograd.grad(expected.double().square().sum(), leaves)
        mine = [x.detach()[:, own].clone().requires_grad_() for x in leaves]
        y = spar.by_heads(lambda q, k, keep: masked(q, k, keep.bool()), [*mine, keep[:, own]], layout)
        found = torch.autograd.grad(y.double().square().sum(), mine)
        assert torch.equal(y, expected[:, own])
        for x, gradient in zip(found, gradients, strict=True):
            limits = {"rtol": 1e-5, "atol": 1e-5} if x.dtype != torch.bfloat16 else {}
            torch.testing.assert_close(x, gradient[:, own], **limits)


@pytest.mark.one_transport
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kept", [torch.bool, torch.uint8, torch.int16, torch.int64])
def test_gradients_beside_tensors_of_other_dtypes(ranks: Ranks, world: int, kept: torch.dtype) -> None:
    ranks(world, check_dtypes, kept)


def check_uses(rank: int, world: int, group: Group) -> None:
    """One exchange each way whatever the dtypes are; tuples; cu_seqlens; other dims."""
    layout = SequenceLayout.packed(DOCUMENTS, group)
    own = layout.index()
    x = torch.arange(TOTAL * 4 * 3, dtype=torch.float32).view(1, TOTAL, 4, 3)
    seen: list[Any] = []

    def two(a: Tensor, b: Tensor, ids: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((cu_seqlens.tolist(), ids[0, :, 0].tolist()))
        return a.cumsum(1), b * 2

    ids = torch.arange(TOTAL)[None, :, None].expand(1, TOTAL, 4)
    calls = group_of(group).count()
    one, other = spar.by_heads(
        two, [x[:, own], x[:, own].bfloat16(), ids[:, own]], layout, like=(0, 1), cu_seqlens=True
    )
    assert group_of(group).count() - calls == 2
    assert torch.equal(one, x.cumsum(1)[:, own]) and torch.equal(other, (x.bfloat16() * 2)[:, own])
    assert seen == [([0, 7, 7, 8, 23], list(range(TOTAL)))]
    y = spar.by_heads(lambda a: a.flip(2), [x[:, own].transpose(1, 2)], layout, seq_dim=2, head_dim=1)
    flipped = torch.cat([part.flip(1) for part in x.split(DOCUMENTS, 1)], 1)
    assert torch.equal(y, flipped[:, own].transpose(1, 2))


def test_by_heads_makes_one_exchange_each_way(ranks: Ranks) -> None:
    ranks(2, check_uses)


def check_errors(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.even(8, group)
    x = torch.zeros(1, layout.sizes[rank], 4, 2)
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, r"tensors is an empty list", {"tensors": []}),
        (
            ValueError,
            r"tensors\[1\] is of 3 heads; expected a number that divides 4",
            {"tensors": [x, x[:, :, :3]]},
        ),
        (ValueError, r"like is 2", {"like": 2}),
        (
            ValueError,
            r"parameters\[0\] is of shape \[3\]; expected \[4, \.\.\.\]",
            {"parameters": [torch.zeros(3)]},
        ),
        (ValueError, r"the result of fn is of shape", {"fn": lambda x: x[:, :1]}),
        (ValueError, r"the result of fn is a NoneType", {"fn": lambda x: None}),
        (ValueError, r"input_ is of size 8 in dim 1; expected 4", {"tensors": [torch.zeros(1, 8, 4, 2)]}),
        (ValueError, r"head_dim is 2; expected -2 to 1 for tensors\[0\]", {"tensors": [x[..., 0, 0]]}),
    ]
    for kind, message, arguments in cases:
        given: dict[str, Any] = {"fn": lambda x: x, "tensors": [x], **arguments}
        with pytest.raises(kind, match=message):
            spar.by_heads(given.pop("fn"), given.pop("tensors"), layout, **given)
    with pytest.raises(MismatchError):
        spar.by_heads(lambda x: x, [x if rank else x.double()], layout)
    with pytest.raises(MismatchError if rank else ValueError, match="tensors is an empty list"):
        spar.by_heads(lambda x: x, [x] if rank else [], layout)
    # Where all ranks have heads, results may have another dtype than the tensors.
    assert torch.equal(spar.by_heads(lambda x: x.bfloat16(), [x], layout), x.bfloat16())


def test_errors_of_by_heads(ranks: Ranks) -> None:
    ranks(2, check_errors)


def check_compiled(rank: int, world: int, group: Group) -> None:
    """The first rank compiles, which takes seconds; its calls match the other's eager ones."""

    def run(v: Tensor, gate: Tensor, layout: SequenceLayout) -> Tensor:
        def fn(v: Tensor, gate: Tensor) -> Tensor:
            return v.cumsum(1) * gate[..., None].cumsum(1).to(v.dtype)

        y: Tensor = spar.by_heads(fn, [v * 2, gate], layout)
        return y

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager") if rank == 0 else run
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for total in (12, 17, 31):
        layout, results = SequenceLayout.zigzag(total, group), []
        generator = torch.Generator().manual_seed(total)
        own = layout.index()
        v = torch.randn(1, total, 3, 4, generator=generator).bfloat16()[:, own]
        gate = torch.randn(1, total, 3, generator=generator)[:, own]
        for function in (run, compiled):
            leaves = [x.clone().requires_grad_() for x in (v, gate)]
            y = function(*leaves, layout)
            y.float().square().sum().backward()
            results.append((y, *[x.grad for x in leaves]))
        torch.testing.assert_close(results[1], results[0])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert graphs in ((1, 2) if rank == 0 else (0,)), graphs


@pytest.mark.compiler
def test_by_heads_compiles(ranks: Ranks) -> None:
    ranks(2, check_compiled, timeout=280)
