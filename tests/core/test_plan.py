# SPDX-License-Identifier: Apache-2.0
"""Plans, and exchanges with all ranks in one process: every byte is written once, with the right value."""

from __future__ import annotations

import functools
import random
import re
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from helpers import core
from helpers.cases import (
    EXAMPLES,
    ITEMS,
    LAYOUTS,
    WORLDS,
    Case,
    Part,
    cases,
    every_check,
    every_op,
    items,
    seeded_case,
)
from helpers.core import Plan, Spec, contiguous, request
from helpers.tables import EXCHANGES
from hypothesis import given, settings

pytestmark = pytest.mark.long


def test_every_op_has_an_inverse() -> None:
    for name, exchange in EXCHANGES.items():
        assert EXCHANGES[exchange.inverse].inverse == name


def for_examples(op: str, check: Callable[[Case], object]) -> None:
    @settings(EXAMPLES, max_examples=50)
    @given(cases(op))
    def run(case: Case) -> None:
        check(case)

    run()


@functools.cache
def examples(op: str) -> list[Case]:
    """Return the examples of an op; drawing them takes longer than checking them."""
    found: list[Case] = []
    for_examples(op, found.append)
    return found


@every_check
@every_op
def test_random_shapes(op: str, check: Callable[[Case], None]) -> None:
    try:
        for case in examples(op):
            check(case)
    except Exception:
        for_examples(op, check)  # raises with the simplest case that fails
        raise


@every_check
@pytest.mark.parametrize("world", WORLDS)
@every_op
def test_world_sizes(op: str, world: int, check: Callable[[Case], None]) -> None:
    for seed in range(4 if world < 16 else 1):
        check(seeded_case(op, world, seed))


SPECIAL_SHAPES = {
    "more ranks than items": (3, 2, 5),
    "primes": (13, 7, 11),
    "even": (8, 16, 4),
    "an empty dim": (6, 0, 5),
    "all empty": (0, 0),
    "ones": (1, 1, 1, 1, 1, 1),
    "six dims": (2, 3, 2, 3, 2, 3),
}


@every_check
@pytest.mark.parametrize("shape", SPECIAL_SHAPES.values(), ids=SPECIAL_SHAPES.keys())
@every_op
def test_special_shapes(op: str, shape: tuple[int, ...], check: Callable[[Case], None]) -> None:
    draw = random.Random(f"{op} {shape}").randint
    for item, layout in zip(ITEMS, (*LAYOUTS, *LAYOUTS), strict=False):
        extents = list(shape)
        move = EXCHANGES[op].move(draw, extents, 7)
        check(Case(op, 7, [Part(item, tuple(extents), layout, move)]))


# ---- Merging ----------------------------------------------------------------------------------------------


def blocks_of(op: str, args: Sequence[int], *inputs: torch.Tensor) -> list[core.BlockRow]:
    """Return the blocks that rank 0 sends to the last rank."""
    plans = core.build_plans(op, [[x] for x in inputs], [args])
    return list(plans[0].blocks(len(inputs) - 1))


def alone(op: str) -> tuple[str, list[int], torch.Tensor, int]:
    """Return a call of one rank, for which every op is the identity."""
    shape = [4, 6, 5]
    move = EXCHANGES[op].move(lambda first, last: last, shape, 1)
    return op, move.args, items(*shape), 1


@pytest.mark.parametrize(
    ("op", "args", "x", "world"),
    [
        pytest.param("gather", [0], items(4, 6, 5), 3, id="gather dim 0"),
        pytest.param("gather", [0, 3, 1, 2], items(3, 6, 5), 3, id="gather dim 0 by sizes"),
        pytest.param("gather", [2], items(1, 1, 4, 5), 3, id="gather behind ones"),
        pytest.param("all_to_all", [0, 1, 12], items(3, 4, 5), 3, id="one row for each rank"),
        pytest.param("all_to_all", [1, 2, 12], items(1, 3, 4, 5), 3, id="one head for each rank"),
        pytest.param("all_to_all", [1, 0, 3], items(1, 4, 5), 3, id="one row from each rank"),
        *(pytest.param(*alone(op), id=f"{op} alone") for op in EXCHANGES),
    ],
)
def test_contiguous_copy_is_one_block(op: str, args: list[int], x: torch.Tensor, world: int) -> None:
    inputs = [x] * world
    if len(args) == 1 + world and op == "gather":
        inputs = [items(size, 6, 5) for size in args[1:]]
    (block,) = blocks_of(op, args, *inputs)
    assert block.loops == []


