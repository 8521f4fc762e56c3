# SPDX-License-Identifier: Apache-2.0
"""spar.attention against one process: every method, layout, mask and number of heads."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS, Ranks
from helpers.orders import ORDERS
from helpers.processes import finish, start
from helpers.tables import MAKERS
from helpers.whole_attention import METHODS, error_of, expected_of, inputs, whole_attention
from torch import Tensor, nn

import spar
from spar import SequenceLayout
from spar._attention import blocks as block_finder, ring
from spar._attention.kernels import KERNELS
from spar._attention.kernels.blockwise import Blockwise
from spar._attention.kernels.kernel import BlockInputs
from spar._attention.travel import shifts_by_runs
from spar._exchange.layouts import Layout, even, extent, packed, shards, zigzag
from spar._group.registry import group_of
from spar.ops.heads import groups_of_heads, heads_of_ranks

pytestmark = [pytest.mark.one_transport, pytest.mark.long]

Group = dist.ProcessGroup
TOTAL = 19
(DOCUMENTS,) = MAKERS["packed"].of(TOTAL, 1)
LAYOUTS: dict[str, Callable[[Group], SequenceLayout]] = {
    **{name: partial(maker.of_total, TOTAL) for name, maker in MAKERS.items()},
    "few tokens": lambda group: SequenceLayout.even(2, group),
    "holes": lambda group: SequenceLayout("local", (*(0, 5, 0, 2)[: group.size() - 1], 6), group),
}


@pytest.fixture(scope="module")
def all_worlds() -> Iterator[Ranks]:
    pool = Ranks(tuple(range(1, 8)))
    yield pool
    pool.stop()


def masks(tokens: int, heads: int, dtype: torch.dtype) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(tokens)
    random = torch.rand(2, heads, tokens, tokens, generator=generator)
    found = {"none": None, "bool": random[:1] > 0.4, "added": (4 * random[:, :1]).to(dtype)}
    if tokens != 2:  # the batch's size: it could be either
        found["keys"] = random[:, 0, 0] > 0.4
    return found


def check_method(
    rank: int, world: int, group: Group, method: str | None, dtype: torch.dtype, limit: float
) -> None:
    for kind, causal in itertools.product(LAYOUTS, (False, True)):
        layout = LAYOUTS[kind](group)
        documents = DOCUMENTS if kind in ("packed", "balanced") else None
        for heads, key_heads in ((4, 2), (3, 1)):
            whole = inputs(layout.total, heads, key_heads, dtype)
            for name, mask in masks(layout.total, heads, dtype).items():
                if name != "none" and kind not in ("zigzag", "packed", "balanced"):
                    continue
                expected = expected_of(whole, causal=causal, mask=mask, documents=documents)
                error = error_of(
                    partial(spar.attention, layout=layout, causal=causal, mask=mask, method=method),
                    whole,
                    expected,
                    layout.index(),
                )
                assert error < limit, (kind, causal, heads, name, error)


def causal_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend by `causal`, aligned at the last query, as flash_attn does."""
    skipped = k.size(1) - q.size(1)
    mask = torch.ones(q.size(1), k.size(1)).tril(skipped) > 0
    return whole_attention(q, k, v, mask=mask[None, None])


def check_runs(rank: int, world: int, group: Group) -> None:
    """Gather attends run by run with an own kernel or dropout; a joint layout is one sequence."""
    for kind, make in LAYOUTS.items():
        layout = make(group)
        whole = inputs(layout.total, 4, 4, torch.float64)
        documents = DOCUMENTS if kind in ("packed", "balanced") else None
        attend = partial(spar.attention, layout=layout, method="gather")
        expected = expected_of(whole, causal=True, documents=documents)
        own = layout.index()
        assert error_of(partial(attend, causal=True, kernel=causal_kernel), whole, expected, own) < 1e-12, (
            kind
        )
        *parts, _ = [x[:, own] for x in whole]
        mask = (torch.ones(layout.total, layout.total).tril() > 0)[None]
        for options in ({"causal": True}, {"mask": mask}):
            y = attend(*parts, **options, dropout_p=1e-9)  # drops nothing
            assert (y - expected[0][:, own]).abs().max() < 1e-6 if y.numel() else True, kind


def test_gather_attends_to_runs_of_any_layout(ranks: Ranks) -> None:
    ranks(3, check_runs)


@pytest.mark.parametrize(
    ("method", "world"),
    [(method, n) for method in (*METHODS, None) for n in (1, 2, 3, 4) if n != 3 or not method],
)  # of 3 ranks, each method in float64
def test_method_matches_one_process(ranks: Ranks, world: int, method: str | None) -> None:
    ranks(world, check_method, method, torch.float32, 2e-5)


@pytest.mark.parametrize("method", METHODS)
def test_method_is_exact_in_float64(ranks: Ranks, method: str) -> None:
    ranks(3, check_method, method, torch.float64, 1e-13)


