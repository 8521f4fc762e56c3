# SPDX-License-Identifier: Apache-2.0
"""Time spar.attention on one rank beside the kernel alone: packed documents, a window, and plain causality.

Documents and the window beside aten's flash attention, causality beside scaled_dot_product_attention. Forward
and backward, bfloat16, 32 heads and 8 key heads of 128; outputs and gradients are compared, too. The window
also beside flex_attention, as the last, since torch compiles it for long.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu_core
import gpu_ranks
import torch
import torch._dynamo  # here: create_block_mask imports it, which fails where the stand-in has replaced ops
import torch.distributed as dist
from report import Report, stage
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import spar

HEADS, KEY_HEADS, WIDTH, TOKENS, WINDOW = 32, 8, 128, 32_768, 512
LIMIT = 0.02  # of norms
LEAD = 8_000_000  # cycles in which the host gets ahead, as it is in a training step; its own time is a column
PARTS_GOAL, CAUSAL_GOAL = 1.15, 1.05  # multiples of the kernel alone


def by_spar(tensors: list[Tensor], grad: Tensor, layout: spar.SequenceLayout, **options: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    y = spar.attention(leaves[0], leaves[1], leaves[2], layout, causal=True, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def by_aten(tensors: list[Tensor], grad: Tensor, ends: Tensor, most: int, left: int) -> list[Tensor]:
    """Attend causally in documents, or with at most `left` keys before a query's own; -1: all."""
    (q, k, v), grad = (x[0] for x in tensors), grad[0]
    ranges = ends, ends, most, most, 0.0, True
    options = {"scale": q.size(2) ** -0.5, "window_size_left": left, "window_size_right": 0}
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(q, k, v, *ranges, False, **options)
    gradients = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *ranges, state, unused, **options
    )
    return [x[None] for x in (out, *gradients)]


def window_mask(total: int, device: torch.device) -> Any:
    """Return the blocks of the window, causal, for flex_attention."""

    def is_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key <= WINDOW)

    return create_block_mask(is_near, None, None, total, total, device=device)


def by_torch(
    attend: Callable[..., Tensor], tensors: list[Tensor], grad: Tensor, **options: Any
) -> list[Tensor]:
    """Attend by flex_attention or scaled_dot_product_attention."""
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in tensors]
    y = attend(*leaves, enable_gqa=True, **options)
    gradients = torch.autograd.grad(y, leaves, grad.transpose(1, 2))
    return [x.transpose(1, 2) for x in (y.detach(), *gradients)]


def compare(report: Report, name: str, ways: gpu_core.Ways, goal: float = PARTS_GOAL) -> None:
    """Compare each way's outputs and gradients with the first one's, and time them in turns.

    goal: the first one's time is to be at most so many times that of the second.
    """
    wanted, *others = (way() for way in ways.values())
    for other, found in zip(list(ways)[1:], others, strict=True):
        for x, y in zip(wanted, found, strict=True):
            error = float((x.double() - y.double()).norm() / y.double().norm())
            report.expect(error < LIMIT, f"{name}: an error of {error:.0e} beside {other}")
    us = gpu_core.microseconds(ways, 5, LEAD)
    host = gpu_core.host_microseconds(next(iter(ways.values())), 5)
    first, second, *_ = us.values()
    times = [f"{us[way] / 1e3:.2f} ms" for way in ways]
    report.row(name, *times, f"{first / second:.2f} (at most {goal})", f"{host / 1e3:.2f} ms")
    report.figure(f"{name}, us", us | {"host": host})


def in_plain_torch(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, enable_gqa: bool) -> Tensor:
    """Stand in for the compiled flex_attention, which has no backward on a CPU."""
    from helpers import flex_standin  # type: ignore[import-not-found]

    out: Tensor
    out, _ = flex_standin.attend(q, k, v, None, block_mask, q.size(-1) ** -0.5, enable_gqa, {})
    return out


def time_documents(report: Report, tensors: list[Tensor], grad: Tensor, count: int) -> None:
    ends = torch.linspace(0, grad.size(1), count + 1).int()
    lengths = ends.diff().tolist()
    ways: gpu_core.Ways = {
        "spar": partial(by_spar, tensors, grad, spar.SequenceLayout.packed(lengths)),
        "aten": partial(by_aten, tensors, grad, ends.to(grad.device), max(lengths), -1),
    }
    compare(report, f"{count} documents", ways)


def time_causal(report: Report, tensors: list[Tensor], grad: Tensor, tokens: int) -> None:
    tensors, grad = [x[:, :tokens] for x in tensors], grad[:, :tokens]
    ways: gpu_core.Ways = {
        "spar": partial(by_spar, tensors, grad, spar.SequenceLayout.even(tokens)),
        "torch": partial(by_torch, scaled_dot_product_attention, tensors, grad, is_causal=True),
    }
    compare(report, f"causal, {tokens} tokens", ways, CAUSAL_GOAL)


def window_ways(tensors: list[Tensor], grad: Tensor) -> gpu_core.Ways:
    total = grad.size(1)
    ends = torch.tensor([0, total], dtype=torch.int32, device=grad.device)
    layout = spar.SequenceLayout.even(total)
    return {
        "spar": partial(by_spar, tensors, grad, layout, window=(WINDOW, 0)),
        "aten": partial(by_aten, tensors, grad, ends, total, WINDOW),
    }


def time_window(report: Report, tensors: list[Tensor], grad: Tensor) -> None:
    compare(report, f"a window of {WINDOW}", window_ways(tensors, grad))


def time_flex(report: Report, tensors: list[Tensor], grad: Tensor, attend: Callable[..., Tensor]) -> None:
    mask = window_mask(grad.size(1), grad.device)
    ways = window_ways(tensors, grad)
    ways["flex"] = partial(by_torch, attend, tensors, grad, block_mask=mask)
    columns = "spar", "aten alone", "flex_attention alone", "spar, of aten", "spar, host"
    report.table(f"{grad.size(1)} tokens", *columns)
    compare(report, f"a window of {WINDOW}, beside flex", ways)


def main() -> int:
    report, options = stage(__doc__)
    total, heads, key_heads, width, context = TOKENS, HEADS, KEY_HEADS, WIDTH, contextlib.nullcontext()
    attend: Callable[..., Tensor] = in_plain_torch
    if options.stand_ins:
        from helpers import flash_varlen_standin

        gpu_core.use_stand_ins()
        total, heads, key_heads, width, context = 600, 4, 2, 16, flash_varlen_standin.installed()
    elif not gpu_core.machine.available():
        report.skip("torch has no CUDA device")
    else:
        attend = torch.compile(flex_attention)
    gpu_core.machine.prepare()
    device = gpu_core.machine.device
    with context, tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        shapes = [(1, total, count, width) for count in (heads, key_heads, key_heads, heads)]
        *tensors, grad = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes)
        report.table(f"{total} tokens", "spar", "the kernel alone", "ratio", "spar, host")
        steps: dict[str, Callable[[], None]] = {
            **{f"{n} documents": partial(time_documents, report, tensors, grad, n) for n in (20, 200)},
            "the window": partial(time_window, report, tensors, grad),
            **{f"{n} tokens": partial(time_causal, report, tensors, grad, n) for n in (total // 2, total)},
            "flex_attention": partial(time_flex, report, tensors, grad, attend),
        }
        for what, step in steps.items():
            gpu_ranks.attempt(report, what, step)
        dist.destroy_process_group()
    return report.status()


if __name__ == "__main__":
    sys.exit(main())
