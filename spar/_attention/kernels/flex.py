# SPDX-License-Identifier: Apache-2.0
"""torch's flex_attention, compiled: masks and spans on a GPU, without scores in memory.

Spans are read by its mask function, and say which of its blocks have pairs at all. It has no backward that
takes the log-sum-exp of all blocks. So backward computes a block again, and differentiates both its output
and its log-sum-exp; unless the block is the only one, of which forward keeps the graph. The tests run it over
a stand-in, and over torch's uncompiled one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..blocks import BlocksMaker
from ..kernel_blocks import long_blocks
from ..spans import Spans
from .block_mask import block_mask_of, intervals_of
from .kernel import (
    NO_WINDOW,
    BlockInputs,
    Gradients,
    Graph,
    Kernel,
    Needs,
    accumulated,
    finite,
    torch_version,
)

_ON_A_CPU = "torch's flex_attention has no gradients on a CPU, and no log-sum-exp if compiled for one"
# Narrower products have no kernel.
_NARROWEST = 16
# The oldest torch that computes widths other than powers of 2.
_ANY_WIDTH = (2, 8)
# Each pair is compared with each interval of its query.
MOST_INTERVALS = 16
# The first call that reads spans is compiled. A few tiles are not worth that.
_SHORTEST = 1024


def uncompiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return flex_attention as a new function that also returns the log-sum-exp."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    new = hasattr(module, "AuxRequest")
    request = {"return_aux": module.AuxRequest(lse=True)} if new else {"return_lse": True}

    def attend(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out, sums = module.flex_attention(*tensors, **options, **request)
        return out, sums.lse if new else sums

    # Its own code object: torch.compile keeps 8 graphs of one, and compiles no more.
    attend.__code__ = attend.__code__.replace()
    return attend


@functools.cache
def _compiled(variant: tuple[Any, ...]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function of a variant: of all calls for which one graph of symbolic sizes is enough."""
    return torch.compile(uncompiled(), dynamic=True, fullgraph=True)


@functools.cache
def _why_not_compiled(device: torch.device) -> str:
    """Return why torch.compile cannot make a kernel for a GPU here; empty if it can.

    It needs Triton, a C compiler and Python's headers, which only a compilation shows.
    """

    def increment(x: Tensor) -> Tensor:
        return x + 1

    try:
        torch.compile(increment)(torch.zeros(1, device=device))
    except Exception as error:
        # The compilers of torch, Triton and C raise their own.
        first, *_ = [*str(error).splitlines(), ""]
        return f"torch.compile fails on {device}: {type(error).__name__}: {first}"
    return ""


class Flex(Kernel):
    reads = Needs(spans=True)

    def refuses(self, q: Tensor, v: Tensor, needs: Needs) -> str:
        if q.is_cpu:
            return _ON_A_CPU
        if q.dtype == torch.float64:
            return f"its log-sum-exp is in float32, and the tensors are {q.dtype}"
        if torch.compiler.is_compiling():
            return "it cannot be inside compiled code"
        return NO_WINDOW if needs.window else _why_not_wide(q, v) or _why_not_compiled(q.device)

    def blocks(self, spans: Spans, queries: int, is_named: bool) -> BlocksMaker | None:
        few = spans.ends.size(3) <= 2 * MOST_INTERVALS
        is_long = is_named or queries >= _SHORTEST
        return functools.partial(long_blocks, spans) if few and is_long else None

    def forward(self, block: BlockInputs) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return _attend(block)

    def kept(self, block: BlockInputs) -> Graph | None:
        # A mask is made for the block, and as large as its scores.
        return None if block.mask is not None else _graph(block)

    def backward(self, block: BlockInputs, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        kind, graph = accumulated(block.q.dtype), _graph(block)
        if block.is_only:
            return graph.gradients(grad)
        # out is the sum over blocks of exp(lse_of_block - lse) * out_of_block, and so on for lse.
        weight = torch.exp(graph.lse.detach() - finite(lse))
        inner = (grad.to(kind) * (graph.out.detach().to(kind) - out.to(kind))).sum(-1)
        return graph.gradients((grad * weight[..., None]).to(graph.out.dtype), weight * inner)


def _why_not_wide(q: Tensor, v: Tensor) -> str:
    widths = q.size(3), v.size(3)
    if min(widths) < _NARROWEST:
        return f"the heads' widths are {widths[0]} and {widths[1]}, not at least {_NARROWEST}"
    if torch_version() < _ANY_WIDTH and any(width & (width - 1) for width in widths):
        return (
            f"torch {torch.__version__} computes widths that are powers of 2, not {widths[0]} and {widths[1]}"
        )
    return ""


def _graph(block: BlockInputs) -> Graph:
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in block[:3])
        return Graph((q, k, v), *_attend(block._replace(q=q, k=k, v=v)))


def _attend(block: BlockInputs) -> tuple[Tensor, Tensor]:
    q, k, v, causal, mask, scale, softcap, *_ = block
    change = None if mask is None else _added(mask)
    if causal:
        change = _causal
    if softcap:
        # A tensor: torch.compile would make a symbol of a float, and not all versions compile that here.
        change = _capped(torch.full((), softcap, device=q.device), change)
    blocks = None if block.spans is None else block_mask_of(block.spans, q.device)
    return _compiled(_variant(block, blocks))(
        q,
        k,
        v,
        score_mod=change,
        block_mask=blocks,
        scale=scale,
        enable_gqa=q.size(1) != k.size(1),
        # Not the kernel for short queries, which lacks some numbers of heads.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )


def _variant(block: BlockInputs, blocks: Any) -> tuple[Any, ...]:
    """Return what a graph is compiled for: dtypes, heads, widths, gradients, and which sizes are 1."""
    q, k, v, causal, mask, scale, softcap, *_ = block
    sizes = [q.shape, k.shape]
    if mask is not None:
        sizes.append(mask.shape)
    intervals = 0
    if block.spans is not None:
        intervals = intervals_of(block.spans)
        sizes += [blocks.kv_indices.shape, blocks.q_indices.shape]
    is_one = tuple([n == 1 for size in sizes for n in size])
    of_tensors = q.dtype, q.size(1), k.size(1), q.size(3), v.size(3)
    return torch.is_grad_enabled(), causal, softcap > 0, scale, mask is None, intervals, *of_tensors, *is_one


def _causal(score: Any, b: Any, h: Any, query: Any, key: Any) -> Any:
    return torch.where(query >= key, score, -torch.inf)


def _capped(softcap: Tensor, then: Callable[..., Any] | None) -> Callable[..., Any]:
    def change(score: Any, b: Any, h: Any, query: Any, key: Any) -> Any:
        score = softcap * torch.tanh(score / softcap)
        return score if then is None else then(score, b, h, query, key)

    return change


def _added(mask: Tensor) -> Callable[..., Any]:
    """Return a function that adds a mask, of which dims of size 1 broadcast, to a score."""
    wide = [int(size > 1) for size in mask.shape]

    def change(score: Any, b: Any, h: Any, query: Any, key: Any) -> Any:
        return score + mask[b * wide[0], h * wide[1], query * wide[2], key * wide[3]]

    return change
