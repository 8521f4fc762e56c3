# SPDX-License-Identifier: Apache-2.0
"""What gather and the ring send of keys: those that a window leaves at the boundaries of ranks, no others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.whole_attention import error_of, expected_of, inputs
from torch import Tensor

import spar
from spar import SequenceLayout
from spar._attention.tiles import joined_runs
from spar._attention.travel import gathered_by_spans
from spar._exchange.layouts import pieces
from spar.sequence_layout import numbers_of

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
HEADS, KEY_HEADS, WIDTH = 4, 2, 8  # as `inputs` has them
Layouts = dict[str, Callable[[Group], SequenceLayout]]
LENGTHS = [1, 1, 30, 0, 5, 1, 27]
LAYOUTS: Layouts = {
    "even": lambda group: SequenceLayout.even(65, group),
    "zigzag": lambda group: SequenceLayout.zigzag(65, group),
    "packed": lambda group: SequenceLayout.packed(LENGTHS, group),
    "documents of one token": lambda group: SequenceLayout.packed([1] * 65, group),
    "few tokens": lambda group: SequenceLayout.even(2, group),
    "holes": lambda group: SequenceLayout("local", (*(0, 40, 0)[: group.size() - 1], 25), group),
}
WINDOWS = [(5, 0), (0, 3), (4, 2), (0, 0), (30, 30), (100, 100)]


def sent() -> int:
    return sum(n for name, n in spar.memory_stats().items() if name.startswith("sent."))


def is_near(layout: SequenceLayout, window: tuple[int, int]) -> Tensor:
    """Return the booleans [S, S] of a window inside of documents."""
    place = torch.arange(layout.total)
    document = torch.zeros_like(place)
    if layout.is_packed:
        lengths = torch.tensor(layout.lengths)
        document = torch.arange(len(lengths)).repeat_interleave(lengths)
    before = place[:, None] - place
    return (before <= window[0]) & (-before <= window[1]) & (document[:, None] == document)


def keys_sent(layout: SequenceLayout, near: Tensor, group: Group) -> list[list[int]]:
    """Return how many keys each rank sends to each other rank: those to which its queries attend."""
    world, numbers = dist.get_world_size(group), numbers_of(layout, 0)
    places = [
        torch.cat([torch.arange(run.start, run.start + run.size) for run in pieces(numbers, world, rank)])
        for rank in range(world)
    ]
    needed = [near[own].any(0) for own in places]
    return [
        [int(needed[to][places[of]].sum()) if to != of else 0 for to in range(world)] for of in range(world)
    ]


def traffic(layout: SequenceLayout, method: str, whole: list[Tensor], **options: Any) -> tuple[int, int]:
    """Return the bytes that this rank sent in forward and in backward."""
    *leaves, upper = [x[:, layout.index()].requires_grad_() for x in whole]
    begin = sent()
    y = spar.attention(*leaves, layout, method=method, **options)
    forward = sent() - begin
    torch.autograd.grad(y, leaves, upper)
    return forward, sent() - begin - forward


def check_bytes(rank: int, world: int, group: Group, kind: str) -> None:
    layout = LAYOUTS[kind](group)
    whole = inputs(layout.total, HEADS, KEY_HEADS, torch.float32)
    key_bytes = sum(4 * x.numel() // layout.total for x in whole[1:3])
    for window in WINDOWS:
        near = is_near(layout, window)
        keys = keys_sent(layout, near, group)
        to_others, from_others = sum(keys[rank]), sum(row[rank] for row in keys)
        reference = expected_of(whole, mask=near[None, None])
        for method in ("gather", "ring"):
            again = to_others if method == "ring" else 0  # keys go round again in backward
            expected = key_bytes * to_others, key_bytes * (again + from_others)
            found = traffic(layout, method, whole, window=window)
            assert found == expected, (window, method, keys, found, expected)
            error = error_of(
                lambda q, k, v: spar.attention(q, k, v, layout, window=window, method=method),  # noqa: B023
                whole,
                reference,
                layout.index(),
            )
            assert error < 2e-5, (window, method, error)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_windows_send_what_their_queries_attend_to(ranks: Ranks, kind: str, world: int) -> None:
    ranks(world, check_bytes, kind)


def check_growth(rank: int, world: int, group: Group) -> None:
    """A longer sequence has the same boundaries: the bytes are those of 511 keys at each, for any length."""
    for method, total in itertools.product(("gather", "ring"), (2048, 8192)):
        whole = inputs(total, 2, 1, torch.float32)
        key_bytes = sum(4 * x.numel() // total for x in whole[1:3])
        boundaries = {
            "even": (SequenceLayout.even(total, group), int(rank < world - 1)),
            # Rank 0 has the first and the last of four chunks, before and behind those of rank 1.
            "zigzag": (SequenceLayout.zigzag(total, group), 1),
        }
        for kind, (layout, count) in boundaries.items():
            forward, _ = traffic(layout, method, whole, window=(511, 0))
            assert forward == count * 511 * key_bytes, (method, total, kind)


def test_bytes_of_a_window_do_not_grow_with_the_sequence(ranks: Ranks) -> None:
    ranks(2, check_growth)


def check_whole_keys(rank: int, world: int, group: Group) -> None:
    """Spans that leave all keys send all; those that leave own keys alone, none. Cross attention, too."""
    total = 8 * world
    layout, other = SequenceLayout.even(total, group), SequenceLayout.zigzag(total, group)
    whole = inputs(total, HEADS, KEY_HEADS, torch.float32)
    key_bytes = sum(4 * x.numel() // total for x in whole[1:3])
    for method in ("gather", "ring"):
        everything = traffic(layout, method, whole, mask=spar.Spans.window(total, None, None))
        assert everything[0] == key_bytes * 8 * (world - 1)
        assert traffic(layout, method, whole, mask=spar.Spans.chunks(total, 8)) == (0, 0)
    # Each rank's queries need its own keys, which lie elsewhere in the other layout.
    spans = spar.Spans.chunks(total, 8)
    found = gathered_by_spans(spans, numbers_of(layout, 0), numbers_of(other, 0), world, rank)
    assert sum(run.size for run in found.held) >= 8
    *queries, upper = [x[:, layout.index()].requires_grad_() for x in (whole[0], whole[3])]
    keys = [x[:, other.index()].requires_grad_() for x in whole[1:3]]
    y = spar.attention(*queries, *keys, (layout, other), mask=spans, method="gather")
    found = torch.autograd.grad(y, [*queries, *keys], upper)
    expected = expected_of(whole, mask=spans.dense())
    indices = [layout.index(), layout.index(), other.index(), other.index()]
    for x, e, index in zip((y, *found), expected, indices, strict=True):
        torch.testing.assert_close(x, e[:, index])


def check_strips(rank: int, world: int, group: Group) -> None:
    """The halo lies beside a rank's own keys: one block covers both."""
    layout = SequenceLayout.even(16 * world, group)
    numbers = numbers_of(layout, 0)
    found = gathered_by_spans(spar.Spans.window(16 * world, 5, 3), numbers, numbers, world, rank)
    before, behind = 5 * (rank > 0), 3 * (rank < world - 1)
    assert joined_runs(found.held) == [(0, 16 * rank - before, before + 16 + behind)]


def test_halo_and_own_keys_are_one_run(ranks: Ranks) -> None:
    ranks(3, check_strips)


@pytest.mark.parametrize("world", [2, 3])
def test_spans_send_what_they_leave(ranks: Ranks, world: int) -> None:
    ranks(world, check_whole_keys)
