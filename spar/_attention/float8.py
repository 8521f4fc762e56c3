# SPDX-License-Identifier: Apache-2.0
"""Rows of a head as float8 with a scale, by which exchanges move about half of the bytes of 16 bits.

A row x [D] of one token and head becomes D bytes of float8_e4m3fn, x / s rounded to the nearest, and the
float32 s = max |x| / 448 in 4 bytes behind them. What is read, y = s float8(x / s), is within |x| / 16 of x,
or within s / 1024 where |x| is below s / 64: there float8_e4m3fn has multiples of 1 / 512. So no element is
more than max |x| / 28 away. A row with an infinity or NaN becomes NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

DIRECTIONS = {None: (False, False), "forward": (True, False), "backward": (False, True), "both": (True, True)}
# What rows may be of: others have more than float8 can be said to approximate, or less.
DTYPES = torch.float32, torch.bfloat16, torch.float16
# Bytes of a row's scale.
SCALE = 4
_DTYPE = torch.float8_e4m3fn
_MOST = torch.finfo(_DTYPE).max
# A row of zeros, or of less than this, has no scale of its own: it would be 0, or not exact.
_LEAST = torch.finfo(torch.float32).tiny


def narrowed_rows(x: Tensor) -> Tensor:
    """Return rows [..., D] as bytes [..., D + 4]."""
    rows = x.to(torch.float32)
    scales = (rows.abs().amax(-1, keepdim=True) / _MOST).clamp(min=_LEAST)
    return torch.cat([(rows / scales).to(_DTYPE).view(torch.uint8), scales.view(torch.uint8)], -1)


def widened_rows(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows [..., D] that are in bytes [..., D + 4]."""
    width = packed.size(-1) - SCALE
    # Four bytes may begin anywhere, a float32 of a tensor not.
    scales = packed[..., width:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (packed[..., :width].view(_DTYPE).to(torch.float32) * scales).to(dtype)
