# SPDX-License-Identifier: Apache-2.0
"""Sums over the ranks."""

from __future__ import annotations

from torch import Tensor

from ..ops.gather import all_gather
from .part import Parts


def sum_over_ranks(parts: Parts, x: Tensor) -> Tensor:
    """Return the sum of all ranks' tensors, on each; each receives the sum of all ranks' gradients."""
    return all_gather(x[None], parts.group).sum(0, dtype=x.dtype)
