# SPDX-License-Identifier: Apache-2.0
"""Kernels that also return each query's log-sum-exp, and the choice among them."""

from __future__ import annotations

from torch import Tensor

from .aten import FlashCpu, FlashCuda
from .blockwise import Blockwise
from .flash_attn import FlashAttn
from .flex import Flex
from .kernel import Kernel, Needs

_BLOCKWISE: Kernel = Blockwise()
_FLEX: Kernel = Flex()
# By device type and name. The first that does not refuse a block computes it. Blockwise refuses only windows
# and spans: kernels after it compute blocks with spans, and others if they are named.
KERNELS: dict[str, dict[str, Kernel]] = {
    "cpu": {"flash": FlashCpu(), "blockwise": _BLOCKWISE, "flex": _FLEX},
    "cuda": {"flash": FlashCuda(), "flash_attn": FlashAttn(), "blockwise": _BLOCKWISE, "flex": _FLEX},
}
_ON_ANY_DEVICE = {"blockwise": _BLOCKWISE}
NAMES = tuple(sorted({name for kernels in KERNELS.values() for name in kernels}))


def reason_against(name: str, q: Tensor, v: Tensor, needs: Needs) -> str:
    """Return why the kernel of this name cannot compute blocks of these tensors; empty if it can."""
    kernel = KERNELS.get(q.device.type, _ON_ANY_DEVICE).get(name)
    return f"it does not run on {q.device.type}" if kernel is None else _refusal(kernel, q, v, needs)


def kernel_for(name: str | None, q: Tensor, v: Tensor, needs: Needs) -> Kernel:
    """Return the named kernel, or the first that can compute blocks of these tensors."""
    kernels = KERNELS.get(q.device.type, _ON_ANY_DEVICE)
    if name is not None:
        return kernels[name]
    for kernel in kernels.values():
        if not _refusal(kernel, q, v, needs):
            return kernel
    raise AssertionError("blockwise refuses nothing")


def can_compute(name: str | None, q: Tensor, v: Tensor, needs: Needs) -> bool:
    """Whether the named kernel, or any if none is named, can compute blocks of these tensors."""
    kernels = KERNELS.get(q.device.type, _ON_ANY_DEVICE)
    names = kernels if name is None else [name]
    return any(not _refusal(kernels[name], q, v, needs) for name in names)


def _refusal(kernel: Kernel, q: Tensor, v: Tensor, needs: Needs) -> str:
    if kernel is not _BLOCKWISE and 0 in (q.size(3), v.size(3)):
        return f"heads of q or v have width 0: {q.size(3)} and {v.size(3)}"
    return kernel.refuses(q, v, needs)
