# SPDX-License-Identifier: Apache-2.0
"""What a kernel computes: the attention of one block, with each query's log-sum-exp to merge blocks by."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..blocks import BlocksMaker
from ..parts import Parts
from ..spans import Spans


class BlockInputs(NamedTuple):
    """Queries [B, H, S, D], keys [B, K, T, D] and values [B, K, T, E] of one block; K divides H.

    Attributes:
        causal: S is T, and query i attends to keys 0 to i.
        mask: added to the scores, [B, H, S, T], of which dims of size 1 broadcast.
        softcap: c, if scores x become c tanh(x / c) before the mask is added; 0: none.
        window: (left, right), if query i attends to the keys i + T - S - left to i + T - S + right alone, of
            which there is at least one. -1: all on that side.
        has_empty: whether the mask may leave a query no key.
        spans: which of these keys each of these queries attends to; None: what is above says it.
        is_only: whether the output and the log-sum-exp that backward gets are this block's.
        parts: those that attend to themselves alone, each by the window; queries may then have no key.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    mask: Tensor | None
    scale: float
    softcap: float = 0.0
    window: tuple[int, int] | None = None
    has_empty: bool = True
    spans: Spans | None = None
    is_only: bool = False
    parts: Parts | None = None


class Needs(NamedTuple):
    """What a kernel must have besides attention itself: masks, a cap of the scores, windows, spans, parts.

    varied: whether the blocks' sizes differ from call to call, as those of documents do.
    wider: whether backward may get heads that are `MORE` wider, for the gradient of a log-sum-exp.
    """

    mask: bool = False
    softcap: bool = False
    window: bool = False
    spans: bool = False
    varied: bool = False
    parts: bool = False
    wider: bool = False


# Kernels of GPUs take widths that are multiples of so many.
MORE = 8
NO_WINDOW = "it takes masks instead of windows"
NO_SPANS = "it takes masks instead of spans"
Gradients = tuple[Tensor, Tensor, Tensor]


class Graph(NamedTuple):
    """A block's forward with the graph of autograd, which lasts until its gradients are computed, once.

    Attributes:
        leaves: its q, k and v, in the memory of the caller's.
        out, lse: what `Kernel.forward` returns.
    """

    leaves: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    lse: Tensor

    def gradients(self, grad: Tensor, grad_lse: Tensor | None = None) -> Gradients:
        """Return the gradients of q, k and v, from those of the output and of the log-sum-exp."""
        outs, grads = [self.out], [grad]
        if grad_lse is not None:
            outs.append(self.lse)
            grads.append(grad_lse)
        dq, dk, dv = torch.autograd.grad(outs, self.leaves, grads)
        return dq, dk, dv


class Kernel(Protocol):
    """Inputs have at least one element, and q, k and v a contiguous last dim. Outputs are new tensors.

    Attributes:
        takes_no_width: whether it computes heads of width 0, which `reason_against` refuses otherwise.
        takes_parts: likewise blocks of parts.
        reads: what it must have to read spans without masks, windows or spans; None: it reads none.
    """

    takes_no_width: bool = False
    takes_parts: bool = False
    reads: Needs | None = None

    def refuses(self, q: Tensor, v: Tensor, needs: Needs) -> str:
        """Return the reason why the kernel cannot compute blocks of these tensors; empty if it can."""

    def suits(self, q: Tensor, v: Tensor, needs: Needs) -> bool:
        """Whether it is to compute such blocks, if it can, where the caller names no kernel."""
        return True

    def blocks(self, spans: Spans, queries: int, is_named: bool) -> BlocksMaker | None:
        """Return what finds the blocks in which it reads spans; None: these are not to be read by it.

        queries: their number. is_named: whether the caller named this kernel.
        """
        return None

    def forward(self, block: BlockInputs) -> tuple[Tensor, Tensor]:
        """Return the output [B, H, S, E] and the log-sum-exp [B, H, S] in `accumulated(q.dtype)`.

        They are 0 and -inf for a query to which the mask leaves no key.
        """

    def kept(self, block: BlockInputs) -> Graph | None:
        """Compute forward, and keep the graph in the memory of q, k, v and what forward returns.

        None: nothing was computed, as backward needs no graph, or the graph would hold more.
        """
        return None

    def backward(self, block: BlockInputs, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Return this block's part of the gradients of q, k and v.

        out, lse: the output and the log-sum-exp of all blocks.
        """


def readable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors with a contiguous last dim, as kernels read them."""
    return tuple([x if x.stride(-1) == 1 else x.contiguous() for x in tensors])


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which blocks are merged and gradients are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite(lse: Tensor) -> Tensor:
    """Replace the -inf of a query without keys: exp(-inf - 0) is 0, and exp(-inf + inf) is not a number."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def widened(x: Tensor, value: Tensor | float = 0.0) -> Tensor:
    """Append columns to [B, H, S, D]: a value, or one for each row [B, H, S], and zeros."""
    if isinstance(value, Tensor):
        wide = torch.cat([x, value.to(x.dtype).unsqueeze(3)], 3)
    else:
        wide = torch.nn.functional.pad(x, (0, 1), value=value)
    return torch.nn.functional.pad(wide, (0, MORE - 1))


def narrowed(x: Tensor) -> Tensor:
    """Drop the columns that `widened` appends."""
    return x[..., : x.size(-1) - MORE].contiguous()


def torch_version() -> tuple[int, int]:
    """Return torch's version, on which depends what its kernels can compute."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