def test_split_along_dim_0_is_one_block() -> None:
    plans = core.build_plans("split", [[items(7, 6, 5)]] * 3, [[0]])
    for plan in plans:
        (block,) = plan.blocks(plan.rank)
        assert block.loops == []
        assert [count for peer, count in enumerate(plan.push_bytes) if peer != plan.rank] == [0, 0]


@pytest.mark.parametrize(
    ("batch", "scatter", "loops"),
    [
        pytest.param(1, 2, 1, id="heads, batch 1"),
        pytest.param(1, 1, 1, id="sequence, batch 1"),
        pytest.param(3, 2, 2, id="heads"),
        pytest.param(3, 1, 2, id="sequence"),
    ],
)
def test_ulysses_blocks_are_merged(batch: int, scatter: int, loops: int) -> None:
    """For [B, S, H, D], a head's D or a rank's heads are the run; batch and sequence are the loops."""
    world, heads, depth = 4, 8, 16
    sequence = 5 if scatter == 2 else 20
    x = items(batch, sequence, heads if scatter == 2 else heads // world, depth)
    gathered = 20 if scatter == 2 else heads
    (block,) = blocks_of("all_to_all", [scatter, 3 - scatter, gathered], *[x] * world)
    assert (len(block.loops), block.run) == (loops, heads // world * depth * 2)


def test_equal_sends_share_one_block_list() -> None:
    plan = core.build_plans("gather", [[items(4, 6)]] * 64, [[1]])[5]
    assert len({(plan.struct.push[peer].first, plan.struct.push[peer].count) for peer in range(64)}) == 1


def test_expanded_input_is_one_loop() -> None:
    x = items(1, 1, 1, item=4).expand(4, 5, 6, 4)
    (block,) = blocks_of("gather", [0], x, x)
    assert (block.loops, block.run) == ([(120, 0, 4)], 4)


# ---- The signature and the description --------------------------------------------------------------------


def test_signatures_are_equal_on_all_ranks() -> None:
    for op in EXCHANGES:
        for world in WORLDS:
            case = seeded_case(op, world, 1)
            plans = case.plans()
            assert len({plan.signature() for plan in plans}) == 1
            assert len({plan.signature("float16, recorded") for plan in plans}) == 1
            assert len({plan.describe() for plan in plans}) == 1


def test_signatures_ignore_strides_and_sides() -> None:
    x = items(4, 6)
    plans = [
        *core.build_plans("gather", [[x]] * 2, [[0]]),
        *core.build_plans("gather", [[x]] * 2, [[0]], core.SIDE_PULL),
        *core.build_plans("gather", [[items(4, 12)[:, ::2]]] * 2, [[0]]),
        *core.build_plans("gather", [[x]] * 2, [[0, 8]]),  # other arguments of the same call
        *core.build_plans("gather", [[x]] * 2, [[0, 4, 4]]),
    ]
    assert len({plan.signature() for plan in plans}) == 1


def test_signatures_differ() -> None:
    calls = {
        "first": ("gather", [Spec(2, [4, 4], [4, 1], [0])]),
        "dim": ("gather", [Spec(2, [4, 4], [4, 1], [1])]),
        "extent": ("gather", [contiguous([4, 5], [0], 2)]),
        "size": ("gather", [contiguous([5, 4], [0], 2)]),
        "ndim": ("gather", [contiguous([4, 4, 1], [0], 2)]),
        "item size": ("gather", [Spec(4, [4, 4], [4, 1], [0])]),
        "gathered sizes": ("gather", [contiguous([4, 4], [0, 4, 3, 5, 4], 2)]),
        "a square from rows": ("gather", [contiguous([4, 16], [0], 2)]),
        "a square from columns": ("gather", [contiguous([16, 4], [1], 2)]),
        "op": ("split", [contiguous([16, 4], [0], 2)]),
        "sizes": ("split", [contiguous([16, 4], [0, 4, 4, 5, 3], 2)]),
        "other sizes": ("split", [contiguous([16, 4], [0, 4, 4, 3, 5], 2)]),
        "tensors": ("gather", [contiguous([4, 4], [0], 2)] * 2),
        "other tensors": ("gather", [contiguous([4, 4], [0], 2), contiguous([4, 4], [1], 2)]),
        "their order": ("gather", [contiguous([4, 4], [1], 2), contiguous([4, 4], [0], 2)]),
        "all_to_all": ("all_to_all", [contiguous([4, 4], [0, 1, 16], 2)]),
        "its dims": ("all_to_all", [contiguous([4, 4], [1, 0, 16], 2)]),
    }
    signatures: dict[int, str] = {}
    for name, (op, specs) in calls.items():
        plan = Plan(request(op, 4, 0, specs))
        for text in ("", "a", "b", "ab", "ba"):
            twin = signatures.setdefault(plan.signature(text), f"{name} {text}")
            assert twin == f"{name} {text}", f"{name} {text!r} has the signature of {twin!r}"


def test_describe() -> None:
    plan = Plan(request("all_to_all", 2, 1, [contiguous([1, 4, 4], [2, 1, 8])]))
    text = "[1, 8, 4]: dim 1 in [4, 4] -> dim 2 in [2, 2]"
    assert plan.describe() == text
    for size in (1, 2, 10, len(text), len(text) + 1):
        assert plan.describe(size) == text[: size - 1]
    assert plan.describe(0) == "?"
    two = Plan(request("gather", 2, 0, [contiguous([3], [0, 3, 1]), contiguous([2, 2], [1])]))
    assert two.describe() == "[4]: dim 0 in [3, 1] -> whole; [2, 4]: dim 1 in [2, 2] -> whole"


def test_description_says_how_pieces_lie() -> None:
    def text(layout: list[int], extent: int, world: int = 2) -> str:
        plan = Plan(request("exchange", world, 0, [contiguous([extent], [len(layout), *layout, -1])]))
        return re.findall(r"\((.*)\)", plan.describe())[0]

    assert text([0, 2, 1, 8], 4) == "zigzag"
    assert text([0, 2, 2, 8], 2, 4) == "zigzag, each part in 2"
    assert text([0, 2, -2, 8], 2, 4) == "zigzag, each part in 2 neighbours"
    assert text([0, 2, -1, 8], 4) == "zigzag"
    assert text([0, 3, 1, 2, 3, 5], 5) == "packed [3, 5]"
    assert text([0, 3, -2, 2, 3, 5], 3, 4) == "packed [3, 5], each part in 2 neighbours"
    assert text([0, 3, 1, 2, 2, 1, 1, 4], 3) == "packed [2, 1, 1, 4]"
    assert text([0, 4, 1, 3, 5], 5) == "rotated by 1"
    many = [text([0, 3, 1, 30, *[2] * 29, last], 29 + last // 2) for last in (4, 6)]
    assert all(re.fullmatch(r"packed \[2, (2, )+..., digest [0-9a-f]{8}\]", each) for each in many), many
    assert many[0] != many[1] and len(many[0]) < 64


def test_long_description_is_truncated() -> None:
    plan = Plan(request("gather", 64, 0, [contiguous([3] * 30, [2])] * 4))
    assert len(plan.describe(1024)) == 1023


def test_full_description_stops_formatting() -> None:
    """Its time does not grow with the ranks whose sizes no longer fit."""

    def seconds(world: int) -> float:
        plan = Plan(request("gather", world, 0, [contiguous([3], [0])]))
        took = []
        for _ in range(9):
            begin = time.perf_counter()
            text = plan.describe(1000)
            took.append(time.perf_counter() - begin)
            assert text == (f"[{3 * world}]: dim 0 in [" + "3, " * 400)[:999]
        return min(took)

    assert seconds(400_000) < 10 * seconds(1000)
