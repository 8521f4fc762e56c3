# SPDX-License-Identifier: Apache-2.0
"""The kernels behind torch's scaled_dot_product_attention: flash attention for CPUs and GPUs, and cuDNN's."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ..blocks import BlocksMaker
from ..kernel_blocks import window_parts
from ..spans import Spans
from .kernel import MORE, NO_SPANS, NO_WINDOW, BlockInputs, Gradients, Kernel, Needs, torch_version

_aten = torch.ops.aten


class FlashCpu(Kernel):
    def refuses(self, q: Tensor, v: Tensor, needs: Needs) -> str:
        if not hasattr(_aten, "_scaled_dot_product_flash_attention_for_cpu"):
            return f"torch {torch.__version__} does not have it"
        if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"its log-sum-exp has the accuracy of float32, and the tensors are {q.dtype}"
        if q.size(3) != v.size(3):
            return f"heads of q and v differ in width: {q.size(3)} and {v.size(3)}"
        return lacks(needs) if needs.softcap or needs.window or needs.spans else ""

    def forward(self, block: BlockInputs) -> tuple[Tensor, Tensor]:
        q, k, v, causal, mask, scale, *_ = block
        if not _takes_fewer_key_heads():
            k, v = _expanded(k, q.size(1)), _expanded(v, q.size(1))
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        if mask is None or not block.has_empty:
            return out, lse
        # It returns 0 as the log-sum-exp of a query without keys.
        empty = (mask == -torch.inf).all(-1)
        return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)

    def backward(self, block: BlockInputs, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v, causal, mask, scale, *_ = block
        heads = k.size(1)
        if not _takes_fewer_key_heads():
            k, v = _expanded(k, q.size(1)), _expanded(v, q.size(1))
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
        return dq, _summed(dk, heads), _summed(dv, heads)


class CudnnCuda(Kernel):
    """By cuDNN. It makes a plan for each combination of sizes, once, and none for a single query or key."""

    def refuses(self, q: Tensor, v: Tensor, needs: Needs) -> str:
        if reason := lacks(needs) or refuses_16_bits(q, v, needs):
            return reason
        if 128 < q.size(3) < 256:
            # torch knows that only of tensors with gradients, which those of a Function are not.
            return f"its backward has widths up to 128, and 256, and that of the heads is {q.size(3)}"
        if not torch.backends.cuda.cudnn_sdp_enabled():
            return "torch.backends.cuda.enable_cudnn_sdp(False) was called"
        # v in the place of k, which has its shape.
        call = torch.backends.cuda.SDPAParams(q, v, v, None, 0.0, False, q.size(1) != v.size(1))
        return "" if torch.backends.cuda.can_use_cudnn_attention(call) else "torch has no cuDNN that can"

    def suits(self, q: Tensor, v: Tensor, needs: Needs) -> bool:
        return not needs.varied and prefers_cudnn(q, v)

    def forward(self, block: BlockInputs) -> tuple[Tensor, Tensor]:
        q, k, v, causal, _, scale, *_ = block
        if 1 in (q.size(2), k.size(2)):
            return FlashCuda().forward(block)
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return out, lse.view(q.shape[:3])

    def backward(self, block: BlockInputs, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v, causal, _, scale, *_ = block
        if 1 in (q.size(2), k.size(2)):
            return FlashCuda().backward(block, grad, out, lse)
        none = _no_random_numbers(q)
        gradients = _aten._scaled_dot_product_cudnn_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse.contiguous()[..., None],
            none,
            none,
            None,
            None,
            None,
            q.size(2),
            k.size(2),
            0.0,
            causal,
            scale=scale,
        )
        return cast(Gradients, gradients)


def prefers_cudnn(q: Tensor, v: Tensor) -> bool:
    """Whether scaled_dot_product_attention takes cuDNN's kernel: on Hopper and newer, unless told not to."""
    choice = torch._fused_sdp_choice(q, v, v, enable_gqa=q.size(1) != v.size(1))
    return choice == SDPBackend.CUDNN_ATTENTION.value


class FlashCuda(Kernel):
    """By FlashAttention-2, on GPUs. Windows and parts are those of the op behind the other one."""

    takes_parts = True
    reads = Needs(window=True, parts=True)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, causal: bool, scale: float) -> Tensor:
        """Return the output alone, of which torch has gradients."""
        out: Tensor = _aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, causal, False, scale=scale
        )[0]
        return out

    def refuses(self, q: Tensor, v: Tensor, needs: Needs) -> str:
        capability = torch.cuda.get_device_capability(q.device)
        if why := _why_no_backward(capability, q.size(3) + MORE * needs.wider):
            return why
        if not torch.backends.cuda.flash_sdp_enabled():
            return "torch.backends.cuda.enable_flash_sdp(False) was called"
        why = _why_no_windows() if needs.window or needs.parts else ""
        return why or lacks(needs._replace(window=False)) or refuses_16_bits(q, v, needs)

    def blocks(self, spans: Spans, queries: int, is_named: bool) -> BlocksMaker | None:
        return window_parts(spans)

    def forward(self, block: BlockInputs) -> tuple[Tensor, Tensor]:
        """Of this, too, torch has gradients."""
        q, k, v, causal, _, scale, *_ = block
        if block.window is not None:
            return _with_window(block)
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(self, block: BlockInputs, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v, causal, _, scale, *_ = block
        if block.window is not None:
            return _with_window_backward(block, grad, out, lse)
        none = _no_random_numbers(q)
        lse = lse.contiguous()  # its kernel does not read strides
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.size(2), k.size(2), 0.0, causal, none, none, scale=scale
        )
        return cast(Gradients, gradients)


