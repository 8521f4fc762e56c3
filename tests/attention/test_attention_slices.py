# SPDX-License-Identifier: Apache-2.0
"""Slices of heads that are exchanged while others are attended to: the same bits, and what they exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks

import spar
from spar import SequenceLayout
from spar._attention import local, slices
from spar._group.registry import group_of

Group = dist.ProcessGroup
TOKENS, HEADS, KEY_HEADS, WIDTH = 61, 12, 6, 8


def tensors(
    rank: int, layout: SequenceLayout, dtype: torch.dtype, order: tuple[int, ...], width: int = WIDTH
) -> list[Any]:
    """Return this rank's q, k and v, which require a gradient, and the gradient of the output."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, TOKENS, heads, width) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    whole = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    own = [x[:, layout.index()].permute(order).contiguous() for x in whole]
    return [*(x.requires_grad_() for x in own[:3]), own[3]]


def options_of(name: str) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    return {
        "whole": {},
        "causal": {"causal": True},
        "mask": {"mask": torch.randn(1, HEADS, TOKENS, TOKENS, generator=draw)},
        "bfloat16": {"causal": True},
        "window": {"window": (9, 0)},
        "sinks": {"sinks": torch.randn(HEADS, generator=draw)},
        "float64": {},
        "width 5": {},
    }[name]


def both(rank: int, world: int, group: Group, method: str, kind: str, name: str) -> tuple[int, int]:
    """Compare outputs and gradients with those of one exchange; return the calls of both."""
    layout = getattr(SequenceLayout, kind)(TOKENS, group)
    by_heads = name == "causal"
    order, dims = ((0, 2, 1, 3), {"seq_dim": 2, "head_dim": 1}) if by_heads else ((0, 1, 2, 3), {})
    dtype = getattr(torch, name, torch.float32)
    q, k, v, upper = tensors(rank, layout, dtype, order, 5 if name == "width 5" else WIDTH)
    state, results, calls = group_of(group), [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "spans_hosts", lambda *_: True)
        channel = state.channel("attention", q.device)
        for least in (2**62, 1):
            patch.setattr(slices, "LEAST", least)
            patch.setattr(channel, "in_flight_from", least)
            state.exchanges.clear()
            before = state.count()
            y = spar.attention(q, k, v, layout, method=method, **dims, **options_of(name))
            results.append([y, *torch.autograd.grad(y, (q, k, v), upper)])
            with torch.no_grad():
                results[-1].append(spar.attention(q, k, v, layout, method=method, **dims, **options_of(name)))
            calls.append(state.count() - before)
        state.exchanges.clear()
    assert all(map(torch.equal, *results)), [torch.equal(*pair) for pair in zip(*results, strict=True)]
    return calls[0], calls[1]


# The layout of each attention whose heads are cut into slices, and of some whose are not.
SLICED = {
    ("ulysses", "whole"): "even",
    ("ulysses", "causal"): "zigzag",
    ("ulysses", "mask"): "zigzag",
    ("ulysses", "bfloat16"): "zigzag",
    ("gather", "whole"): "even",
}
WHOLE = {
    ("ulysses", "window"): "even",
    ("ulysses", "sinks"): "even",
    ("ulysses", "float64"): "even",
    ("ulysses", "width 5"): "even",
    ("gather", "causal"): "zigzag",
    ("gather", "mask"): "even",
}


@pytest.mark.parametrize("world", [2, 3])
def test_slices_have_the_bits_of_one_exchange(ranks: Ranks, world: int) -> None:
    for (method, name), kind in {**SLICED, **WHOLE}.items():
        # A forward and a backward, and a forward that is not recorded.
        of_one = {"ulysses": 6, "gather": 3}[method]
        most = {"ulysses": KEY_HEADS // world, "gather": slices.MOST}[method]
        count = most if (method, name) in SLICED else 1
        assert ranks(world, both, method, kind, name) == [(of_one, count * of_one)] * world, (method, name)


def fail_in_slice(rank: int, world: int, group: Group) -> str:
    """A kernel fails on rank 1 in the second of three slices, when all are in flight."""
    layout = SequenceLayout.even(TOKENS, group)
    q, k, v, _ = tensors(rank, layout, torch.float32, (0, 1, 2, 3))
    kernel, calls = local._kernel, []

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            raise RuntimeError("no memory in slice 2")
        return kernel(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "spans_hosts", lambda *_: True)
        patch.setattr(slices, "LEAST", 1)
        patch.setattr(local, "_kernel", failing)
        with pytest.raises(RuntimeError, match="no memory in slice 2") as caught:
            spar.attention(q, k, v, layout, method="ulysses")
        # Nor do ranks lose count if one fails before it knows how many slices there are.
        group_of(group).exchanges.clear()
        with pytest.raises(ValueError if rank == 1 else spar.MismatchError, match="rank 1"):
            spar.attention(q, k[..., :4] if rank == 1 else k, v, layout, method="ulysses")
    group_of(group).exchanges.clear()
    assert spar.all_gather(torch.tensor([rank]), group).tolist() == [0, 1]
    return type(caught.value).__name__


def test_failure_in_a_slice_ends_the_call_on_all_ranks(ranks: Ranks) -> None:
    assert ranks(2, fail_in_slice) == ["MismatchError", "RuntimeError"]
