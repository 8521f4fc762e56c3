# SPDX-License-Identifier: Apache-2.0
"""Gradients reduced over a group in one exchange: one for each would mostly be waits for a core."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def averaged(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return each tensor's average over the ranks, as DDP does; summed in float64."""
    flat = torch.cat([x.detach().double().flatten() for x in tensors])
    dist.all_reduce(flat, group=group)
    parts = (flat / group.size()).split([x.numel() for x in tensors])
    return [part.view(x.shape).to(x.dtype) for part, x in zip(parts, tensors, strict=True)]


def gradients(model: nn.Module, average: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the gradients of all parameters, zeros where there is none; averaged over a group."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return found if average is None else averaged(found, average)
