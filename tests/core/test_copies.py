# SPDX-License-Identifier: Apache-2.0
"""Copies in another order than that of the output have the bytes of copies one run after another.

Large parts of several ranks that are neighbours in the input are copied in turn. Inputs whose dims lie in
another order are copied in squares.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import core
from helpers.cases import Case, Part
from helpers.core import Rows, Scale, ScaleType
from helpers.reference import in_runs, zigzag
from helpers.tables import Cut, Move, by_rule

from spar._exchange.layouts import (
    WHOLE,
    by_receiver,
    by_sizes,
    even,
    pair,
    rotated,
    zigzag as zigzag_layout,
)

pytestmark = pytest.mark.usefixtures("stores")

LARGE = 1 << 17  # bytes for each rank from which on ranks have turns (csrc/devices/cpu/execute.c)


@pytest.fixture
def team() -> Iterator[None]:
    yield
    core.library().spar_threads_limit(1)
    core.library().spar_threads_min_bytes(1 << 20)


def scattered(shape: tuple[int, ...], world: int, dims: tuple[int, int]) -> Move:
    """An all_to_all by the size rule."""
    scatter, gather = dims
    return Move(
        [scatter, gather, shape[gather]],
        [gather, scatter, shape[scatter]],
        Cut(gather, in_runs(by_rule(shape[gather], world))),
        Cut(scatter, in_runs(by_rule(shape[scatter], world))),
    )


def tokens(row: int, world: int) -> int:
    """Return how many rows of that many bytes make a rank's part for each rank large."""
    return -(-LARGE * world // row) * world + world - 1


def check(case: Case) -> None:
    inputs = case.inputs()
    plans = case.plans(inputs=inputs)
    assert any(sum(plan.push_bytes) >= LARGE * case.world for plan in plans)
    results = core.world(case.world).exchange(plans, inputs)
    for rank, (got, wanted) in enumerate(zip(results, case.expected(), strict=True)):
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a, b), rank


@pytest.mark.parametrize("world", [2, 3, 9])
@pytest.mark.parametrize("width", [1, 16, 50, 64, 128, 300, 2048])
def test_runs_of_any_length(world: int, width: int) -> None:
    """Heads of `width` bytes: a head for each rank; then another one for some ranks."""
    for heads in (world, world + 1):
        shape = (tokens(heads * width, world), heads, width)
        check(Case("all_to_all", world, [Part(1, shape, "view", scattered(shape, world, (1, 0)))]))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "stepped", "expanded"])
@pytest.mark.parametrize("item", [1, 2, 4, 12])
def test_any_layout_of_the_input(layout: str, item: int) -> None:
    shape = (2, tokens(7 * 40 * item, 3), 7, 40)
    for dims in ((2, 1), (3, 1), (3, 0), (1, 2)):
        check(Case("all_to_all", 3, [Part(item, shape, layout, scattered(shape, 3, dims))]))


def test_several_tensors_of_different_heads() -> None:
    shapes = [(tokens(heads * 64, 4), heads, 64) for heads in (8, 4, 5)]
    check(Case("all_to_all", 4, [Part(1, shape, "view", scattered(shape, 4, (1, 0))) for shape in shapes]))


@pytest.mark.parametrize("sizes", [(3, 5, 0), (1, 2, 5), (0, 0, 8)])
def test_sizes_of_each_rank(sizes: tuple[int, ...]) -> None:
    shape = (tokens(8 * 64, 3), 8, 64)
    before, after = even(0, shape[0]), by_sizes(1, sizes)
    move = Move(
        list(pair(before, after)),
        list(pair(after, before)),
        Cut(0, in_runs(by_rule(shape[0], 3))),
        Cut(1, in_runs(sizes)),
    )
    check(Case("exchange", 3, [Part(1, shape, "view", move)]))