def check_16_bits(rank: int, world: int, group: Group) -> None:
    """Its error is that of one process."""
    layout = SequenceLayout.zigzag(64, group)
    whole = inputs(64, 4, 2, torch.float64, 32)
    expected = expected_of(whole, causal=True)
    short = [x.bfloat16() for x in whole]

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).contiguous()

    alone = error_of(sdpa, short, expected, torch.arange(64))
    for method in METHODS:
        error = error_of(
            partial(spar.attention, layout=layout, causal=True, method=method),
            short,
            expected,
            layout.index(),
        )
        assert error < 1.5 * alone, (method, error, alone)


def test_16_bits_are_as_exact_as_in_one_process(ranks: Ranks) -> None:
    ranks(4, check_16_bits)


def check_one_query(rank: int, world: int, group: Group) -> None:
    """A mask [1, T] of one query and batch 1 may be a key mask or the whole one, which are equal."""
    queries, keys = SequenceLayout.even(1, group), SequenceLayout.even(7, group)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, n, 6, 8, generator=generator) for n in (1, 7, 7))
    mask = torch.tensor([[True, True, False, True, False, True, True]])
    expected = nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask
    )
    shards = queries.shard(q, 1), keys.shard(k, 1), keys.shard(v, 1)
    for method in ("gather", "ulysses"):
        y = spar.attention(*shards, (queries, keys), mask=mask, method=method)
        torch.testing.assert_close(y, queries.shard(expected.transpose(1, 2), 1))


def test_mask_of_one_query(ranks: Ranks) -> None:
    ranks(3, check_one_query)


