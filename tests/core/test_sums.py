# SPDX-License-Identifier: Apache-2.0
"""The core's sums give the same bits as torch, for each dtype, any values, lengths and alignments."""

from __future__ import annotations

import ctypes

import pytest
import torch
from helpers import core
from test_scales import real_values, values

from spar import _C
from spar._transports.dtypes import SUM_TYPES, add_rows

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LENGTHS = (0, 1, 7, 63, 255, 256, 257, 1000)


def draw(dtype: torch.dtype, rows: int, length: int) -> torch.Tensor:
    """Return rows of any bits, among them non-finite values, subnormal ones and both zeros."""
    generator = torch.Generator().manual_seed(rows)
    if dtype == torch.bool:
        return torch.randint(2, (rows, length), generator=generator).bool()
    if dtype == torch.complex32:
        known = torch.view_as_complex(real_values(torch.float16).view(-1, 2))
    elif dtype.is_floating_point or dtype.is_complex:
        known = values(dtype)
    else:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, (rows, length), generator=generator, dtype=dtype)
    return known[torch.randint(len(known), (rows, length), generator=generator)]


def shifted(x: torch.Tensor, by: int) -> tuple[torch.Tensor, int]:
    """Return a copy of the bytes of x, and the address of the copy, which is `by` bytes past a cache line."""
    items = x.contiguous().view(-1).unsqueeze(-1).view(torch.uint8).view(-1)
    room = torch.zeros(len(items) + 192, dtype=torch.uint8)
    start = -room.data_ptr() % 64 + by
    room[start : start + len(items)] = items
    return room, room.data_ptr() + start


def core_sum(rows: torch.Tensor, by: int) -> torch.Tensor:
    output = torch.full_like(rows[0], 1)
    held = [shifted(row, by * i % 64) for i, row in enumerate(rows)]
    parts = (ctypes.c_void_p * len(rows))(*[address for _, address in held])
    kind = SUM_TYPES[rows.dtype]
    core.library().spar_sum(kind, output.data_ptr(), parts, len(rows), output.numel() * output.itemsize)
    return output


def assert_same_bits(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare bits; any NaN equals any NaN."""
    nan = torch.zeros_like(got, dtype=torch.bool)
    if got.is_complex():
        got, wanted = torch.view_as_real(got), torch.view_as_real(wanted)
    if got.is_floating_point():
        nan = got.isnan() & wanted.isnan()
    differ = (got.view(BITS[got.itemsize]) != wanted.view(BITS[got.itemsize])) & ~nan
    assert not differ.any(), f"{int(differ.sum())} differ: {got[differ][:4]} for {wanted[differ][:4]}"


@pytest.mark.parametrize("dtype", SUM_TYPES, ids=lambda dtype: str(dtype)[6:])
def test_sums_match_torch(dtype: torch.dtype) -> None:
    for count in range(1, 8):
        for by, length in enumerate(LENGTHS):
            rows = draw(dtype, count, length)
            assert_same_bits(core_sum(rows, by), add_rows(rows))


@pytest.mark.parametrize("dtype", SUM_TYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.usefixtures("stores")
def test_long_sums_match_torch(dtype: torch.dtype) -> None:
    """Two rows and three, as long as stores are chosen for; nothing beside the sums is written."""
    for count, by in ((2, 0), (3, 8), (2, 24)):
        rows = draw(dtype, count, ((1 << 20) + 4096) // dtype.itemsize + 3)
        bytes_ = rows[0].nbytes
        room = torch.full((bytes_ + 192,), 7, dtype=torch.uint8)
        start = -room.data_ptr() % 64 + by
        parts = (ctypes.c_void_p * count)(*[row.data_ptr() for row in rows])
        core.library().spar_sum(SUM_TYPES[dtype], room.data_ptr() + start, parts, count, bytes_)
        assert (room[:start] == 7).all() and (room[start + bytes_ :] == 7).all()
        assert_same_bits(room[start : start + bytes_].clone().view(dtype), add_rows(rows))


def test_every_dtype_that_torch_adds_has_a_sum() -> None:
    """Unsigned ints above 8 bits, small floats and packed types have no addition in torch on a CPU."""
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        try:
            torch.zeros(2, dtype=dtype) + torch.zeros(2, dtype=dtype)
        except (RuntimeError, NotImplementedError, TypeError):
            assert dtype not in SUM_TYPES
        else:
            assert dtype in SUM_TYPES, dtype
    assert [code for _, code in _C.sum_types() if code < 1] == []