def test_zigzag_order() -> None:
    shape = (tokens(8 * 96, 4), 8, 96)
    before, after = zigzag_layout(0, shape[0], 1), even(1, 8)
    move = Move(
        list(pair(before, after)),
        list(pair(after, before)),
        Cut(0, zigzag(shape[0], 4, 1)),
        Cut(1, in_runs(by_rule(8, 4))),
    )
    check(Case("exchange", 4, [Part(1, shape, "view", move)]))


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("width", [1, 8, 16, 48, 100])
def test_scaled(width: int, divide: bool) -> None:
    """Scaled parts equal the scaled whole."""
    rows = tokens(3 * width * 4, 3)
    inputs = [[torch.randn(rows + rank, 3, width).unsqueeze(-1).view(torch.uint8)] for rank in range(3)]
    sizes = [rows, rows + 1, rows + 2]
    numbers = list(pair(by_sizes(0, sizes), even(1, 3)))
    plans = core.build_plans("exchange", inputs, [numbers])
    plain = core.world(3).exchange(plans, inputs)
    scaled = core.world(3).exchange(plans, inputs, scale=Scale(ScaleType.F32, divide, 3.0))
    for (x,), (y,) in zip(plain, scaled, strict=True):
        x = x.view(torch.float32)
        assert torch.equal(y.view(torch.float32), x / 3 if divide else x * 3)


def test_threads_share_the_turns(team: None) -> None:
    shape = (tokens(5 * 70, 3), 5, 70)
    case = Case("all_to_all", 3, [Part(1, shape, "view", scattered(shape, 3, (1, 0)))] * 2)
    for threads, worth in ((2, 1 << 16), (3, 5000), (7, 1)):
        core.library().spar_threads_limit(threads)
        core.library().spar_threads_min_bytes(worth)
        check(case)


@pytest.mark.parametrize("width", [33, 64, 301])
@pytest.mark.parametrize("item", [1, 2, 4, 8, 12, 16])
def test_rows_of_one_item(item: int, width: int) -> None:
    """Expanded items of several bytes, which are written by lines, wherever these begin."""
    rows = tokens(3 * width * item, 3)
    inputs = [[torch.randint(256, (rows, 3, 1, item), dtype=torch.uint8)] for _ in range(3)]
    inputs = [[x.expand(-1, -1, width, -1) for x in own] for own in inputs]
    numbers = list(pair(even(0, 3 * rows), even(1, 3)))
    plans = core.build_plans("exchange", inputs, [numbers])
    results = core.world(3).exchange(plans, inputs)
    for rank, (y,) in enumerate(results):
        assert torch.equal(y, torch.cat([x[:, rank : rank + 1] for (x,) in inputs]))


def permuted(item: int, shape: tuple[int, ...], order: tuple[int, ...], dims: tuple[int, int]) -> None:
    """Exchange inputs of 2 ranks whose dims lie in memory in this order: pushed, and packed."""
    scatter, gather = dims
    inputs = []
    for rank in range(2):
        own = list(shape)
        own[gather] += rank
        memory = torch.randint(256, (*[own[dim] for dim in order], item), dtype=torch.uint8)
        inputs.append([memory.permute(*[order.index(dim) for dim in range(len(shape))], len(shape))])
    numbers = list(pair(by_sizes(gather, [shape[gather], shape[gather] + 1]), even(scatter, shape[scatter])))
    plans = core.build_plans("exchange", inputs, [numbers], core.SIDE_PULL)
    whole = torch.cat([x for (x,) in inputs], gather)
    pushed, packed = core.world(2).exchange(plans, inputs), core.exchange_packed(plans, inputs)
    for expected, (a,), (b,) in zip(whole.tensor_split(2, scatter), pushed, packed, strict=True):
        assert torch.equal(a, expected)
        assert torch.equal(b, expected)