def check_heads(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.zigzag(9, group)
    for heads in range(1, 13):
        for key_heads in [n for n in range(1, heads + 1) if heads % n == 0]:
            whole = inputs(9, heads, key_heads, torch.float32, 4)
            error = error_of(
                partial(spar.attention, layout=layout, causal=True, method="ulysses"),
                whole,
                expected_of(whole, causal=True),
                layout.index(),
            )
            assert error < 2e-5, (heads, key_heads, error)


@pytest.mark.parametrize("world", range(1, 8))
def test_any_number_of_heads(all_worlds: Ranks, world: int) -> None:
    all_worlds.transport = TRANSPORTS[0]
    all_worlds(world, check_heads)


def test_a_rank_receives_the_key_heads_that_its_queries_need() -> None:
    for heads, world in itertools.product(range(1, 13), range(1, 8)):
        for key_heads in [n for n in range(1, heads + 1) if heads % n == 0]:
            plan, at = heads_of_ranks(heads, key_heads, world), 0
            for own, first, count in zip(*plan, strict=True):
                needed = sorted({head * key_heads // heads for head in range(at, at + own)})
                assert list(range(first, first + count)) == (needed or []), (heads, key_heads, world)
                at += own
            assert at == heads


@pytest.mark.parametrize("most", [1, 2, 7])
def test_groups_hold_the_key_heads_of_each_rank(most: int) -> None:
    """Each rank's heads are in one group, which is a view of the key heads as far as `most` allows."""
    for heads, world in itertools.product(range(1, 13), range(1, 8)):
        for key_heads in [n for n in range(1, heads + 1) if heads % n == 0]:
            plan, x = heads_of_ranks(heads, key_heads, world), torch.arange(key_heads)
            groups = groups_of_heads(plan, most)
            assert len(groups) <= most
            if most == 7:
                begins = [group.select(x, 0).data_ptr() - x.data_ptr() for group in groups]
                assert begins == [8 * group.heads[0] for group in groups]
            for rank, (first, count) in enumerate(zip(plan.first, plan.keys, strict=True)):
                found = [group.select(x, 0).split(group.sizes)[rank].tolist() for group in groups]
                held = list(itertools.chain(*found))
                assert held == list(range(first, first + count)), (heads, key_heads, world)
                assert sum(map(bool, found)) == (count > 0), "one group has all of them"


def check_two_levels(rank: int, folder: Path, order: str) -> None:
    state = ORDERS[order][0]()
    totals = (23, 16, 3) if order == "init_parallel_state" else (23,)
    for total, (heads, key_heads), causal in itertools.product(
        totals, ((4, 2), (3, 3), (1, 1)), (False, True)
    ):
        layout = SequenceLayout.hybrid(total, state)
        whole = inputs(total, heads, key_heads, torch.float32)
        for name, mask in masks(total, heads, torch.float32).items():
            expected = expected_of(whole, causal=causal, mask=mask)
            for method in (None, *METHODS):
                error = error_of(
                    partial(spar.attention, layout=layout, causal=causal, mask=mask, method=method),
                    whole,
                    expected,
                    layout.index(),
                )
                assert error < 2e-5, (total, heads, causal, name, method, error)
    dist.barrier()


@pytest.mark.parametrize("order", ["init_parallel_state", "mesh of ring x ulysses"])
def test_ring_across_ulysses_groups(tmp_path: Path, order: str) -> None:
    assert finish(start(check_two_levels, 4, tmp_path, order), 150) == [0] * 4


# ---- work and memory ----


class Counting(Blockwise):
    """A kernel that counts the multiply-adds of its scores."""

    def __init__(self) -> None:
        self.count = 0

    def forward(self, block: BlockInputs) -> tuple[Tensor, Tensor]:
        self.count += block.q.numel() * block.k.size(2)
        return super().forward(block)


def check_balance(rank: int, world: int, group: Group, method: str) -> list[int]:
    counts = []
    for make in (SequenceLayout.zigzag, SequenceLayout.even):
        counting = Counting()
        layout = make(16 * world, group)
        whole = inputs(layout.total, 2, 1, torch.float32)
        with mock.patch.dict(KERNELS, cpu={"counting": counting}):
            spar.attention(*[x[:, layout.index()] for x in whole[:3]], layout, causal=True, method=method)
        counts.append(counting.count)
    return counts


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_zigzag_balances_the_work(ranks: Ranks, method: str) -> None:
    """Blocks that the causal mask empties are not computed: zigzag's are the same on every rank."""
    zigzag, even = zip(*ranks(4, check_balance, method), strict=True)
    assert len(set(zigzag)) == 1
    assert even == tuple(sorted(even)) and even[3] == 4 * even[0]
    full = 2 * 2 * 64 * 64 * 8  # batch, heads, queries, keys, width
    assert sum(zigzag) < 0.63 * full


@pytest.mark.parametrize(
    ("layout", "causal", "documents", "keys"),
    [
        (zigzag(1, 64), True, False, [8, 8, 8, 8, 8, 16, 8, 16, 16, 16, 16, 16]),
        (even(1, 64), True, False, [16, 16, 16, 16, 16, 1, 16, 1, 1, 1, 1, 1]),
        (even(1, 64), False, False, [16] * 12),
        (packed(1, 1, [64]), True, True, [16] * 12),
    ],
)
def test_ring_sends_the_keys_that_are_attended_to(
    layout: Layout, causal: bool, documents: bool, keys: list[int]
) -> None:
    """Of each rank to the next, ...: half a zigzag shard to later ranks, all of it to earlier ones."""
    rings = [shifts_by_runs(layout, 4, rank, causal, documents) for rank in range(4)]
    assert [shift.parts for ring in rings for shift in ring.shifts] == [((0, size),) for size in keys]
    for rank, (held, shifts) in enumerate(rings):
        for step, (runs, shift) in enumerate(zip(held[1:], shifts, strict=True), 1):
            received = extent(shift.shard[1 + shift.shard[0] :], 4, rank)
            assert received == sum(run.size for run in runs)
            blocks = block_finder.blocks_of(held[0], runs, causal, documents, True)
            assert documents or received == max([block.key + block.keys for block in blocks], default=1)
            assert ((0, received),) == rings[rank - step].shifts[step - 1].parts
            assert ((0, extent(shift.gradient[1 + shift.gradient[0] :], 4, rank)),) == shift.parts


def test_runs_of_a_document_are_paired_with_its_own_keys_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else plans of many documents take seconds, which grow with their square."""
    pair, calls = block_finder._pair, [0]

    def counted(*arguments: Any) -> list[block_finder.Block]:
        calls[0] += 1
        return pair(*arguments)

    monkeypatch.setattr(block_finder, "_pair", counted)
    runs = [run for run in shards(packed(0, 500, [3] * 500), 3)[1] if run.size]
    assert len(block_finder.blocks_of(runs, [*runs], True, True, True)) == calls[0] == len(runs) == 500
    assert len(block_finder.blocks_of(runs, runs, True, True, True)) == 500 == calls[0], "none is paired"


def check_memory(rank: int, world: int, group: Group) -> None:
    """At most two shards of K and V are alive at a time, in forward and backward, also with one in flight."""
    received: list[Any] = []
    most, sending, in_flight = [0], ring.Sending, []

    class Counted(sending):  # type: ignore[misc,valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            gc.collect()
            received.extend(weakref.ref(x) for x in self.received if x.numel())
            most[0] = max(most[0], sum(each() is not None for each in received))
            in_flight.append(self.work is not None and self.work._job is not None)

    layout = SequenceLayout.even(8 * world, group)
    q, k, v, upper = [x[:, layout.index()] for x in inputs(layout.total, 2, 2, torch.float32)]
    q.requires_grad_()
    channel: Any = group_of(group).channel("attention", q.device)
    least, results = channel.in_flight_from, []
    ring.Sending = Counted  # type: ignore[misc]
    try:
        for channel.in_flight_from in (2**62, 0):
            in_flight.clear()
            received.clear()
            most[0] = 0
            y = spar.attention(q, k, v, layout, method="ring")
            assert len(in_flight) == world - 2 and len(received) == 2 * world - 2 and most[0] <= 4, most
            received.clear()
            most[0] = 0
            results.append((y, *torch.autograd.grad(y, q, upper)))
            assert len(in_flight) == 2 * world - 3 and len(received) == 4 * world - 4
            assert most[0] <= 8, most  # and two of their gradients
            assert set(in_flight) == {channel.in_flight_from == 0}
        assert all(map(torch.equal, *results))
    finally:
        ring.Sending = sending  # type: ignore[misc]
        channel.in_flight_from = least


def test_ring_holds_two_shards(ranks: Ranks) -> None:
    ranks(4, check_memory)
