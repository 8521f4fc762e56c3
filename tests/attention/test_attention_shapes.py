# SPDX-License-Identifier: Apache-2.0
"""spar.attention, by_heads and by_state of tensors without values: on meta, and under FakeTensorMode."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.whole_attention import METHODS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import spar
from spar import SequenceLayout, Spans
from spar._attention.spans import closed

pytestmark = pytest.mark.one_transport
Group = dist.ProcessGroup
TOTAL = 11
KEYWORDS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (3, 0)},
    {"softcap": 2.0, "bias": lambda b, h, q, k: 0.1 * (k - q)},
    {"return_lse": True},
    {"dropout_p": 0.1},
    {"dropout_p": 0.1, "window": (3, 0)},
]


def check_shapes(rank: int, world: int, group: Group, device: str) -> None:
    layouts = SequenceLayout.zigzag(TOTAL, group), SequenceLayout.even(TOTAL, group).with_documents([5, 6])
    closed.cache_clear()
    with FakeTensorMode() if device == "cpu" else nullcontext():
        for each in itertools.product(enumerate(layouts), enumerate(METHODS), enumerate(KEYWORDS)):
            places, (layout, method, keywords) = zip(*each, strict=True)
            if method == "ring" and "dropout_p" in keywords:
                continue
            n = layout.sizes[rank]
            q, k = (torch.randn(2, n, h, 8, device=device, requires_grad=True) for h in (4, 2))
            sinks = torch.zeros(4, device=device) if keywords == {} else None
            masks: list[Any] = [None, torch.ones(TOTAL, TOTAL, dtype=torch.bool, device=device)]
            masks.append(Spans.causal(TOTAL) | Spans.prefix(TOTAL, 2))
            # each with all methods and keywords, if not with all pairs of these
            mask = masks[sum(places) % len(masks)]
            outs = spar.attention(q, k, k, layout, mask=mask, sinks=sinks, method=method, **keywords)
            y, *lse = outs if isinstance(outs, tuple) else (outs,)
            assert y.shape == q.shape and y.device.type == device
            assert all(x.shape == y.shape[:3] for x in lse)
            for x, grad in zip((q, k), torch.autograd.grad(y.sum(), (q, k)), strict=True):
                assert grad.shape == x.shape
        for layout in layouts:
            x = torch.randn(2, layout.sizes[rank], 4, 8, device=device, requires_grad=True)

            def step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
                return x + state.sum(), state

            def factor(x: Tensor) -> Tensor:
                return x.new_ones(2, 4, 8, 1)

            made = [spar.by_heads(lambda y: y.cumsum(1), [x], layout), layout.shift(x, 1)]
            made.append(spar.by_state(step, [x], layout, (2, 4, 8, 8), factor, decay=True))
            assert all(y.shape == x.shape and y.device.type == device for y in made)
        for kind in ("documents", "padding", "together"):
            with pytest.raises(ValueError, match="is a meta or fake tensor; expected values"):
                getattr(Spans, kind)(torch.zeros(1, 4, dtype=torch.int64, device=device))
    # What was remembered has values.
    window = closed(TOTAL, TOTAL, False, (3, 0), ())
    assert type(window.ends) is Tensor and torch.equal(window.ends, Spans.window(TOTAL, 3, 0).ends)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_tensors_without_values_yield_shapes(ranks: Ranks, device: str) -> None:
    ranks(2, check_shapes, device, timeout=240)
