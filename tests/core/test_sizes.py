# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from helpers.reference import rule
from hypothesis import given, strategies as st

import spar
from spar.sizes import swapped_hint

pytestmark = pytest.mark.quick


@given(st.integers(0, 5000), st.integers(1, 300))
def test_size_rule(total: int, world: int) -> None:
    sizes = spar.cal_split_sizes(total, world)
    assert sizes == rule(total, world)
    assert spar.cal_split_sizes(torch.tensor(total), world) == sizes


@given(st.lists(st.integers(0, 2**40), max_size=9), st.integers(1, 9))
def test_size_rule_of_several_sequences(sizes: list[int], world: int) -> None:
    table = spar.cal_split_sizes_multi(sizes, world)
    assert table.dtype == torch.int64
    assert table.shape == (world, len(sizes))
    for column, size in enumerate(sizes):
        assert table[:, column].tolist() == spar.cal_split_sizes(size, world)


def test_large_totals() -> None:
    assert sum(spar.cal_split_sizes(2**62 + 5, 7)) == 2**62 + 5
    assert spar.cal_split_sizes_multi([2**62 + 5], 7).sum().item() == 2**62 + 5


@pytest.mark.parametrize("function", [spar.cal_split_sizes, lambda n, w: spar.cal_split_sizes_multi([n], w)])
def test_bad_sizes_raise(function: object) -> None:
    with pytest.raises(ValueError, match="world_size is 0"):
        function(4, 0)  # type: ignore[operator]
    with pytest.raises(ValueError, match="-3"):
        function(-3, 2)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"world_size is 2000000; .* at most 1048576; did you swap it"):
        function(8, 2_000_000)  # type: ignore[operator]


@given(st.integers(1, 300), st.integers(1, 3000))
def test_swapped_sizes_are_recognized(world: int, total: int) -> None:
    hint = swapped_hint(spar.cal_split_sizes(world, total), world)
    assert hint == (f"; did you swap the arguments of cal_split_sizes(dim_size={total}, world_size={world})?")
    assert not swapped_hint([total] * (world + 1), world)
    assert not swapped_hint([1.5], 1) and not swapped_hint([], 3) and not swapped_hint([[3]], 3)
