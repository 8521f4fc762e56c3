# SPDX-License-Identifier: Apache-2.0
"""A group remembers what was decided of an attention, and decides anew where what decides it differs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.whole_attention import METHODS, whole_attention
from torch import Tensor

import spar
from spar import SequenceLayout, Spans
from spar._attention import attention as attention_module
from spar._group.registry import group_of

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
TOTAL, HEADS = 12, 4
LOWER = torch.ones(1, 1, TOTAL, TOTAL, dtype=torch.bool).tril()
WINDOWS = Spans.window(TOTAL, 3, 0), Spans.window(TOTAL, 4, 1)


def tensors(width: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(width)
    shape = 2, TOTAL, HEADS, width
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


def bias(slope: float) -> Callable[..., Tensor]:
    return lambda b, h, q, k: slope * (k - q)


def biased(slope: float) -> Tensor:
    places = torch.arange(TOTAL)
    return slope * (places - places[:, None]).float()[None, None]


def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return 2 * whole_attention(q, k, v)


# Options, and those of `whole_attention` that mean the same.
Case = tuple[dict[str, Any], dict[str, Any]]
CASES: dict[str, tuple[Case, Case]] = {
    "causal": (({"causal": True}, {"causal": True}), ({}, {})),
    "scale": (({"scale": 0.5}, {"scale": 0.5}), ({"scale": 2}, {"scale": 2.0})),
    "mask": (({"mask": LOWER}, {"mask": LOWER}), ({"mask": LOWER.mT.clone()}, {"mask": LOWER.mT})),
    "kind of mask": (({"mask": LOWER | True}, {}), ({"mask": LOWER.float()}, {"mask": LOWER.float()})),
    "spans": (
        ({"mask": WINDOWS[0]}, {"mask": WINDOWS[0].dense()}),
        ({"mask": WINDOWS[1]}, {"mask": WINDOWS[1].dense()}),
    ),
    "window": (
        ({"window": (3, 0)}, {"mask": WINDOWS[0].dense()}),
        ({"window": (4, 1)}, {"mask": WINDOWS[1].dense()}),
    ),
    "bias": (({"bias": bias(0.5)}, {"mask": biased(0.5)}), ({"bias": bias(-1.0)}, {"mask": biased(-1.0)})),
}


def check_cases(rank: int, world: int, group: Group, method: str) -> None:
    """Calls that differ in one thing alternate; each is decided once, and right each time."""
    layout, whole = SequenceLayout.even(TOTAL, group), tensors()
    own = layout.index()
    with mock.patch.object(attention_module, "_decided", wraps=attention_module._decided) as decided:
        for name, pair in CASES.items():
            for options, same in (*pair, *pair):
                expected = whole_attention(*whole, **same)[:, own]
                y = spar.attention(*(x[:, own] for x in whole), layout, method=method, **options)
                assert torch.allclose(y, expected, atol=1e-5), (name, options)
        # "bias" is the same for both: the function itself decides nothing.
        assert decided.call_count <= 2 * len(CASES) - 1
        first = decided.call_count
        for _ in range(2):
            q, k, v = (x[:, own] for x in whole)
            for dtype in (torch.float32, torch.float64):
                spar.attention(q.to(dtype), k.to(dtype), v.to(dtype), layout, method=method)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert spar.attention(q, k, v, layout, method=method).dtype == torch.bfloat16
            with torch.inference_mode():
                spar.attention(q, k, v, layout, method=method)
            y = spar.attention(q.requires_grad_(), k, v, layout, method=method)
            assert torch.autograd.grad(y.sum(), q)[0].shape == q.shape
            q.requires_grad_(False)
        assert decided.call_count <= first + 2, "modes and gradients decide nothing"


@pytest.mark.parametrize("method", METHODS)
def test_calls_that_differ_alternate(ranks: Ranks, method: str) -> None:
    ranks(2, check_cases, method)


def check_values(rank: int, world: int, group: Group) -> None:
    """Values that change in place, and functions, are those of the call."""
    layout, whole = SequenceLayout.even(TOTAL, group), tensors()
    own = layout.index()
    q, k, v = (x[:, own] for x in whole)
    mask, sinks, scale = LOWER.clone(), torch.zeros(HEADS), torch.tensor(0.5)
    for _ in range(2):
        expected = whole_attention(*whole, mask=mask)[:, own]
        assert torch.allclose(spar.attention(q, k, v, layout, mask=mask), expected, atol=1e-5)
        mask.logical_not_()
        mask[..., 0] = True
        scaled = spar.attention(q, k, v, layout, scale=scale)  # type: ignore[arg-type]
        assert torch.allclose(scaled, whole_attention(*whole, scale=float(scale))[:, own], atol=1e-5)
        scale *= 3
        before = spar.attention(q, k, v, layout, sinks=sinks)
        sinks += 5
        assert not torch.allclose(before, spar.attention(q, k, v, layout, sinks=sinks), atol=1e-3)
    for kernel, factor in ((whole_attention, 1), (doubled, 2), (whole_attention, 1)):
        y = spar.attention(q, k, v, layout, kernel=kernel)
        assert torch.allclose(y, factor * whole_attention(*whole)[:, own], atol=1e-5)


def test_values_are_those_of_the_call(ranks: Ranks) -> None:
    ranks(2, check_values)


# What is right, and then what equals it and is wrong.
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "a bool in a window": ({"window": (1, 0)}, {"window": (True, 0)}, TypeError, "window is"),
    "a bool as dim": ({"seq_dim": 1}, {"seq_dim": True}, TypeError, "seq_dim"),
    "a bool as dropout": ({"dropout_p": 0.0}, {"dropout_p": True}, ValueError, "dropout_p"),
    "a bool as softcap": ({"softcap": 1.0}, {"softcap": True}, TypeError, "softcap"),
    "no function": ({"bias": bias(1.0)}, {"bias": 1.0}, TypeError, "bias is"),
    "no kernel": ({"kernel": whole_attention}, {"kernel": 1}, TypeError, "kernel is"),
    "a mask that learns": (
        {"mask": LOWER.float(), "method": "gather"},
        {"mask": LOWER.float().requires_grad_(), "method": "gather"},
        ValueError,
        "mask is a tensor that requires a gradient",
    ),
}


def check_wrong(rank: int, world: int, group: Group) -> None:
    layout, (q, k, v) = SequenceLayout.even(TOTAL, group), tensors()
    q, k, v = (x[:, layout.index()] for x in (q, k, v))
    for name, (right, wrong, kind, text) in WRONG.items():
        for _ in range(2):
            spar.attention(q, k, v, layout, **right)
            with pytest.raises(kind, match=text):
                spar.attention(q, k, v, layout, **wrong)
        assert group_of(group).count() > 0, name


def test_wrong_arguments_that_equal_right_ones_raise(ranks: Ranks) -> None:
    ranks(2, check_wrong)


def check_bounded(rank: int, world: int, group: Group) -> None:
    """Neither the number of calls nor what they pass stays."""
    q = torch.zeros(1, 2, 2, 8)
    for total in range(2 * world, 2 * world + 300):
        layout = SequenceLayout("local", (2, *[total - 2 * world + 2] * (world - 1)), group)
        x = q if rank == 0 else torch.zeros(1, layout.sizes[rank], 2, 8)
        spar.attention(x, x, x, layout, method="gather")
    assert len(group_of(group).exchanges) < 300
    layout = SequenceLayout.even(TOTAL, group)
    x, spans = torch.zeros(1, layout.sizes[rank], 2, 8), Spans.window(TOTAL, 2, 1)
    function = bias(1.0)
    for method in METHODS:
        spar.attention(x, x, x, layout, method=method, mask=spans)
        spar.attention(x, x, x, layout, method=method, bias=function)
    seen = weakref.ref(x), weakref.ref(spans), weakref.ref(function)
    del x, spans, function
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3


def test_what_is_remembered_is_bounded(ranks: Ranks) -> None:
    ranks(2, check_bounded)
