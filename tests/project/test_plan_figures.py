# SPDX-License-Identifier: Apache-2.0
"""What `spar plan` computes: its bytes are those that ranks count, its work is that of a mask."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.processes import finish, start
from helpers.traffic import sent
from helpers.whole_attention import inputs
from test_plan_command import BASE, BATCH, WIDTH, no_speeds as no_speeds

import spar
from spar import SequenceLayout
from spar._attention import attention as attention_module
from spar._attention.blocks import blocks_of
from spar._attention.grid_methods import SHAPES
from spar._attention.travel import shifts_by_runs
from spar._commands.plan import ways as ways_module
from spar._commands.plan.exchanges import Traffic, exchanged
from spar._commands.plan.layer import HYBRID, OF_DOCUMENTS, Layer, drawn_documents, placed
from spar._commands.plan.ways import evaluate, planned_ranks, ways_of, work_of
from spar._exchange.layouts import shards
from spar.parallel_state import init_parallel_state
from spar.sequence_layout import numbers_of

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
LENGTHS = (1, 30, 5, 1, 28)


def layers(ranks: int) -> Iterator[Layer]:
    base = replace(BASE, ranks=ranks, ring=2 if ranks == 4 else 1, ulysses=2 if ranks == 4 else 1)
    yield base
    yield replace(base, causal=False, heads=6, key_heads=3)
    yield replace(base, heads=3, key_heads=1, dtype=torch.bfloat16)  # fewer than 4 ranks
    yield replace(base, window=7)
    yield replace(base, window=9, causal=False)
    yield replace(base, documents=LENGTHS)
    yield replace(base, documents=LENGTHS, window=4)
    yield replace(base, tokens=3)  # a rank without tokens


def real_traffic(layer: Layer, method: str | None, layout: SequenceLayout) -> tuple[int, int]:
    """Return the bytes that this rank sends in forward and in backward of a real attention."""
    whole = inputs(layer.tokens, layer.heads, layer.key_heads, layer.dtype, WIDTH)
    q, k, v, upper = [x[:, layout.index()].requires_grad_() for x in whole]
    ids = torch.arange(len(layer.documents)).repeat_interleave(torch.tensor(layer.documents).long())
    masked = layer.documents and layout.kind not in OF_DOCUMENTS
    window = None if layer.window is None else (layer.window - 1, 0 if layer.causal else layer.window - 1)
    before = sent()
    y = spar.attention(
        q,
        k,
        v,
        layout,
        causal=layer.causal,
        mask=spar.Spans.documents(ids) if masked else None,
        window=window,
        method=method,
    )
    forward = sent() - before
    torch.autograd.grad(y, (q, k, v), upper)
    return forward, sent() - before - forward


def made(layer: Layer, kind: str, group: Group) -> SequenceLayout:
    of_what: Any = layer.documents if kind in OF_DOCUMENTS else layer.tokens
    layout: SequenceLayout = getattr(SequenceLayout, kind)(of_what, group)
    return layout


def check_bytes(rank: int, world: int, group: Group) -> None:
    """On 2 ranks every second way of each layer, on 4 the others, each compared on two of them."""
    for i, layer in enumerate(layers(world)):
        for j, (method, kind) in enumerate(ways_of(layer)):
            if kind == HYBRID or (i + j + world // 2) % 2:
                continue
            if method in SHAPES and kind not in ("zigzag", "balanced"):
                continue
            layout = made(layer, kind, group)
            found = real_traffic(layer, method, layout)
            if world == 4 and (rank + (i + j) // 2) % 2:
                continue  # planning takes longer than the attention
            plan = exchanged(layer, method, kind, rank)
            assert found == (plan.forward, plan.backward), (layer, method, kind, plan, found)


def test_planned_bytes_are_those_which_ranks_count(ranks: Ranks) -> None:
    ranks(4, check_bytes)


def check_hybrid(rank: int, folder: Path) -> None:
    state = init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2)
    cp = state.get_group("cp")
    assert cp is not None
    for layer in layers(4):
        layout = SequenceLayout.hybrid(layer.tokens, state)
        plan = exchanged(layer, HYBRID, HYBRID, cp.rank())
        found = real_traffic(layer, None, layout)
        assert found == (plan.forward, plan.backward), (layer, plan, found)
        assert placed(layer, HYBRID, cp.rank()).layout.sizes == layout.sizes


def test_planned_bytes_of_hybrid_layouts(tmp_path: Path) -> None:
    assert finish(start(check_hybrid, 4, tmp_path), 100) == [0] * 4


def check_choice(rank: int, world: int, group: Group) -> None:
    """Note which method spar.attention decides on where the caller names none.

    `check_bytes` compares the traffic of all ways: planning it here, too, would take most of the time.
    """
    used: list[str] = []

    def noting(name: str, method: Any) -> Any:
        def decide(problem: Any) -> Any:
            used.append(name)
            return method.decide(problem)

        return method._replace(decide=decide)

    methods = attention_module._METHODS
    originals = dict(methods)
    methods.update({name: noting(name, method) for name, method in originals.items()})
    try:
        for layer in layers(world):
            for kind in layer.kinds:
                real_traffic(layer, None, made(layer, kind, group))
                real = used.pop()
                with mock.patch.object(ways_module, "exchanged", return_value=Traffic(0, 0, 0)):
                    ways = [evaluate(layer, method, kind) for method in originals]
                assert [way.method for way in ways if way.default] == [real], (layer, kind)
                used.clear()
    finally:
        methods.update(originals)


@pytest.mark.parametrize("world", [2, 4])
def test_default_is_what_attention_chooses(ranks: Ranks, world: int) -> None:
    ranks(world, check_choice)


# ---- what a rank holds and computes ----


@pytest.mark.parametrize("world", [2, 3, 4])
def test_held_bytes(world: int) -> None:
    layer = replace(BASE, ranks=world, causal=False)
    token = 2 * BATCH * 2 * WIDTH * 4  # bytes of K and V
    for kind, rank in itertools.product(layer.kinds, range(world)):
        sizes = placed(layer, kind, rank).layout.sizes
        assert exchanged(layer, "gather", kind, rank).held == 65 * token
        # Of 4 query heads and 2 key heads a rank of 2 or more needs one key head; of 3 rank 0 needs one, too.
        assert exchanged(layer, "ulysses", kind, rank).held == 65 * token // 2
        others = [sizes[(rank - step) % world] for step in range(1, world)]
        two = max([sum(others[i : i + 2]) for i in range(max(len(others) - 1, 1))])
        assert exchanged(layer, "ring", kind, rank).held == two * token


def allowed(layer: Layer) -> torch.Tensor:
    """Return which keys each query attends to: booleans [S, S]."""
    place = torch.arange(layer.tokens)
    behind = place[:, None] - place
    result = behind >= 0 if layer.causal else torch.ones_like(behind, dtype=torch.bool)
    if layer.window is not None:
        result = result & (behind.abs() < layer.window)
    if layer.documents:
        ids = torch.arange(len(layer.documents)).repeat_interleave(torch.tensor(layer.documents))
        result = result & (ids[:, None] == ids)
    return result


@pytest.mark.parametrize("world", [2, 3, 4])
def test_work_is_that_of_a_mask(world: int) -> None:
    for layer in layers(world):
        pairs = allowed(layer).sum(1)
        for kind in layer.kinds:
            at = [placed(layer, kind, rank) for rank in range(world)]
            expected = [layer.heads * int(pairs[one.layout.index()].sum()) for one in at]
            assert work_of(layer, "gather", at[0].layout) == expected
            assert work_of(layer, "ring", at[0].layout) == expected
            by_heads = [n * int(pairs.sum()) for n in spar.cal_split_sizes(layer.heads, world)]
            assert work_of(layer, "ulysses", at[0].layout) == by_heads
            for method in SHAPES:
                assert sum(work_of(layer, method, at[0].layout)) == layer.heads * int(pairs.sum())
        if layer.ring > 1:
            at_hybrid = placed(layer, HYBRID, 0)
            work = work_of(layer, HYBRID, at_hybrid.layout)
            assert len(work) == world and sum(work) == layer.heads * int(pairs.sum())


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_work_is_that_of_the_blocks_of_a_ring(world: int, causal: bool) -> None:
    for kind in ("even", "zigzag", "packed", "balanced"):
        layer = replace(BASE, ranks=world, documents=LENGTHS, causal=causal)
        layout = placed(layer, kind, 0).layout
        if not layout.is_packed:
            layer = replace(layer, documents=())
        numbers = numbers_of(layout, 0)
        found = []
        for rank in range(world):
            held = shifts_by_runs(numbers, world, rank, causal, layout.is_packed).held
            steps = [blocks_of(held[0], keys, causal, layout.is_packed, True) for keys in held]
            blocks = [block for step in steps for block in step]
            found.append(sum(b.keys * (b.keys + 1) // 2 if b.causal else b.queries * b.keys for b in blocks))
        assert work_of(layer, "ring", layout) == [layer.heads * pairs for pairs in found]
        assert len(shards(numbers, world)) == world


@pytest.mark.parametrize("method", SHAPES)
def test_work_of_rows_and_columns_is_even(method: str) -> None:
    documents = drawn_documents(6400, 900)
    # Pairs of documents that lie on few ranks are met by few.
    balanced = 1.25 if method == "2d" else 1.06
    for kind, most in (("even", 1.07), ("zigzag", 1.01), ("balanced", balanced)):
        layer = replace(BASE, heads=8, tokens=6400, ranks=16, documents=documents * (kind in OF_DOCUMENTS))
        work = work_of(layer, method, placed(layer, kind, 0).layout)
        assert max(work) * 16 <= most * sum(work), (kind, max(work) * 16 / sum(work))


@pytest.mark.parametrize("kind", ["even", "zigzag"])
def test_figures_of_a_way(kind: str) -> None:
    """Bytes are of one rank, which sends the most in a step; other columns of the rank with the most."""
    layer = replace(BASE, ranks=4, tokens=66)
    of_ranks = [exchanged(layer, "ring", kind, rank) for rank in range(4)]
    way = evaluate(layer, "ring", kind)
    assert (way.forward, way.backward) == (of_ranks[way.rank].forward, of_ranks[way.rank].backward)
    assert way.step == 3 * (way.forward + way.backward)
    assert way.step == 3 * max(one.forward + one.backward for one in of_ranks)
    assert way.held == max(one.held for one in of_ranks) == of_ranks[way.held_rank].held
    assert (way.tokens, way.tokens_rank, way.activations) == (17, 0, 3 * BATCH * 17 * 32 * 4)
    assert (way.work_rank, way.work > 1.5) == ((3, True) if kind == "even" else (way.work_rank, False))
    assert evaluate(replace(layer, batch=6), "ring", kind).step == 3 * way.step


def test_plans_of_many_ranks_are_those_of_some() -> None:
    assert planned_ranks(16) == list(range(16))
    for world in (17, 64, 1000):
        few = planned_ranks(world)
        assert few[0] == 0 and few[-1] == world - 1 and len(set(few)) == 8
