# SPDX-License-Identifier: Apache-2.0
"""Another flash attention in the place of torch's own, as torch activates FlashAttention-3 and -4."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import flash_attn_standin, flash_varlen_standin
from helpers.whole_attention import METHODS, error_of, expected_of, inputs
from torch import Tensor

import spar
from spar import SequenceLayout
from spar._attention.kernels import KERNELS
from spar._attention.kernels.aten import FlashCuda

pytestmark = [
    pytest.mark.one_transport,
    pytest.mark.skipif(
        not hasattr(torch.nn.attention, "activate_flash_attention_impl"),
        reason=f"torch {torch.__version__} has one flash attention",
    ),
]

Group = dist.ProcessGroup
NAME = "spar's stand-in"
LENGTHS = (7, 0, 25, 1, 14)


def forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    """As aten's _flash_attention_forward; queries without keys have -inf, where FlashAttention-2 has inf."""
    out, lse, *others = flash_varlen_standin.forward(q, k, v, *arguments, **options)
    return out, lse.masked_fill(lse == torch.inf, -torch.inf), *others


def dense_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float,
) -> tuple[Any, ...]:
    """As aten's _scaled_dot_product_flash_attention, with all results."""
    out, lse = flash_attn_standin.aten_forward(q, k, v, dropout_p, causal, debug, scale=scale)
    none = torch.empty((), dtype=torch.uint64)
    return out, lse, None, None, q.size(2), k.size(2), none, none, q.new_empty(0)


def dense_backward(*arguments: Any, scale: float) -> tuple[Tensor, ...]:
    return tuple(flash_attn_standin.aten_backward(*arguments, scale=scale))


class Handle:
    """What torch removes the implementation by."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        for name, function in (
            ("_flash_attention_forward", forward),
            ("_flash_attention_backward", flash_varlen_standin.backward),
            ("_scaled_dot_product_flash_attention", dense_forward),
            ("_scaled_dot_product_flash_attention_backward", dense_backward),
        ):
            self._library.impl(name, function, "CPU")

    def remove(self) -> None:
        self._library._destroy()


@contextmanager
def activated() -> Iterator[None]:
    """Let CPU tensors reach the kernel "flash" of GPUs, whose ops have no other kernels for CPUs."""
    attention = torch.nn.attention
    attention.register_flash_attention_impl(NAME, register_fn=Handle)
    with (
        mock.patch.dict(KERNELS["cpu"], flash=FlashCuda()),
        mock.patch("torch.cuda.get_device_capability", lambda device: (9, 0)),
    ):
        attention.activate_flash_attention_impl(NAME)
        try:
            yield
        finally:
            attention.restore_flash_attention_impl()


def check_reached(rank: int, world: int, group: Group) -> None:
    total = sum(LENGTHS)
    even, packed = SequenceLayout.even(total, group), SequenceLayout.packed(LENGTHS, group)
    whole = inputs(total, 4, 2, torch.float64)
    place = torch.arange(total)
    ahead = place - place[:, None]
    window = ((ahead >= -5) & (ahead <= 0))[None, None]
    of_one, of_windows = {"aten forward", "aten backward"}, {"varlen forward", "varlen backward"}
    cases: list[tuple[SequenceLayout, dict[str, Any], dict[str, Any], set[str]]] = [
        (even, {"causal": True}, {"causal": True}, of_one),
        (even, {"window": (5, 0)}, {"mask": window}, of_windows),
        (packed, {"causal": True}, {"causal": True, "documents": LENGTHS}, of_windows),
        (packed, {}, {"documents": LENGTHS}, of_windows),
    ]
    for layout, keywords, expected, ops in cases:
        for method in METHODS:
            attend = partial(spar.attention, layout=layout, method=method, kernel="flash", **keywords)
            with activated():
                flash_attn_standin.CALLS.clear()
                error = error_of(
                    attend, [x.half() for x in whole], expected_of(whole, **expected), layout.index()
                )
                called = set(flash_attn_standin.CALLS)
            case = method, keywords, called
            assert error < 0.02, (error, *case)
            assert ops <= called, case
            if method == "ulysses" and layout is packed:
                # All documents of the rank, by one call.
                assert not called & of_one, case


@pytest.mark.parametrize("world", [1, 2])
def test_flash_calls_the_implementation_that_is_active(ranks: Ranks, world: int) -> None:
    ranks(world, check_reached)
