# SPDX-License-Identifier: Apache-2.0
"""The mask of a call: over the whole sequence, as torch's attn_mask, or one value for each key."""

from __future__ import annotations

import torch
from torch import Tensor

from .._exchange.arguments import Arguments


def shape_of_mask(
    call: Arguments, mask: object, whole_shape: tuple[int, int, int, int]
) -> tuple[int, ...] | None:
    """Return the mask's shape with four dims, each of its size in the whole shape, [B, H, S, T], or 1."""
    if mask is None:
        return None
    batch, _, queries, keys = whole_shape
    whole = f"[.., {queries}, {keys}] over the whole sequence, or a key mask [{batch}, {keys}]"
    if not isinstance(mask, Tensor):
        raise call.type_error("mask", f"{mask!r:.200}", f"a tensor {whole}, or None")
    if mask.dtype is not torch.bool and not mask.dtype.is_floating_point:
        expected = "a bool or floating dtype; pass mask.bool() if queries attend where it is not 0"
        raise call.type_error("mask", f"a tensor of {mask.dtype}", expected)
    shape = list(mask.shape)
    if mask.dim() == 2 and shape == [batch, keys]:
        # Of one query, a mask means the same either way.
        if batch == queries > 1:
            raise call.error(
                "mask", f"of shape {shape}", f"3 or 4 dims, as it may be a key mask or [{queries}, {keys}]"
            )
        return batch, 1, 1, keys
    if not 2 <= mask.dim() <= 4:
        raise call.error("mask", f"of shape {shape}", whole)
    full = *[1] * (4 - mask.dim()), *shape
    if any(size not in (1, most) for size, most in zip(full, whole_shape, strict=True)):
        raise call.error("mask", f"of shape {shape}", whole)
    return full


def sliced(mask: Tensor, query: int, queries: int, key: int, keys: int) -> Tensor:
    """Return the part of a mask for a block of the sequence; dims of size 1 stay."""
    if mask.size(2) > 1:
        mask = mask.narrow(2, query, queries)
    return mask.narrow(3, key, keys) if mask.size(3) > 1 else mask


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as what is added to scores: -inf where a bool is False, or a float its dtype's lowest."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype).masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def joined(mask: Tensor, allowed: Tensor) -> Tensor:
    """Forbid what a mask or `allowed` forbids."""
    return mask & allowed if mask.dtype is torch.bool else mask.masked_fill(~allowed, -torch.inf)


def causal_mask(queries: int, keys: int, first: int, device: torch.device) -> Tensor:
    """Return [queries, keys]: whether a key is not behind the query, of queries that begin at key `first`."""
    places = torch.arange(first, first + queries, device=device)
    return torch.arange(keys, device=device) <= places[:, None]
