"""spar.attention at the limits of what it computes: heads without width, empty batches, large scores."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from helpers.whole_attention import METHODS
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import spar
from spar import SequenceLayout
from spar._attention.kernels import KERNELS, kernel_for, reason_against

Group = dist.ProcessGroup
TOTAL = 12


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def recomputed(use_reentrant: bool) -> Callable[..., Any]:
    return lambda function, *inputs: checkpoint(function, *inputs, use_reentrant=use_reentrant)


def check_empty(rank: int, world: int, group: Group, batch: int, width: int, value_width: int) -> None:
    """Scores of no width are 0: each query gets the mean of its values. All ranks recompute alike."""
    layout = SequenceLayout.zigzag(TOTAL, group)
    plain: Callable[..., Any] = lambda function, *inputs: function(*inputs)  # noqa: E731
    ways = itertools.product(METHODS, (False, True), (1, 4), (plain, recomputed(False), recomputed(True)))
    for method, causal, heads, run in ways:
        generator = torch.Generator().manual_seed(heads)
        shapes = [(batch, TOTAL, n, w) for n, w in ((heads, width), (1, width), (1, value_width))]
        whole = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        expected = sdpa(*whole, causal)
        expected.square().sum().backward()  # type: ignore[no-untyped-call]
        own = [layout.shard(x.detach(), 1).clone().requires_grad_() for x in whole]
        y = run(lambda *x: spar.attention(*x, layout, causal=causal, method=method), *own)  # noqa: B023
        y.square().sum().backward()
        torch.testing.assert_close(y, layout.shard(expected, 1))
        for one, other in zip(own, whole, strict=True):
            torch.testing.assert_close(one.grad, layout.shard(other.grad, 1))


SHAPES = {"q and k": (2, 0, 4), "v": (2, 4, 0), "q, k and v": (2, 0, 0), "the batch": (0, 4, 4)}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("empty", SHAPES)
def test_heads_without_width_and_empty_batches(ranks: Ranks, empty: str, world: int) -> None:
    ranks(world, check_empty, *SHAPES[empty])


def test_no_kernel_but_blockwise_computes_heads_without_width() -> None:
    empty, v = torch.zeros(1, 1, 1, 0), torch.zeros(1, 1, 1, 8)
    for q, values in ((empty, v), (v, empty), (empty, empty)):
        assert kernel_for(None, q, values, None) is KERNELS["cpu"]["blockwise"]
        assert "width 0" in reason_against("flash", q, values, None)
