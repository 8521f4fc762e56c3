# SPDX-License-Identifier: Apache-2.0
"""Each operation's equation in plain torch, on the global tensor: what a rank holds and must receive.

Every cell encodes its global index, so that the expected values need no communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def rule(total: int, world: int) -> list[int]:
    return [len(range(rank, total, world)) for rank in range(world)]  # by counting, unlike the implementation


def in_runs(sizes: Sequence[int]) -> list[int]:
    """Return the owner of each index: the first size for rank 0, the next for rank 1, ..."""
    return [rank for rank, size in enumerate(sizes) for _ in range(size)]


def among(owners: Sequence[int], outer: int, inner: int) -> list[int]:
    """Split each outer rank's indices among inner ranks, by the size rule; negative: they are neighbours."""
    shares = [iter(in_runs(rule(list(owners).count(rank), abs(inner)))) for rank in range(outer)]
    if inner < 0:
        return [owner * -inner + next(shares[owner]) for owner in owners]
    return [next(shares[owner]) * outer + owner for owner in owners]


def zigzag(total: int, ring: int, inner: int = 1) -> list[int]:
    there_and_back = [*range(ring), *reversed(range(ring))]
    return among([there_and_back[chunk] for chunk in in_runs(rule(total, 2 * ring))], ring, inner)


def packed(lengths: Sequence[int], ring: int, inner: int = 1) -> list[int]:
    return among([rank for length in lengths for rank in in_runs(rule(length, ring))], ring, inner)


def owned(x: torch.Tensor, owners: Sequence[int], dim: int, rank: int) -> torch.Tensor:
    """Return the part of a rank: its indices, in ascending order."""
    own = torch.tensor([index for index, owner in enumerate(owners) if owner == rank], dtype=torch.int64)
    flat = x.movedim(dim, 0)
    return torch.stack([flat[i] for i in own], 0).movedim(0, dim) if len(own) else x.narrow(dim, 0, 0)


def joined(parts: Sequence[torch.Tensor], owners: Sequence[int], dim: int) -> torch.Tensor:
    """Return the global tensor of all ranks' parts."""
    rows = [iter(part.movedim(dim, 0)) for part in parts]
    if not owners:
        return parts[0]
    return torch.stack([next(rows[owner]) for owner in owners], 0).movedim(0, dim)


def part(x: torch.Tensor, sizes: list[int], dim: int, rank: int) -> torch.Tensor:
    return x.split(sizes, dim)[rank]


def cells(shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Return a tensor of any dtype whose bytes encode their position; floats are finite and small."""
    count = 1
    for extent in shape:
        count *= extent
    index = torch.arange(count, dtype=torch.int64) + salt * 1009
    if dtype == torch.bool:
        return (index * 7 % 5 < 2).reshape(shape)
    if dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return ((index * 37 % 1021 - 500).double() / 64).to(dtype).reshape(shape)
    if dtype in (torch.complex64, torch.complex128):
        real = (index * 37 % 1021 - 500).double() / 64
        return torch.complex(real, -real.flip(0) * 3).to(dtype).reshape(shape)
    item = dtype.itemsize
    byte = torch.arange(count * item, dtype=torch.int64)
    raw = (byte * 131 + byte // 251 + salt * 17) % 256
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    item = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(a.element_size())
    if item is None:  # complex128: finite in these tests
        return torch.equal(a, b)
    return torch.equal(a.view(item), b.view(item))


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    assert actual.dtype == expected.dtype, (what, actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    assert same_bits(actual, expected), (what, actual, expected)


def scaled(x: torch.Tensor, grad_scale: str | float | None, world: int) -> torch.Tensor:
    if grad_scale == "up":
        return x * world
    if grad_scale == "down":
        return x / world
    return x if grad_scale is None else x * grad_scale
