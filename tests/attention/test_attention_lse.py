# SPDX-License-Identifier: Apache-2.0
"""The log-sum-exp of spar.attention: merging, compiled code, wide heads, what cannot have it.

The random cases of test_attention_cases.py compare its values and gradients with one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import flash_attn_standin
from helpers.whole_attention import inputs
from test_attention_kernels import standins
from torch import Tensor

import spar
from spar import SequenceLayout

pytestmark = pytest.mark.one_transport
Group = dist.ProcessGroup
TOTAL = 26


def check_merging(rank: int, world: int, group: Group) -> None:
    """Attend to two halves of the keys, and merge the outputs by what a user writes; in float64."""
    layout, half = SequenceLayout.zigzag(TOTAL, group), SequenceLayout.even(TOTAL // 2, group)
    whole = inputs(TOTAL, 4, 2, torch.float64)
    upper = whole[3][:, layout.index()]
    sides = [whole[1:3], [x[:, : TOTAL // 2] for x in whole[1:3]], [x[:, TOTAL // 2 :] for x in whole[1:3]]]
    leaves = [whole[0][:, layout.index()].requires_grad_()]
    leaves += [x[:, half.index()].requires_grad_() for side in sides[1:] for x in side]
    for method in ("ulysses", "gather"):
        q, *halves = leaves
        outs, sums = zip(
            *(
                spar.attention(q, k, v, (layout, half), method=method, return_lse=True)
                for k, v in (halves[:2], halves[2:])
            ),
            strict=True,
        )
        lse = torch.logaddexp(*sums)
        merged = sum(out * (x - lse).exp()[..., None] for out, x in zip(outs, sums, strict=True))
        found = torch.autograd.grad(merged, leaves, upper)
        own = [x[:, layout.index()].requires_grad_() for x in whole[:3]]
        y, right = spar.attention(own[0], own[1], own[2], layout, method=method, return_lse=True)
        torch.testing.assert_close((merged, lse), (y, right))
        expected = torch.autograd.grad(y, own, upper)
        torch.testing.assert_close(found[0], expected[0])
        for i in range(2):
            each = layout.gather(expected[1 + i], 1, backward="sum")
            for side, x in enumerate(each.chunk(2, 1)):
                torch.testing.assert_close(found[1 + 2 * side + i], x[:, half.index()])


def test_outputs_merge_by_the_log_sum_exp(ranks: Ranks) -> None:
    ranks(2, check_merging)


def check_compiled(rank: int, world: int, group: Group, method: str, window: bool) -> None:
    keywords: dict[str, Any] = {"window": (5, 0)} if window else {}

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        return spar.attention(q * 2, k, v, layout, causal=True, method=method, return_lse=True, **keywords)

    torch._dynamo.reset()
    # of a window all ranks compile, or none; else one is enough
    is_eager = not window and rank > 0
    compiled = attend if is_eager else torch.compile(attend, fullgraph=True, backend="aot_eager")
    for total in (24, 29):
        layout = SequenceLayout.zigzag(total, group)
        results = []
        for run in (attend, compiled):
            whole = inputs(total, 4, 2, torch.float32)
            q, k, v, upper = [x[:, layout.index()].requires_grad_() for x in whole]
            y, lse = run(q, k, v, layout)
            uppers = [upper.detach(), upper[..., 0].detach()]
            results.append([y, lse, *torch.autograd.grad([y, lse], [q, k, v], uppers)])
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.compiler
@pytest.mark.parametrize(("method", "window"), [("ulysses", True), ("gather", True), ("ring", False)])
def test_compiled_code_returns_it(ranks: Ranks, method: str, window: bool) -> None:
    ranks(2, check_compiled, method, window, timeout=280)


def check_wide(rank: int, world: int, group: Group) -> None:
    """Its gradient takes 8 more columns: flash_attn has heads of 256 at most, and blockwise no windows."""
    layout = SequenceLayout.even(8 * world, group)
    q, k, v = (torch.randn(1, 8, 2, 256, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with standins():
        _, lse = spar.attention(q, k, v, layout, return_lse=True, kernel="flash_attn")
        lse.sum().backward()
        _, lse = spar.attention(q, k, v, layout, window=(3, 0), return_lse=True, kernel="flash_attn")
        assert flash_attn_standin.CALLS
        with pytest.raises(
            NotImplementedError, match="no kernel for heads of width 264 and 264: it takes masks"
        ):
            lse.sum().backward()


def test_heads_too_wide_for_its_gradient(ranks: Ranks) -> None:
    ranks(1, check_wide)


def check_errors(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.even(4 * world, group)
    x = torch.zeros(1, 4, 2, 8)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dropout_p": 0.5}, "return_lse is True, and dropout_p is 0.5; expected a kernel's name or None"),
        ({"kernel": lambda q, k, v: q}, "return_lse is True, and a function is passed as kernel"),
    ]
    for keywords, text in cases:
        with pytest.raises(ValueError, match=text):
            spar.attention(x, x, x, layout, return_lse=True, **keywords)


def test_what_has_no_log_sum_exp_is_named(ranks: Ranks) -> None:
    ranks(2, check_errors)
