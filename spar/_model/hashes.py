# SPDX-License-Identifier: Apache-2.0
"""A few numbers that stand for a tensor or for a model's parameters, computed on their device."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .groups import is_apart, ranks_of

_MOST, _MOST_FLOATS = 2**20, 2**14  # items of a tensor that are read
_SAMPLES = 8  # items of each parameter


def numbers(x: Tensor) -> list[Tensor]:
    """Return the hash of a tensor of ints; of floats a projection and the square of the norm.

    Floats that were rounded otherwise have numbers that are near. Of a tensor of more than 2^20 ints or 2^14
    floats as many are read, evenly spaced.
    """
    if x.is_complex():
        x = torch.view_as_real(x)
    if not x.is_floating_point():
        flat = _thinned(x, _MOST).reshape(-1)
        return [(flat * _weights(_room(flat.numel()), x.device)[: flat.numel()]).sum()]
    flat = _thinned(x, _MOST_FLOATS).reshape(-1)
    if flat.dtype != torch.float64:
        flat = flat.float()
    return [
        torch.dot(flat, _signs(_MOST_FLOATS, x.device, flat.dtype)[: flat.numel()]),
        torch.dot(flat, flat),
    ]


def _thinned(x: Tensor, most: int) -> Tensor:
    while x.numel() > most:
        dim = max(range(x.dim()), key=x.shape.__getitem__)
        step = min(-(-x.numel() // most), x.size(dim))
        x = x[(slice(None),) * dim + (slice(None, None, step),)]
    return x


def _room(items: int) -> int:
    return 1 << max(items - 1, 1).bit_length()


@functools.lru_cache(maxsize=64)
def _weights(items: int, device: torch.device) -> Tensor:
    """Return odd ints, of which a sum of products with any other ints is another one."""
    with torch.inference_mode(False):
        x = torch.arange(1, items + 1, device=device) * 0x1E3779B97F4A7C15
        x = (x ^ (x >> 29)) * 0x3F58476D1CE4E5B9
        return (x ^ (x >> 32)) | 1


@functools.lru_cache(maxsize=64)
def _signs(items: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return (1 - (_weights(items, device) >> 11 & 2)).to(dtype)


# ---- parameters ----


def compared(model: nn.Module, group: Any) -> list[tuple[str, Tensor]]:
    """Return the parameters that are to be the same on all ranks of a sequence, with their names.

    These are plain ones, replicated DTensors, and the local shards of those that other ranks divide. Not
    those that the group's ranks divide: FSDP's, and those that are marked as Megatron and DeepSpeed mark
    experts (`allreduce=False`) and layers (`tensor_model_parallel`).
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return []
    found = []
    parameters: list[tuple[str, Any]] = list(model.named_parameters())
    for name, p in parameters:
        if not getattr(p, "allreduce", True) or getattr(p, "tensor_model_parallel", False):
            continue
        placements = getattr(p, "placements", None)  # A DTensor has placements.
        is_whole = placements is not None and all(each.is_replicate() for each in placements)
        if is_whole or (placements is not None and is_apart(group, ranks_of(p.device_mesh))):
            found.append((name, p._local_tensor))
        elif type(p) is nn.Parameter and p.layout is torch.strided:
            found.append((name, p))
    return [(name, p) for name, p in found if p.numel() and not p.is_meta]


def prefixes(parameters: list[tuple[str, Tensor]], device: torch.device) -> Tensor:
    """Return for each parameter a hash of some items of it, and of all parameters before."""
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for _, p in _ordered(parameters):
        flat = p.detach() if p.is_contiguous() else _thinned(p.detach(), _MOST).contiguous()
        flat = flat.view(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
        buckets.setdefault((p.dtype, p.device), []).append(sample)
    bits = [torch.cat(each).to(torch.float64).view(torch.int64).to(device) for each in buckets.values()]
    sizes = [x.numel() for each in buckets.values() for x in each]
    items = torch.cat(bits)
    sums = (items * _weights(_room(items.numel()), device)[: items.numel()]).cumsum(0)
    return sums[torch.tensor(sizes, device=device).cumsum(0) - 1]


def names_of(parameters: list[tuple[str, Tensor]]) -> list[str]:
    """Return their names in the order of `prefixes`."""
    return [name for name, _ in _ordered(parameters)]


def _ordered(parameters: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    kinds = dict.fromkeys([(p.dtype, p.device) for _, p in parameters])
    for kind in kinds:
        yield from [(name, p) for name, p in parameters if (p.dtype, p.device) == kind]
