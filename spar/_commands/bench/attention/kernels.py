# SPDX-License-Identifier: Apache-2.0
"""Kernels in place of the real ones: one that does nothing, and one that counts its work."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ...._attention import local
from ...._attention.kernels import KERNELS
from ...._attention.kernels.aten import FlashCpu
from ...._attention.kernels.kernel import BlockInputs, Gradients
from . import ways


class _Nothing(torch.autograd.Function):
    """Return the queries as the output, and gradients of the right shapes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, copies: bool) -> Tensor:
        ctx.save_for_backward(k, v)
        ctx.copies = copies
        return q.clone() if copies else q.view_as(q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradients = (grads[0], *ctx.saved_tensors)
        return *([x.clone() for x in gradients] if ctx.copies else gradients), None


class _NoBlock(FlashCpu):
    """Return memory that was touched before, because it is merged in place, or new memory."""

    def __init__(self, copies: bool) -> None:
        self.copies = copies
        self.buffers: dict[tuple[Any, ...], Tensor] = {}

    def new(self, x: Tensor, role: str) -> Tensor:
        if self.copies:
            return x.clone()
        if (role, x.shape) not in self.buffers:
            self.buffers[role, x.shape] = x.clone()
        return self.buffers[role, x.shape]

    def forward(self, block: BlockInputs) -> tuple[Tensor, Tensor]:
        return self.new(block.q, "out"), torch.zeros(block.q.shape[:3])

    def backward(self, block: BlockInputs, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        return self.new(grad, "q"), self.new(block.k, "k"), self.new(block.v, "v")


@contextlib.contextmanager
def no_kernel(copies: bool = False) -> Iterator[None]:
    """Leave what is outside of the kernels. copies: allocate outputs and gradients, as kernels do."""

    def nothing(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out: Tensor = _Nothing.apply(q, k, v, copies)  # type: ignore[no-untyped-call]
        return out

    with (
        mock.patch.object(local, "scaled_dot_product_attention", nothing),
        mock.patch.multiple(ways, sdpa=nothing, flash=_NoBlock(copies)),
        mock.patch.dict(KERNELS["cpu"], flash=_NoBlock(copies)),
    ):
        yield


@dataclass
class Work(FlashCpu):
    """What this rank's kernels did: multiply-adds, and seconds of this thread's CPU time."""

    products: int = 0
    seconds: float = 0.0

    def forward(self, block: BlockInputs) -> tuple[Tensor, Tensor]:
        begin = time.thread_time()
        outputs = super().forward(block)
        self.seconds += time.thread_time() - begin
        q, keys = block.q, block.k.size(2)
        pairs = q.size(2) * (keys + 1) // 2 if block.causal else q.size(2) * keys
        self.products += 2 * pairs * q.size(0) * q.size(1) * q.size(3)
        return outputs

    def backward(self, block: BlockInputs, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        begin = time.thread_time()
        gradients = super().backward(block, grad, out, lse)
        self.seconds += time.thread_time() - begin
        return gradients


@contextlib.contextmanager
def counted() -> Iterator[Work]:
    """Count what the kernel of blocks does in this thread."""
    work = Work()
    with mock.patch.dict(KERNELS["cpu"], flash=work):
        yield work
