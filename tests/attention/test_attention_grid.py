# SPDX-License-Identifier: Apache-2.0
"""Methods of rows and columns of ranks: random attentions against one process, their bytes, their errors."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.attention_cases import LIMITS, error_of_rank, make_case, whole

import spar
from spar import SequenceLayout
from spar._attention.grid_methods import SHAPES

pytestmark = pytest.mark.one_transport
POOL = 4, 6
Group = dist.ProcessGroup
METHODS = tuple(SHAPES)
CASES = int(os.environ.get("SOAK_ATTENTIONS", "8"))


def check_cases(rank: int, world: int, group: Group, begin: int) -> None:
    for seed in range(begin, begin + CASES):
        case = make_case(seed, world, methods=METHODS)
        if case.keywords["method"] in METHODS:
            rows = random.Random(seed).choice([None, *(n for n in range(1, world + 1) if world % n == 0)])
            case.keywords["grid"] = rows and (rows, world // rows)
        what = seed, case.keywords, case.parts, case.dtype
        try:
            error = error_of_rank(case, group, whole(case))
        except BaseException as failure:
            raise AssertionError(what) from failure
        assert error < LIMITS[case.dtype], (*what, error)


@pytest.mark.parametrize("world", POOL)
def test_random_attentions_match_one_process(ranks: Ranks, world: int) -> None:
    ranks(world, check_cases, 1000 * world, timeout=60 + CASES)


@pytest.mark.parametrize(
    ("heads", "key_heads", "world", "of_2d", "by_heads"),
    [
        (32, 8, 64, (16, 4), (8, 8)),
        (32, 8, 8, (4, 2), (1, 8)),
        (4, 4, 6, (3, 2), (3, 2)),
        # Ranks that share a head would gather it each.
        (4, 1, 4, (4, 1), (4, 1)),
        (5, 5, 7, (7, 1), (7, 1)),
    ],
)
def test_grid_of_fewest_bytes(
    heads: int, key_heads: int, world: int, of_2d: tuple[int, int], by_heads: tuple[int, int]
) -> None:
    assert SHAPES["2d"](heads, key_heads, world) == of_2d
    assert SHAPES["ulysses_gather"](heads, key_heads, world) == by_heads


def attend(group: Group, total: int = 24, **options: Any) -> torch.Tensor:
    layout = SequenceLayout.even(total, group)
    q = torch.ones(1, layout.sizes[group.rank()], 4, 8, requires_grad=True)
    return spar.attention(q, q, q, options.pop("layout", None) or layout, **options)


def check_errors(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.even(24, group)
    shape = f"(rows, columns), two ints of at least 1 whose product is {world}, the number of ranks"
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"grid": (2, 4)}, ValueError, f"grid is (2, 4); expected {shape}"),
        ({"grid": (-2, -2)}, ValueError, f"grid is (-2, -2); expected {shape}"),
        ({"grid": (2, 2, 1)}, TypeError, f"grid is (2, 2, 1); expected {shape}"),
        ({"grid": "22"}, TypeError, f"grid is '22'; expected {shape}"),
        (
            {"grid": (2, 2), "method": "ring"},
            ValueError,
            "grid is (2, 2), and method is 'ring'; expected None",
        ),
        ({"grid": (2, 2), "method": None}, ValueError, "grid is (2, 2), and method is 'ulysses'; expected"),
        ({"dropout_p": 0.5}, ValueError, "dropout_p is 0.5, and the method has a grid; expected none"),
        ({"kernel": lambda q, k, v: q}, ValueError, "kernel is a function, and the method has a grid"),
        ({"layout": (layout, None)}, ValueError, 'k and v have no layout; expected "gather"'),
    ]
    for options, kind, text in wrong:
        with pytest.raises(kind) as caught:
            attend(group, **{"method": "2d", **options})
        assert text in str(caught.value), caught.value
    # What differs between ranks, or fails between two exchanges, is an error on all of them.
    for method in METHODS:
        with pytest.raises(spar.MismatchError, match="grid 4 x 1"):
            attend(group, method=method, grid=(4, 1) if rank == 1 else (2, 2))
        with pytest.raises(KeyError if rank == 1 else spar.SparError, match="of rank 1"):
            attend(group, method=method, bias=fails if rank == 1 else lambda b, h, q, k: 0.0 * q)
    x = torch.ones(1, 6, 4, 8, requires_grad=True)
    y = spar.attention(x, x, x, layout, method="2d").sum()
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(y, x, create_graph=True)


def fails(*_: torch.Tensor) -> torch.Tensor:
    raise KeyError("of rank 1")


def test_errors_are_on_all_ranks(ranks: Ranks) -> None:
    ranks(4, check_errors)


def check_view(rank: int, world: int, group: Group) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 32, 0.0, batch_first=True)
    model, x = torch.nn.TransformerEncoder(layer, 2), torch.randn(2, 13, 32)
    whole = model(x)
    for method in METHODS:
        spar.parallelize(model, group, method=method)
        torch.testing.assert_close(model(x), whole)
        spar.unparallelize(model)


def test_methods_in_a_view(ranks: Ranks) -> None:
    ranks(6, check_view)
