# SPDX-License-Identifier: Apache-2.0
"""Columns of one tensor, whose gradients are joined at once: as by torch, and what is left to torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from torch import Tensor

import spar
from spar import _C, SequenceLayout
from spar._group.registry import group_of
from spar.integrations._transformers.tokens import Tokens
from spar.ops import columns

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
TOKENS, WIDTH = 1024, 8
SIZES = [2 * WIDTH, WIDTH, 5 * WIDTH]  # two rows of these tokens in float64 are 1 MiB


class Scaled(torch.autograd.Function):
    """A view whose gradient is another than torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 3 * grad


def heads(x: Tensor) -> list[Tensor]:
    return [part.unflatten(2, (-1, WIDTH)) for part in x.split(SIZES, 2)]


def rows(x: Tensor) -> list[Tensor]:
    """Columns of a tensor [B, C, S], as a convolution returns it."""
    return [part.reshape(len(x), -1, part.size(2), 1) for part in x.transpose(1, 2).split(SIZES, 2)]


def turned(x: Tensor) -> list[Tensor]:
    q, k, v = heads(x)
    return [v, q, k]


def hooked(x: Tensor) -> list[Tensor]:
    q, k, v = heads(x)
    q.register_hook(lambda grad: 5 * grad)
    return [q, k, v]


# How a tensor is cut: whether its gradient is joined at once.
CUTS: dict[str, tuple[Callable[[Tensor], list[Tensor]], bool]] = {
    "heads": (heads, True),
    "rows": (rows, True),
    "in another order": (turned, True),
    "chunks": (lambda x: [part[..., None] for part in x.chunk(4, 2)], True),
    "by slices": (lambda x: [x[:, :, :9, None], x[:, :, 9:, None]], True),
    "two of three": (lambda x: heads(x)[:2], False),
    "one of them twice": (lambda x: [heads(x)[i] for i in (0, 0, 2)], False),
    "half the tokens": (lambda x: [part[:, : TOKENS // 2] for part in heads(x)], False),
    "one row": (lambda x: [part[:1] for part in heads(x)], False),
    "of tokens": (lambda x: [part[..., None] for part in x.chunk(2, 1)], False),
    "another gradient": (lambda x: heads(Scaled.apply(x)), False),  # type: ignore[no-untyped-call]
    "another gradient of one": (lambda x: [Scaled.apply(heads(x)[0]), *heads(x)[1:]], False),  # type: ignore[no-untyped-call]
    "a hook": (hooked, False),
    "another dtype": (
        lambda x: [torch.view_as_complex(pair.unflatten(3, (-1, 2))) for pair in heads(x)],
        False,
    ),
    "copies": (lambda x: [part.clone() for part in heads(x)], False),
    "sum of two": (lambda x: heads(x + x.sin()), True),
}


def check_cuts(rank: int, world: int, group: Group) -> None:
    generator = torch.Generator().manual_seed(rank)
    for name, (cut, joins) in CUTS.items():
        shape = (2, sum(SIZES), TOKENS) if cut is rows else (2, TOKENS, sum(SIZES))
        leaf = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        parts = cut(leaf * 2)
        joined = columns.with_one_gradient(parts, group)
        assert [x.grad_fn.name() == "ColumnsBackward" for x in joined if x.grad_fn] == [joins] * len(parts), (
            name
        )
        for x, part in zip(joined, parts, strict=True):
            torch.testing.assert_close(x, part, rtol=0, atol=0)
        uppers = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in parts]
        (expected,) = torch.autograd.grad(cut(leaf * 2), leaf, uppers, materialize_grads=True)
        (found,) = torch.autograd.grad(joined, leaf, uppers)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)
        if joins:
            assert_second(cut, leaf, group)


def assert_second(cut: Callable[[Tensor], list[Tensor]], leaf: Tensor, group: Group) -> None:
    """The gradient of a gradient, and that where one part has none."""
    results = []
    for join in (False, True):
        parts = cut(leaf * leaf)
        if join:
            parts = columns.with_one_gradient(parts, group)
        (first,) = torch.autograd.grad(sum((x**3).sum() for x in parts), leaf, create_graph=True)
        (one,) = torch.autograd.grad(parts[0].sum(), leaf, retain_graph=True)
        results.append((first, torch.autograd.grad(first.square().sum(), leaf)[0], one))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def check_memory(rank: int, world: int, group: Group) -> None:
    """The gradient lies in the arena, as long as exchanges have half of it; small ones are torch's."""
    found: list[bool] = []

    def taken(tokens: int, batch: int = 1) -> bool:
        x = torch.randn(batch, tokens, sum(SIZES), requires_grad=True).exp()
        x.register_hook(lambda grad: found.append(_C.in_arena(grad.data_ptr())))
        parts = columns.with_one_gradient(heads(x), group)
        sum(part.sum() for part in parts).backward()
        return found[-1]

    spar.init(group, "cpu")
    assert taken(4 * TOKENS) and not taken(8)
    cap, reserved, *_ = _C.arena_stats()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_C, "arena_stats", lambda: (cap, reserved, cap // 2, cap // 2, 0, 0))
        assert not taken(4 * TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        take = _C.arena_take
        patch.setattr(_C, "arena_take", lambda size: take(cap + size))  # as if no run of pages were as long
        assert not taken(4 * TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_of(group), "own_output", True)  # SPAR_OUTPUT=torch
        assert not taken(4 * TOKENS)
    assert taken(4 * TOKENS)
    with torch.no_grad():
        parts = heads(torch.randn(1, 4 * TOKENS, sum(SIZES)))
        assert all(x is y for x, y in zip(columns.with_one_gradient(parts, group), parts, strict=True))


def mixed(v: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A function of whole sequences; key heads may be fewer."""
    q, k = [x.repeat_interleave(v.size(2) // x.size(2), 2) for x in (q, k)]
    return v.cumsum(1) * k.sin() + q


def check_layer(rank: int, world: int, group: Group) -> None:
    """A split behind a function of a layer, as transformers' hybrid models make it, on sharded tokens."""
    tokens = Tokens(SequenceLayout.even(4 * TOKENS, group))
    whole = torch.randn(1, 4 * TOKENS, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = tokens.layout.index()

    def gradient(x: Tensor, run: Callable[..., Tensor]) -> Tensor:
        leaf = x.clone().requires_grad_()
        q, k, v = [part.unflatten(2, (-1, WIDTH)) for part in leaf.sin().split([16, 16, 32], 2)]
        run(mixed, [v, q, k]).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    expected = gradient(whole, lambda fn, tensors: fn(*tensors))
    torch.testing.assert_close(gradient(whole[:, own], tokens.by_heads), expected[:, own])


@pytest.mark.parametrize("check", [check_cuts, check_memory, check_layer])
def test_columns_have_one_gradient(ranks: Ranks, check: Callable[..., None]) -> None:
    ranks(2, check)
