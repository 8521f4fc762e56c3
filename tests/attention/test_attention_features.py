# SPDX-License-Identifier: Apache-2.0
"""docs/attention.md's table of what each method and kernel can compute: each cell is tried."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.attention_cases import LIMITS, Case, error_of_rank, whole
from helpers.whole_attention import METHODS, inputs

from spar import SequenceLayout, Spans
from spar._attention.grid_methods import SHAPES

pytestmark = pytest.mark.one_transport

TOTAL, HEADS, LENGTHS, KEYS = 21, 4, [9, 12], 15
PLACE = torch.arange(TOTAL)
BEFORE = PLACE[:, None] - PLACE
OWNER = LENGTHS[0] <= PLACE
SAME = OWNER[:, None] == OWNER
NEAR, LOWER = (BEFORE >= -2) & (BEFORE <= 5), BEFORE >= 0
CHUNK = Spans.chunks(TOTAL, 8)
CROSS = PLACE[:, None] // 2 >= torch.arange(KEYS)
WINDOW, MASK = {"window": (5, 2)}, PLACE[:, None] % 3 != PLACE % 4
SCORES: dict[str, Any] = {"softcap": 5.0, "bias": lambda b, h, q, k: 0.05 * h * (k - q)}
EVERY = torch.ones(TOTAL, TOTAL, dtype=torch.bool)

# By the table's first column: keywords (sinks: whether there are), the booleans that remain, the layout.
FEATURES: dict[str, tuple[list[dict[str, Any]], torch.Tensor, str]] = {
    "`mask`, a tensor": ([{"mask": MASK}], MASK, "zigzag"),
    "`mask`, Spans": ([{"mask": CHUNK}], CHUNK.dense()[0, 0], "zigzag"),
    "`window`": ([WINDOW], NEAR, "zigzag"),
    "packed documents": ([{}], SAME, "packed"),
    "`window` in packed documents": ([WINDOW], SAME & NEAR, "packed"),
    "`sinks`": ([{"sinks": True}], EVERY, "zigzag"),
    "`softcap`": ([{"softcap": 5.0}], EVERY, "zigzag"),
    "`bias`": ([{"bias": SCORES["bias"]}], EVERY, "zigzag"),
    "all of these but a mask": ([{**WINDOW, **SCORES, "sinks": True}], SAME & NEAR, "packed"),
    "cross attention with Spans, sinks, a softcap and a bias": (
        [{**SCORES, "sinks": True, "mask": Spans.of(lambda b, h, q, k: q // 2 >= k, (1, 1, TOTAL, KEYS))}],
        CROSS,
        "cross",
    ),
    "`dropout_p`": ([{"dropout_p": 1e-13}], EVERY, "zigzag"),
    "`dropout_p` with Spans and a window": (
        [{"dropout_p": 1e-13, "mask": CHUNK, **WINDOW}],
        CHUNK.dense()[0, 0] & NEAR,
        "zigzag",
    ),
    "`dropout_p` with sinks, a softcap or a bias": (
        [{"dropout_p": 1e-13, name: value} for name, value in ({**SCORES, "sinks": True}).items()],
        EVERY,
        "zigzag",
    ),
}


def cells() -> Iterator[tuple[str, str, str]]:
    """Yield the feature, the method or kernel, and what the page says of them."""
    text = (Path(__file__).parents[2] / "docs" / "attention.md").read_text()
    header = '| | ulysses | gather | ring | 2d | ulysses_gather | `"flash"` | `"blockwise"` |'
    _, *columns = [name.strip(' `"') for name in header.strip("| ").split("|")]
    columns = ["ulysses", *columns] if "ulysses" not in columns else columns
    for line in text.split(header)[1].split("\n\n")[0].splitlines()[2:]:
        feature, *found = [cell.strip() for cell in line.strip("|").split("|")]
        for column, cell in zip(columns, found, strict=True):
            yield feature, column, cell.strip("`")


def check_cell(rank: int, world: int, group: dist.ProcessGroup, feature: str, column: str, cell: str) -> None:
    options, allowed, kind = FEATURES[feature]
    of_methods = (*METHODS, *SHAPES)
    methods = [column] if column in of_methods else [m for m in METHODS if kind != "cross" or m != "ring"]
    layouts: dict[str, Any] = {
        "zigzag": lambda group: SequenceLayout.zigzag(TOTAL, group),
        "cross": lambda group: SequenceLayout.zigzag(TOTAL, group),
        "packed": lambda group: SequenceLayout.packed(LENGTHS, group),
    }
    tensors = inputs(TOTAL, HEADS, 2, torch.float64)
    keys: Any = "as queries"
    if kind == "cross":
        tensors[1:3] = [x[:, :KEYS] for x in tensors[1:3]]
        keys = lambda group: SequenceLayout.even(KEYS, group)  # noqa: E731
    for method in methods:
        for keywords in options:
            keywords = {**keywords, "method": method}
            sinks = torch.linspace(-1, 1, HEADS).double() if keywords.pop("sinks", False) else None
            if column not in of_methods:
                keywords["kernel"] = column
            case = Case(layouts[kind], tensors, allowed, torch.float32, 8, keys)
            case.keywords, case.sinks = keywords, sinks
            if cell == "yes":
                assert error_of_rank(case, group, whole(case)) < LIMITS[torch.float32], (method, keywords)
            else:
                with pytest.raises(getattr(builtins, cell)):
                    error_of_rank(case, group, whole(case))


@pytest.mark.parametrize(("feature", "column", "cell"), list(cells()))
def test_cell_of_the_table_is_right(ranks: Ranks, feature: str, column: str, cell: str) -> None:
    ranks(2, check_cell, feature, column, cell)


def test_table_has_every_feature() -> None:
    assert list(dict.fromkeys(feature for feature, _, _ in cells())) == list(FEATURES)
