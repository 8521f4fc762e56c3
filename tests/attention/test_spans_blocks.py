# SPDX-License-Identifier: Apache-2.0
"""Blocks of spans: every pair is in one, and few scores are computed in vain."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_spans import of_booleans
from torch import Tensor

from spar import Spans
from spar._attention import tiles
from spar._exchange.gather_plan import Holders
from spar._exchange.layouts import Piece


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Tensor, int, list[Piece], list[Piece], int]:
    """Draw booleans, a tile's size, runs of queries and of keys that a rank holds, a block's most keys."""
    queries, keys = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    samples, count, seed = (
        draw(st.sampled_from([1, 2, 3])),
        draw(st.integers(1, 3)),
        draw(st.integers(0, 2**16)),
    )
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, keys + 1, (samples, 1, queries, count, 2), generator=generator).to(torch.int32)
    place, kind = torch.arange(1, queries + 1), draw(st.sampled_from(["any", "sorted", "causal", "equal"]))
    if kind != "any":
        ends = ends.sort(-1)[0]
    if kind == "causal":
        ends[..., 1] = place[:, None].clamp(max=keys)
    if kind == "equal":
        ends = ends[:, :, :1].expand_as(ends)
    key = torch.arange(keys)
    allowed = ((key >= ends[..., :1]) & (key < ends[..., 1:])).any(3)[:, 0]

    def runs(total: int) -> list[Piece]:
        cuts = sorted(draw(st.lists(st.integers(0, total), max_size=4)))
        parts = [Piece(a, b - a, 0) for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
        kept = draw(st.lists(st.sampled_from(parts), unique=True, min_size=1))
        return kept

    spans_of_queries, tile = runs(queries), draw(st.integers(2, 16))
    most = draw(st.sampled_from([1, 3, 7, 2**31 - 1]))
    return allowed, tile, spans_of_queries, runs(keys), most


@settings(deadline=None, max_examples=150)
@given(drawn())
def test_every_pair_is_in_one_block(case: tuple[Tensor, int, list[Piece], list[Piece], int]) -> None:
    allowed, tile, queries, keys, most = case
    spans = of_booleans(allowed[:, None])
    found = torch.zeros(allowed.shape, dtype=torch.int64)
    size_of_keys = sum(run.size for run in keys)
    with mock.patch.object(tiles, "TILE", tile):
        blocks = tiles.blocks_by(spans, queries, keys, most)
        needed = tiles.needed_keys(spans, queries)
    place_of_query = torch.cat([torch.arange(run.start, run.start + run.size) for run in queries])
    place_of_key = torch.cat([torch.arange(run.start, run.start + run.size) for run in keys])
    for block in blocks:
        assert block.queries > 0 < block.keys and block.key + block.keys <= size_of_keys
        assert block.causal or block.keys <= most
        rows = place_of_query[block.query : block.query + block.queries]
        columns = place_of_key[block.key : block.key + block.keys]
        # What a block covers is one behind the other in the sequence, too.
        assert rows.tolist() == list(range(block.query_start, block.query_start + block.queries))
        assert columns.tolist() == list(range(block.key_start, block.key_start + block.keys))
        part = torch.ones(len(allowed), len(rows), len(columns), dtype=torch.bool)
        if block.causal:
            assert rows.equal(columns) and not block.partial
            part = part.tril()
        if block.partial:
            part = spans.dense(block.query_start, block.queries, block.key_start, block.keys)[:, 0]
        samples = slice(None) if block.sample < 0 else slice(block.sample, block.sample + 1)
        found[samples, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] += part[
            samples if part.size(0) > 1 else slice(None)
        ]
    held = torch.zeros_like(allowed)
    held[:, place_of_query[:, None], place_of_key] = True
    assert torch.equal(found, (allowed & held).long())
    # What is needed has each key to which a query of the runs attends, and none behind the sequence.
    is_needed = torch.zeros(allowed.size(2), dtype=torch.bool)
    for first, end in needed:
        is_needed[first:end] = True
    attended = allowed[:, place_of_query].any(0).any(0)
    assert not bool((attended & ~is_needed).any())
    assert sum(end - first for first, end in needed) == int(is_needed.sum()), "apart from each other"
    holders = Holders([keys])
    parts = [part for first, end in needed for _, _, part in holders.parts(first, end - first)]
    assert sum(part.size for part in parts) == int(is_needed[place_of_key].sum())


def computed(spans: Spans, total: int, samples: int) -> tuple[int, int]:
    """Return how many scores blocks compute, and how many the queries need."""
    pieces = [Piece(0, total, 0)]
    scores = 0
    for block in tiles.blocks_by(spans, pieces, pieces):
        pairs = block.queries * block.keys
        pairs = (pairs + block.queries) // 2 if block.causal else pairs
        scores += pairs * (samples if block.sample < 0 else 1)
    ends = spans.ends.unflatten(3, (-1, 2))
    needed = int((ends[..., 1] - ends[..., 0]).sum()) * (samples // spans.ends.size(0))
    return scores, needed


@pytest.mark.parametrize("samples", [1, 2, 4, 8])
def test_documents_that_differ_compute_few_scores_in_vain(samples: int) -> None:
    total, generator = 8192, torch.Generator().manual_seed(samples)
    ids = (torch.rand(samples, total, generator=generator) < 1 / 700).cumsum(1)
    scores, needed = computed(Spans.causal(total) & Spans.documents(ids), total, samples)
    assert scores <= 1.6 * needed, scores / needed


def test_windows_compute_few_scores_in_vain() -> None:
    for window, most in ((512, 1.5), (4096, 1.1)):
        scores, needed = computed(Spans.window(16_384, window - 1, 0), 16_384, 1)
        assert scores <= most * needed, scores / needed


def test_spans_and_blocks_take_time_and_memory_of_their_length() -> None:
    """65,536 tokens: 4 billion pairs, of which nothing may be made."""
    total, begin = 65_536, time.process_time()
    ids = torch.arange(total) // 700
    spans = Spans.window(total, 511, 0) & Spans.documents(ids)
    pieces = [Piece(0, total, 0)]
    blocks = tiles.blocks_by(spans, pieces, pieces)
    took = time.process_time() - begin
    assert spans.ends.numel() == 2 * total
    assert len(blocks) <= 2 * total // tiles.TILE + total // 700
    assert sum(block.queries * block.keys for block in blocks) <= total * (512 + tiles.TILE)
    assert took < 3.0, "0.1 s on an idle core"