@pytest.mark.parametrize("item", [1, 2, 3, 4, 8, 12, 16, 32])
@pytest.mark.parametrize("threads", [1, 3])
def test_permuted_dims(item: int, threads: int, team: None) -> None:
    """Channels are last in the input and first in the output: few of them, many, and an odd number."""
    core.library().spar_threads_limit(threads)
    core.library().spar_threads_min_bytes(1000)
    for channels in (3, 32, 81):
        for tokens in (5, 130):
            permuted(item, (2, channels, tokens, 7), (0, 2, 3, 1), (1, 2))  # [B, n, N, C] of [B, C, n, N]
    permuted(item, (40, 9, 37), (2, 1, 0), (1, 2))
    permuted(item, (40, 9, 37), (1, 2, 0), (2, 1))
    permuted(item, (6, 50, 3), (2, 0, 1), (1, 0))


@pytest.mark.parametrize("item", [1, 2, 4, 8, 16])
def test_permuted_dims_in_lines(item: int) -> None:
    """Rows of the output that begin at cache lines, and rows that do not."""
    for size in (64, 67):
        permuted(item, (32, 9, size), (1, 2, 0), (0, 1))


@pytest.mark.parametrize("scaled", [False, True])
def test_gather_of_permuted_dims(scaled: bool) -> None:
    """All ranks receive the same strips."""
    x = torch.randn(3, 700, 50)  # of each rank, in memory
    inputs = [[own.t().unsqueeze(-1).view(torch.uint8)] for own in x]
    plans = core.build_plans("exchange", inputs, [list(pair(even(0, 150), WHOLE))])
    scale = Scale(ScaleType.F32, True, 3.0) if scaled else None
    for (y,) in core.world(3).exchange(plans, inputs, scale=scale):
        expected = x.transpose(1, 2).reshape(150, 700)
        assert torch.equal(y.view(torch.float32).squeeze(-1), expected / 3 if scaled else expected)


@pytest.mark.parametrize("width", [1, 48, 64, 1000])
def test_listed_rows(width: int, team: None) -> None:
    """Rows that an index lists, of inputs with gaps between rows, are those that were selected before."""
    inputs = [[torch.randint(256, (50, width + 3, 1), dtype=torch.uint8)[:, :width]] for _ in range(3)]
    sizes = [5, 90, 3, 400, 0, 260, 7, 0, 1]
    counts = [sum(sizes[owner::3]) for owner in range(3)]
    indexes = [torch.randint(50, (count,)) for count in counts]
    rows = [Rows(index.data_ptr(), width, width + 3) for index in indexes]
    packed = [[x[index]] for (x,), index in zip(inputs, indexes, strict=True)]
    plans = core.build_plans("exchange", packed, [list(by_receiver(0, 3, sizes))])
    expected = core.world(3).exchange(plans, packed)
    for threads in (1, 3):
        core.library().spar_threads_limit(threads)
        core.library().spar_threads_min_bytes(1000)
        for (y,), (z,) in zip(core.world(3).exchange(plans, inputs, rows=rows), expected, strict=True):
            assert torch.equal(y, z)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("world", [3, 9])
def test_inputs_that_all_receive_at_other_places(world: int, scaled: bool) -> None:
    """Each rank has its own rows first, and behind them those of the next ranks, counted round."""
    sizes = [500 + 3 * rank for rank in range(world)]
    whole = [torch.randn(size, 7) for size in sizes]
    inputs = [[x.unsqueeze(-1).view(torch.uint8)] * world for x in whole]
    turns = [pair(by_sizes(0, sizes), rotated(0, sizes, (world - k) % world)) for k in range(world)]
    plans = core.build_plans("exchange", inputs, [list(turn) for turn in turns])
    scale = Scale(ScaleType.F32, True, 3.0) if scaled else None
    for rank, found in enumerate(core.world(world).exchange(plans, inputs, scale=scale)):
        for k, y in enumerate(found):
            x = whole[(rank + k) % world]
            assert torch.equal(y.view(torch.float32).squeeze(-1), x / 3 if scaled else x)
