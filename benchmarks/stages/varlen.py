# SPDX-License-Identifier: Apache-2.0
"""Time packed documents and a window by spar.attention on one rank, beside aten's flash attention alone.

Forward and backward, bfloat16, 32 heads and 8 key heads of 128; outputs and gradients are compared, too.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from functools import partial
from typing import Any

import gpu_core
import torch
import torch.distributed as dist
from report import Report, stage
from torch import Tensor

import spar

HEADS, KEY_HEADS, WIDTH, TOKENS, WINDOW = 32, 8, 128, 32_768, 512
LIMIT = 0.02  # of norms


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


def compare(report: Report, name: str, ways: gpu_core.Ways) -> None:
    found, wanted = (way() for way in ways.values())
    for x, y in zip(found, wanted, strict=True):
        error = float((x.double() - y.double()).norm() / y.double().norm())
        report.expect(error < LIMIT, f"{name}: an error of {error:.0e}")
    us = gpu_core.microseconds(ways, 5)
    report.row(name, *(f"{us[way] / 1e3:.2f} ms" for way in ways))
    report.figure(f"{name}, us", us)


def main() -> int:
    report, options = stage(__doc__)
    total, heads, key_heads, width, context = TOKENS, HEADS, KEY_HEADS, WIDTH, contextlib.nullcontext()
    if options.stand_ins:
        from helpers import flash_varlen_standin  # type: ignore[import-not-found]

        gpu_core.use_stand_ins()
        total, heads, key_heads, width, context = 600, 4, 2, 16, flash_varlen_standin.installed()
    elif not gpu_core.machine.available():
        report.skip("torch has no CUDA device")
    gpu_core.machine.prepare()
    with context, tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        shapes = [(1, total, count, width) for count in (heads, key_heads, key_heads, heads)]
        *tensors, grad = (
            torch.randn(s, device=gpu_core.machine.device, dtype=torch.bfloat16) for s in shapes
        )
        report.table(f"{total} tokens", "spar", "aten alone")
        for count in (1, 20, 200):
            ends = torch.linspace(0, total, count + 1).int()
            lengths = ends.diff().tolist()
            layout, left = spar.SequenceLayout.packed(lengths), -1
            more: dict[str, Any] = {}
            if count == 1:
                left, more = WINDOW, {"window": (WINDOW, 0)}
            ways: gpu_core.Ways = {
                "spar": partial(by_spar, tensors, grad, layout, **more),
                "aten": partial(by_aten, tensors, grad, ends.to(grad.device), max(lengths), left),
            }
            compare(report, f"{count} documents" if count > 1 else f"a window of {WINDOW}", ways)
        dist.destroy_process_group()
    return report.status()


if __name__ == "__main__":
    sys.exit(main())
