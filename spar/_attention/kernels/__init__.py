# SPDX-License-Identifier: Apache-2.0
"""Kernels that also return each query's log-sum-exp, and the choice among them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import BlocksMaker
from ..spans import Spans
from .aten import CudnnCuda, FlashCpu, FlashCuda, prefers_cudnn
from .blockwise import Blockwise
from .flash_attn import FlashAttn
from .flex import Flex
from .kernel import Kernel, Needs

_BLOCKWISE = Blockwise()
_FLEX = Flex()
# By device type and name, in the order in which `kernel_for` asks them. Blockwise refuses only windows,
# spans and parts.
KERNELS: dict[str, dict[str, Kernel]] = {
    "cpu": {"flash": FlashCpu(), "blockwise": _BLOCKWISE, "flex": _FLEX},
    "cuda": {
        "cudnn": CudnnCuda(),
        "flash": FlashCuda(),
        "flash_attn": FlashAttn(),
        "blockwise": _BLOCKWISE,
        "flex": _FLEX,
    },
}
_ON_ANY_DEVICE = {"blockwise": _BLOCKWISE}
NAMES = tuple(sorted({name for kernels in KERNELS.values() for name in kernels}))


def reason_against(name: str, q: Tensor, v: Tensor, needs: Needs) -> str:
    """Return why the kernel of this name cannot compute blocks of these tensors; empty if it can."""
    kernel = KERNELS.get(q.device.type, _ON_ANY_DEVICE).get(name)
    return f"it does not run on {q.device.type}" if kernel is None else _refusal(kernel, q, v, needs)


def kernel_for(name: str | None, q: Tensor, v: Tensor, needs: Needs) -> Kernel:
    """Return the named kernel if it can, or the first that suits blocks of these tensors; else blockwise."""
    kernels = KERNELS.get(q.device.type, _ON_ANY_DEVICE)
    # It cannot where columns for the gradient of a log-sum-exp make heads too wide.
    if name is not None and not _refusal(kernels[name], q, v, needs):
        return kernels[name]
    for kernel in kernels.values():
        fits = kernel.takes_no_width or 0 not in (q.size(3), v.size(3))
        fits = fits and (kernel.takes_parts or not needs.parts)
        if fits and kernel.suits(q, v, needs) and not kernel.refuses(q, v, needs):
            return kernel
    if why := _refusal(_BLOCKWISE, q, v, needs):
        raise NotImplementedError(
            f"attention: no kernel for heads of width {q.size(3)} and {v.size(3)}: {why}"
        )
    return _BLOCKWISE


def flash_instead_of_cudnn(q: Tensor, v: Tensor) -> FlashCuda | None:
    """Return the flash kernel where torch takes cuDNN's, which makes a plan for each document's length."""
    kernel = KERNELS.get(q.device.type, {}).get("flash")
    if not isinstance(kernel, FlashCuda) or torch.compiler.is_compiling() or not prefers_cudnn(q, v):
        return None
    return None if _refusal(kernel, q, v, Needs()) else kernel


def takes_parts(name: str | None, q: Tensor, v: Tensor, needs: Needs) -> bool:
    """Whether the named kernel, or any, computes blocks of parts of these tensors."""
    kernels = KERNELS.get(q.device.type, _ON_ANY_DEVICE)
    chosen = [kernel for kernel_name, kernel in kernels.items() if name in (None, kernel_name)]
    return any(not _refusal(kernel, q, v, needs._replace(parts=True)) for kernel in chosen)


def blocks_of_spans(name: str | None, q: Tensor, v: Tensor, needs: Needs, spans: Spans) -> BlocksMaker | None:
    """Return what finds the blocks in which the named kernel, or the first that can, reads spans; None: none.

    needs: besides what it must have to read spans.

    On a GPU flex compiles to find out whether it can, and is asked for that last.
    """
    for kernel_name, kernel in KERNELS.get(q.device.type, _ON_ANY_DEVICE).items():
        if name not in (None, kernel_name) or kernel.reads is None:
            continue
        blocks = kernel.blocks(spans, q.size(2), name is not None)
        # One that is named computes what it can, and may then have no backward.
        reads = kernel.reads._replace(softcap=needs.softcap, wider=needs.wider and name is None)
        if blocks is not None and not _refusal(kernel, q, v, reads):
            return blocks
    return None


def _refusal(kernel: Kernel, q: Tensor, v: Tensor, needs: Needs) -> str:
    if not kernel.takes_no_width and 0 in (q.size(3), v.size(3)):
        return f"heads of q or v have width 0: {q.size(3)} and {v.size(3)}"
    if needs.parts and not kernel.takes_parts:
        return "it takes one document at a time"
    return kernel.refuses(q, v, needs)
