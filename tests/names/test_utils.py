# SPDX-License-Identifier: Apache-2.0
"""spar.utils: names and arithmetic. See test_stateless_group and test_stateless_init for the groups."""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.reference import assert_same, cells

from spar import utils
from spar.utils import get_pp_indices

pytestmark = pytest.mark.quick


def test_public_names() -> None:
    assert set(utils.__all__) == {
        "USE_SCHED_YIELD",
        "StatelessProcessGroup",
        "divide",
        "ensure_divisibility",
        "get_pp_indices",
        "init_gloo_process_group",
        "sched_yield",
        "split_tensor_along_last_dim",
        "stateless_destroy_torch_distributed_process_group",
        "stateless_init_torch_distributed_process_group",
    }


# ---- sched_yield ----


@pytest.mark.parametrize(
    ("version", "expected"),
    [((3, 10, 7), False), ((3, 10, 8), True), ((3, 11, 0), False), ((3, 11, 1), True), ((3, 14, 0), True)],
)
def test_use_sched_yield(version: tuple[int, ...], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(utils.__file__).with_name("arithmetic.py").read_text()
    monkeypatch.setattr(sys, "version_info", (*version, "final", 0))
    names: dict[str, Any] = {"__name__": "spar.utils.copy", "__package__": "spar.utils"}
    exec(compile(source, "arithmetic.py", "exec"), names)
    assert names["USE_SCHED_YIELD"] is expected


def test_sched_yield(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(os, "sched_yield", lambda: calls.append("yield"), raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: calls.append(f"sleep {seconds}"))
    for use in (True, False):
        monkeypatch.setattr(utils.arithmetic, "USE_SCHED_YIELD", use)
        utils.sched_yield()
    assert calls == ["yield", "sleep 0"]


# ---- divide, ensure_divisibility, split_tensor_along_last_dim ----


def test_divide() -> None:
    assert [utils.divide(n, 4) for n in (0, 4, 12, -8)] == [0, 1, 3, -2]
    utils.ensure_divisibility(12, 4)
    for function in (utils.divide, utils.ensure_divisibility):
        for denominator in (5, 0):
            with pytest.raises(ValueError, match=f"^12 is not divisible by {denominator}$"):
                function(12, denominator)


def test_split_tensor_along_last_dim() -> None:
    x = cells((2, 3, 6), torch.float32)
    for contiguous in (False, True):
        parts = utils.split_tensor_along_last_dim(x, 3, contiguous)
        assert len(parts) == 3
        for n, part in enumerate(parts):
            assert_same(part, x[..., 2 * n : 2 * n + 2])
            assert part.is_contiguous() is contiguous
            assert (part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) is not contiguous
    assert [list(p.shape) for p in utils.split_tensor_along_last_dim(torch.zeros(2, 0), 3)] == [[2, 0]] * 3
    for tensor, partitions, text in (
        (x, 4, r"tensor.size\(-1\) is 6; expected a multiple of 4"),
        (x, 0, "num_partitions is 0; expected at least 1"),
        (torch.tensor(1.0), 1, "expected at least one dim"),
    ):
        with pytest.raises(ValueError, match=text):
            utils.split_tensor_along_last_dim(tensor, partitions)


# ---- get_pp_indices ----


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (4, [(0, 1), (1, 3), (3, 4)]),
        (5, [(0, 2), (2, 4), (4, 5)]),
        (3, [(0, 2), (2, 3)]),
        (7, [(0, 7)]),
        (2, [(0, 0), (0, 1), (1, 2), (2, 2)]),
    ],
)
def test_get_pp_indices(layers: int, expected: list[tuple[int, int]]) -> None:
    assert [get_pp_indices(layers, rank, len(expected)) for rank in range(len(expected))] == expected


def test_get_pp_indices_gives_the_first_and_last_stage_fewer_layers() -> None:
    for size in range(1, 9):
        for layers in range(30):
            sizes = [layers // size] * size
            for n in range(layers % size):
                sizes[size - 2 - n] += 1
            starts = [sum(sizes[:rank]) for rank in range(size + 1)]
            found = [get_pp_indices(layers, rank, size) for rank in range(size)]
            assert found == list(itertools.pairwise(starts)), (layers, size)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((-1, 0, 1), ValueError, "num_layers is -1; expected at least 0"),
        ((4, 0, 0), ValueError, "pp_size is 0; expected at least 1"),
        ((4, 2, 2), ValueError, "pp_rank is 2; expected 0 to 1"),
        ((4, -1, 2), ValueError, "pp_rank is -1; expected 0 to 1"),
        ((4.0, 0, 2), TypeError, "num_layers is 4.0; expected an int"),
    ],
)
def test_get_pp_indices_rejects(arguments: tuple[Any, ...], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        get_pp_indices(*arguments)
