# SPDX-License-Identifier: Apache-2.0
"""A factor that is applied while copying gives the same bits as torch."""

from __future__ import annotations

import pytest
import torch
from helpers import core
from helpers.core import Scale, ScaleType

pytestmark = pytest.mark.quick

# ---- Scales -----------------------------------------------------------------------------------------------

DTYPES = {  # torch's dtype: spar's, and the int dtype of a real part's size
    torch.float16: (ScaleType.F16, torch.int16),
    torch.bfloat16: (ScaleType.BF16, torch.int16),
    torch.float32: (ScaleType.F32, torch.int32),
    torch.float64: (ScaleType.F64, torch.int64),
    torch.complex64: (ScaleType.C64, torch.int32),
    torch.complex128: (ScaleType.C128, torch.int64),
}
FACTORS = (2.0, 3.0, 5.0, 7.0, 0.1, 64.0, -3.0, -4.0, 2.0**-30)


def real_values(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a 2-byte type, in order and shuffled; of others edge cases and 20,000 random."""
    bits = DTYPES[dtype][1]
    if dtype.itemsize == 2:
        patterns = torch.arange(-(2**15), 2**15).to(bits)
        mixed = patterns[torch.randperm(2**16, generator=torch.Generator().manual_seed(1))]
        return torch.cat([patterns, mixed]).view(dtype)
    info = torch.finfo(dtype)
    normal, subnormal = info.tiny, info.smallest_normal * info.eps
    ends = [0.0, subnormal, 3 * subnormal, 7 * subnormal, normal - subnormal, normal, 1.0, info.max / 3]
    ends += [info.max / 2, info.max, float("inf"), float("nan"), 1 / 3]
    positive = torch.tensor(ends, dtype=dtype)
    drawn = torch.randint(-(2**62), 2**62, (20_000,), generator=torch.Generator().manual_seed(1))
    return torch.cat([positive, -positive, (drawn * 2).view(torch.int64).to(bits).view(dtype)])


def values(dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_complex:
        return real_values(dtype)
    parts = real_values(dtype.to_real())
    few = parts[:26]
    pairs = torch.stack(torch.meshgrid(few, few, indexing="ij"), -1).view(-1, 2)
    return torch.view_as_complex(torch.cat([pairs, parts.view(-1, 2)]))


def as_items(x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(-1).view(torch.uint8)


def assert_same_bits(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare bits; any NaN equals any NaN."""
    if got.is_complex():
        got, wanted = torch.view_as_real(got), torch.view_as_real(wanted)
    bits = DTYPES[got.dtype][1]
    differ = (got.view(bits) != wanted.view(bits)) & ~(got.isnan() & wanted.isnan())
    assert not differ.any(), f"{int(differ.sum())} differ: {got[differ][:4]} for {wanted[differ][:4]}"


every_scale = pytest.mark.parametrize("divide", [False, True], ids=["multiply", "divide"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


@pytest.mark.parametrize("layout", ["contiguous", "stepped", "rows"])
@every_scale
@every_dtype
def test_scales_match_torch(dtype: torch.dtype, divide: bool, layout: str) -> None:
    """Each layout uses another path of the copy: one long run, single items, short runs.

    torch scales a contiguous tensor, because the sign of a complex zero differs between its own paths.
    """
    x = values(dtype)
    if layout == "stepped":
        x = x.repeat_interleave(2)[1::2]
    elif layout == "rows":
        x = x[: len(x) // 4 * 4].view(-1, 4)[:, :3]
    (plan,) = core.build_plans("split", [[as_items(x)]], [[0]])
    for factor in FACTORS:
        scale = Scale(DTYPES[dtype][0], divide, factor)
        ((got,),) = core.world(1).exchange([plan], [[as_items(x)]], scale=scale)
        wanted = x.contiguous() / factor if divide else x.contiguous() * factor
        assert_same_bits(got.view(dtype).squeeze(-1), wanted)


@every_scale
def test_scale_is_applied_once_on_every_route(divide: bool) -> None:
    scale = Scale(ScaleType.F32, divide, 3.0)
    inputs = [[as_items(torch.arange(24.0).view(4, 6) + 100 * rank)] for rank in range(3)]
    plans = core.build_plans("all_to_all", inputs, [[1, 0, 12]], core.SIDE_PULL)
    plain = core.world(3).exchange(plans, inputs)
    pushed = core.world(3).exchange(plans, inputs, scale=scale)
    packed = core.exchange_packed(plans, inputs, scale)
    for (x,), (a,), (b,) in zip(plain, pushed, packed, strict=True):
        x = x.view(torch.float32)
        assert torch.equal(a.view(torch.float32), x / 3 if divide else x * 3)
        assert torch.equal(a, b)
