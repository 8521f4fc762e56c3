# SPDX-License-Identifier: Apache-2.0
"""spar.attention at its limits: no width, empty batches, large scores, failures after the last exchange."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

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
from spar._attention.kernels.kernel import BlockInputs, Needs

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
        own = [layout.shard(x.detach(), 1, None).clone().requires_grad_() for x in whole]
        y = run(lambda *x: spar.attention(*x, layout, causal=causal, method=method), *own)  # noqa: B023
        y.square().sum().backward()
        torch.testing.assert_close(y, layout.shard(expected, 1, None))
        for one, other in zip(own, whole, strict=True):
            torch.testing.assert_close(one.grad, layout.shard(other.grad, 1, None))


SHAPES = {"q and k": (2, 0, 4), "v": (2, 4, 0), "q, k and v": (2, 0, 0), "the batch": (0, 4, 4)}


@pytest.mark.one_transport  # test_ops.py exchanges empty tensors over each
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("empty", SHAPES)
def test_heads_without_width_and_empty_batches(ranks: Ranks, empty: str, world: int) -> None:
    ranks(world, check_empty, *SHAPES[empty])


def check_no_sink(rank: int, world: int, group: Group) -> None:
    """A sink of -inf changes nothing, also for queries without keys; its gradient is 0."""
    layout = SequenceLayout.even(TOTAL, group)
    mask = spar.Spans.causal(TOTAL) & spar.Spans.padding(torch.arange(TOTAL)[None] >= 5)
    for method in METHODS:
        results = []
        for sinks in (None, torch.full((4,), -torch.inf, requires_grad=True)):
            torch.manual_seed(rank)
            leaves = [torch.randn(1, layout.sizes[rank], 4, 8, requires_grad=True) for _ in range(3)]
            y = spar.attention(*leaves, layout, mask=mask, sinks=sinks, method=method)
            y.square().sum().backward()
            results.append([y, *[x.grad for x in leaves]])
        torch.testing.assert_close(results[1], results[0])
        assert sinks is not None and sinks.grad is not None and not sinks.grad.any()


@pytest.mark.parametrize("world", [1, 3])
def test_sinks_of_minus_infinity_are_none(ranks: Ranks, world: int) -> None:
    ranks(world, check_no_sink)


def check_inference(rank: int, world: int, group: Group) -> None:
    """Masks that are made in inference mode are compared, too."""
    layout, x = SequenceLayout.even(TOTAL, group), torch.randn(1, TOTAL // world, 4, 8)
    for method in METHODS:
        with torch.inference_mode():
            mask = torch.ones(TOTAL, TOTAL, dtype=torch.bool).tril()
            for _ in range(2):
                y = spar.attention(x, x, x, layout, mask=mask, method=method)
            torch.testing.assert_close(y, spar.attention(x, x, x, layout, causal=True, method=method))
            mask[rank:] = False
            with pytest.raises(spar.MismatchError, match="hash of the mask"):
                spar.attention(x, x, x, layout, mask=mask, method=method)


def test_masks_of_inference_mode(ranks: Ranks) -> None:
    ranks(2, check_inference)


def test_no_kernel_but_blockwise_computes_heads_without_width() -> None:
    empty, v = torch.zeros(1, 1, 1, 0), torch.zeros(1, 1, 1, 8)
    for q, values in ((empty, v), (v, empty), (empty, empty)):
        assert kernel_for(None, q, values, Needs()) is KERNELS["cpu"]["blockwise"]
        assert "width 0" in reason_against("flash", q, values, Needs())


def softmax_of(inputs: list[Tensor], upper: Tensor, kind: torch.dtype) -> list[Tensor]:
    """Return the output and the gradients by torch's softmax of all scores."""
    q, k, v = (x.to(kind).requires_grad_() for x in inputs)
    y = (q @ k.transpose(-1, -2) * 0.125).softmax(-1) @ v
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), upper.to(kind))]


@pytest.mark.parametrize("size", [1.0, 100.0, 1000.0, 3000.0])
def test_blockwise_is_as_exact_as_a_softmax_for_large_scores(size: float) -> None:
    errors = {name: torch.zeros(4, dtype=torch.float64) for name in ("blockwise", "softmax")}
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        q, k, v, upper = (torch.randn(1, 4, 128, 64, generator=generator) for _ in range(4))
        inputs = [q * size**0.5, k * size**0.5, v]
        expected = softmax_of(inputs, upper, torch.float64)
        kernel, block = KERNELS["cpu"]["blockwise"], BlockInputs(*inputs, False, None, 0.125)
        out, lse = kernel.forward(block)
        found = {
            "blockwise": [out, *kernel.backward(block, upper, out, lse)],
            "softmax": softmax_of(inputs, upper, torch.float32),
        }
        for name, tensors in found.items():
            errors[name] += torch.stack(
                [(a - b).norm() / b.norm() for a, b in zip(tensors, expected, strict=True)]
            )
    ratios = (errors["blockwise"] / errors["softmax"]).tolist()
    assert max(ratios[:3]) < 1.5, ratios  # of the output, dq and dk
    assert ratios[3] < 3, ratios  # the weights of dv are exp(scores - lse), whose lse is rounded


def fail_late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise RuntimeError("out of registers")


def check_late_failure(rank: int, world: int, group: Group, method: str) -> None:
    """Rank 1's kernel fails once its peers wait for nothing of this forward: their next call raises."""
    layout, kernel = SequenceLayout.even(TOTAL, group), KERNELS["cpu"]["flash"]
    report = pytest.raises(
        spar.MismatchError, match=r"(?s)^.*attention.*rank 1 failed: RuntimeError: out of reg"
    )
    last = max(world - 1, 1) if method == "ring" else 0

    def attend(x: Tensor, fails: bool = False) -> Tensor:
        blocks, right = itertools.count(), kernel.forward

        def late(block: BlockInputs) -> Any:
            return fail_late(*block[:3]) if next(blocks) == last else right(block)

        with mock.patch.object(kernel, "forward", late) if fails else contextlib.nullcontext():
            return spar.attention(x, x, x, layout, method=method, kernel="flash")

    for then in ("backward", "the next layer", "a retry"):
        x = torch.full((1, TOTAL // world, 2, 8), 2.0, requires_grad=then != "the next layer")
        begin = time.monotonic()
        if rank == 1:
            with pytest.raises(RuntimeError, match="out of registers"):
                attend(x, fails=True)
        else:
            y = attend(x)
            with report:
                attend(y) if then == "the next layer" else y.sum().backward()  # type: ignore[no-untyped-call]
        if then == "a retry":
            assert torch.equal(attend(x), x)
        assert time.monotonic() - begin < 10
        assert spar.all_gather(torch.tensor([rank]), group).tolist() == list(range(world)), then


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_kernel_that_fails_after_the_last_exchange(ranks: Ranks, method: str, world: int) -> None:
    ranks(world, check_late_failure, method)


def check_failure_of_all(rank: int, world: int, group: Group) -> None:
    layout, x = SequenceLayout.even(TOTAL, group), torch.zeros(1, TOTAL // world, 2, 8)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of registers"):
            spar.attention(x, x, x, layout, method="gather", kernel=fail_late)
    assert spar.all_gather(torch.tensor([rank]), group).tolist() == list(range(world))


def test_kernel_that_fails_on_all_ranks(ranks: Ranks) -> None:
    ranks(3, check_failure_of_all)
