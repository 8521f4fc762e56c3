# SPDX-License-Identifier: Apache-2.0
"""A few numbers that stand for a tensor, and how far two tensors are apart by them."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

_NUMBERS = 256
_AT_ONCE = 1 << 24  # elements that are copied to float64 at a time
# A larger relative difference is no rounding error, by the least precise type that was computed in.
_TOLERANCES = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 2e-3, torch.complex64: 2e-3}
_OF_LOW_PRECISION = 5e-2


def sketch(x: Tensor, numbers: int = _NUMBERS) -> Tensor:
    """Return numbers on the CPU that are linear in a tensor's elements, and about as large as these.

    They are its elements, or weighted sums: a larger tensor is cut into as many runs, and each element of a
    run has a random weight.
    """
    flat = (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)
    size = -(-flat.numel() // numbers)
    if size < 2:
        return flat.to("cpu", torch.float64, copy=True)
    weights, rows = _weights(size).to(x.device), flat.numel() // size
    runs = flat[: rows * size].view(rows, size).split(max(1, _AT_ONCE // size))
    sums = [run.double() @ weights for run in runs]
    rest = flat[rows * size :].double()
    return torch.cat([*sums, (rest @ weights[: len(rest)])[None]]).cpu() / math.sqrt(size)


@functools.lru_cache(maxsize=64)
def _weights(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")


def largest(numbers: Tensor) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    return float(numbers.nan_to_num(0.0, 0.0, 0.0).abs().max()) if numbers.numel() else 0.0


def apart(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two sketches. Infinite and NaN numbers have to be the same."""
    if actual.shape != expected.shape:
        return math.inf
    finite = actual.isfinite() & expected.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return largest((actual - expected)[finite & ~same]) if bool((finite | same).all()) else math.inf


def relative(distance: float, scale: float) -> float:
    if not distance:
        return 0.0
    return distance / scale if scale else math.inf


def tolerance(dtype: torch.dtype) -> float:
    """Return up to which relative difference values of a dtype are alike; 0 for what is not rounded."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return _TOLERANCES.get(dtype, _OF_LOW_PRECISION)
