"""Kernels that also return each query's log-sum-exp, and the choice among them."""

from __future__ import annotations

import torch

from .aten import FlashCpu, FlashCuda
from .blockwise import Blockwise
from .kernel import Kernel

_BLOCKWISE: Kernel = Blockwise()
# by device type; the first that can compute a call does so
KERNELS: dict[str, dict[str, Kernel]] = {
    "cpu": {"flash": FlashCpu(), "blockwise": _BLOCKWISE},
    "cuda": {"flash": FlashCuda(), "blockwise": _BLOCKWISE},
}
_OTHERS = {"blockwise": _BLOCKWISE}


def kernel_for(q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> Kernel:
    """Return the kernel for blocks of these tensors."""
    known = KERNELS.get(q.device.type, _OTHERS)
    return next(kernel for kernel in known.values() if not kernel.refuses(q, v, mask))
