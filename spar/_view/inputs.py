# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks call a model with the same inputs: noise drawn from another seed would train silently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._group.registry import place_of
from ..ops.gather import all_gather
from .part import tensors_in

_SIZES, _SAMPLES = 8, 120  # numbers that stand for each tensor, and the sum of one of integers
_TOLERANCE = 1e-2  # of the largest sample: another GPU may round the embeddings differently


def check_equal(group: Any, inputs: Mapping[str, Any]) -> None:
    """Compare the inputs' tensors by shapes and some elements, and integers by all elements. Collective.

    Raises:
        ValueError: an input differs between ranks. Every rank raises.
    """
    tensors = {
        f"{name}[{i}]" if x is not value else name: x
        for name, value in sorted(inputs.items())  # callers may pass keywords in any order
        for i, x in enumerate(tensors_in(value))
        if x.device.type != "meta"
    }
    place = place_of(group)
    if not tensors or place.world == 1:
        return
    # Of a DTensor, which is over other ranks, each rank has its shard to compare.
    local = torch.stack([_numbers(getattr(x, "_local_tensor", x)) for x in tensors.values()])
    device = next(iter(tensors.values())).device  # a group may serve one device type only
    gathered = all_gather(local[None].to(device), group).cpu()  # [P, tensors, numbers]
    for i, (name, x) in enumerate(tensors.items()):
        first = gathered[0, i]
        scale = float(first[_SIZES:].abs().nan_to_num(0.0, 0.0, 0.0).max())
        tolerance = _TOLERANCE * scale if x.is_floating_point() else 0.0
        for rank in range(1, place.world):
            numbers = gathered[rank, i]
            same = torch.equal(numbers[:_SIZES], first[:_SIZES])
            if same and torch.allclose(numbers, first, rtol=0, atol=tolerance, equal_nan=True):
                continue
            shapes = [[int(n) for n in row[:_SIZES] if n >= 0] for row in (first, numbers)]
            value = "another value" if same else f"of shape {shapes[1]}, on rank 0 {shapes[0]}"
            raise ValueError(
                f"a sharded model's forward on rank {place.rank} of {place.world}: {name} is {value} on rank "
                f"{rank}; expected equal inputs on all ranks: draw noise and timesteps from one seed, or "
                "broadcast them"
            )


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's sizes, -1 for dims that it lacks, and elements from all over it, 0 beyond its end.

    Integers, such as token ids, must be equal: the last number is a sum of all, weighted by their places.
    """
    out = torch.zeros(_SIZES + _SAMPLES + 1, dtype=torch.float64, device="cpu")
    out[:_SIZES] = -1
    sizes = list(x.shape)[:_SIZES]
    out[: len(sizes)] = torch.tensor(sizes, dtype=torch.float64, device="cpu")
    flat = x.detach().flatten()
    at = (
        torch.linspace(0, max(0, flat.numel() - 1), min(_SAMPLES, flat.numel()), device="cpu")
        .long()
        .to(x.device)
    )
    chosen = flat[at]
    if not x.is_floating_point() and not x.is_complex():
        weights = torch.arange(1, flat.numel() + 1, device=x.device) * 0x9E3779B1  # odd: each place counts
        out[-1] = float(int((flat.to(torch.int64) * weights).sum()) % 2**53)
    out[_SIZES : _SIZES + len(at)] = (chosen.real if chosen.is_complex() else chosen).to("cpu", torch.float64)
    return out