def _why_no_backward(capability: tuple[int, int], width: int) -> str:
    """Return why backward would raise; its shared memory is too small for some widths, as torch has it."""
    is_small = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    if is_small and 192 < width <= 224:
        return f"it has no backward for a width of {width} on a GPU of capability {capability}"
    return ""


def _why_no_windows() -> str:
    if torch.compiler.is_compiling():
        return "windows and parts cannot be inside compiled code"
    if torch.version.hip:
        return "windows and parts were not tried on ROCm"
    # torch 2.6 pads the log-sum-exp of parts.
    return "" if torch_version() >= (2, 7) else f"torch {torch.__version__} is older than 2.7"


def _by_token(x: Tensor, block: BlockInputs) -> Tensor:
    """Return [B, H, S, D] as [B, S, H, D], or of parts as [B * S, H, D]."""
    x = x.transpose(1, 2)
    return x if block.parts is None else x.flatten(0, 1)


def _by_head(x: Tensor, block: BlockInputs) -> Tensor:
    """Return what `_by_token` returns as [B, H, S, D]."""
    return (x if block.parts is None else x.unflatten(0, (block.q.size(0), -1))).transpose(1, 2)


def _ends(block: BlockInputs) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return where parts begin among the queries and the keys of all samples, and the most of one part."""
    parts, q, k = block.parts, block.q, block.k
    if parts is None:
        return None, None, q.size(2), k.size(2)
    return *parts.on(q.device, q.size(0)), parts.most_queries, parts.most_keys


def _options(block: BlockInputs) -> tuple[bool, dict[str, Any]]:
    """Return whether no key behind a query is one of its own, and the window and the scale."""
    left, right = block.window or (-1, -1)
    return right == 0, {"scale": block.scale, "window_size_left": left, "window_size_right": right}


def _with_window(block: BlockInputs) -> tuple[Tensor, Tensor]:
    q, k, v = (_by_token(x, block) for x in block[:3])
    causal, options = _options(block)
    out, lse, *_ = _aten._flash_attention_forward(q, k, v, *_ends(block), 0.0, causal, False, **options)
    if block.parts is not None:
        lse = lse.unflatten(1, (block.q.size(0), -1)).transpose(0, 1)
        if block.parts.has_empty:
            # It returns inf for a query without keys.
            lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    return _by_head(out, block), lse


def _with_window_backward(block: BlockInputs, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    grad, q, k, v, out = (_by_token(x, block) for x in (grad, *block[:3], out))
    causal, options = _options(block)
    if block.parts is not None:
        lse = lse.transpose(0, 1).flatten(1)
    none = _no_random_numbers(q)
    saved = grad, q, k, v, out, lse.contiguous()  # its kernel does not read strides
    gradients = _aten._flash_attention_backward(*saved, *_ends(block), 0.0, causal, none, none, **options)
    dq, dk, dv = (_by_head(x, block) for x in gradients)
    return dq, dk, dv


def lacks(needs: Needs) -> str:
    """Return which of these needs torch's kernels do not have."""
    if needs.softcap:
        return "it cannot cap scores (softcap)"
    if needs.window:
        return NO_WINDOW
    return NO_SPANS if needs.spans else ""


def refuses_16_bits(q: Tensor, v: Tensor, needs: Needs) -> str:
    """Return why a flash attention kernel for GPUs cannot compute this; empty if it can."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"the tensors are {q.dtype}"
    if needs.mask or needs.spans:
        return "it takes no mask"
    widest = 256 - MORE if needs.wider else 256
    if q.size(3) != v.size(3) or q.size(3) % 8 or q.size(3) > widest:
        return f"the heads' widths are {q.size(3)} and {v.size(3)}, not one multiple of 8 up to {widest}"
    capability = torch.cuda.get_device_capability(q.device)
    if capability < (8, 0):
        return f"the GPU has capability {capability}, and must have (8, 0), Ampere's, or more"
    return ""


def _no_random_numbers(q: Tensor) -> Tensor:
    """Return a state of the generator, which dropout alone would read."""
    return torch.empty((), dtype=torch.int64, device=q.device)


@functools.cache
def _takes_fewer_key_heads() -> bool:
    """Return whether torch's kernel for CPUs computes fewer key heads than query heads.

    That of torch 2.6 reads and writes outside of the tensors; 2.13 is the oldest in which it was verified.
    """
    return torch_version() >= (2, 13)


def _expanded(x: Tensor, heads: int) -> Tensor:
    """Repeat key heads, so that each query head has one."""
    return x if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), 1)


def _summed(x: Tensor, heads: int) -> Tensor:
    return x if x.size(1) == heads else x.unflatten(1, (heads, -1)).sum(2, dtype=torch.float32)
