# SPDX-License-Identifier: Apache-2.0
"""The package flash_attn, 2.7 or newer, by the functions that also take and return a log-sum-exp.

It takes fewer key heads than query heads, which torch's own kernel for GPUs does not. Not verified on
hardware: the tests run it over a stand-in with these signatures.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from ..blocks import BlocksMaker
from ..kernel_blocks import strip_blocks, strips_of
from ..spans import Spans
from .aten import refuses_16_bits
from .kernel import BlockInputs, Gradients, Kernel, Needs

_OLDEST = (2, 7)
_PLAIN = {"dropout_p": 0.0, "alibi_slopes": None}


@functools.cache
def _interface() -> tuple[Any, str]:
    """Return the package's module, or None and the reason."""
    try:
        version = importlib.import_module("flash_attn").__version__
        interface = importlib.import_module("flash_attn.flash_attn_interface")
    except Exception as error:
        # An extension built for another torch raises ImportError or others.
        return None, f"flash_attn cannot be imported: {type(error).__name__}: {error}"
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        return None, f"flash_attn is {version}, and must be 2.7 or newer"
    return interface, ""


def _window(block: BlockInputs) -> dict[str, int]:
    left, right = block.window or (-1, -1)
    return {"window_size_left": left, "window_size_right": right}


class FlashAttn(Kernel):
    reads = Needs(window=True)

    def refuses(self, q: Tensor, v: Tensor, needs: Needs) -> str:
        why = "it cannot be inside compiled code" if torch.compiler.is_compiling() else ""
        return why or refuses_16_bits(q, v, needs) or _interface()[1]

    def blocks(self, spans: Spans, queries: int, is_named: bool) -> BlocksMaker | None:
        return None if strips_of(spans) is None else functools.partial(strip_blocks, spans)

    def forward(self, block: BlockInputs) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in block[:3])
        out, lse, *_ = _interface()[0]._flash_attn_forward(
            q,
            k,
            v,
            softmax_scale=block.scale,
            causal=block.causal,
            softcap=block.softcap,
            **_window(block),
            return_softmax=False,
            **_PLAIN,
        )
        return out.transpose(1, 2), lse

    def backward(self, block: BlockInputs, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, *block[:3], out))
        gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        _interface()[0]._flash_attn_backward(
            grad,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            *gradients,
            softmax_scale=block.scale,
            causal=block.causal,
            softcap=block.softcap,
            **_window(block),
            deterministic=False,
            **_PLAIN,
        )
        dq, dk, dv = (x.transpose(1, 2) for x in gradients)
        return dq, dk, dv
