# SPDX-License-Identifier: Apache-2.0
"""spar.Spans against booleans: closed forms, functions, combinations; and the blocks that they leave."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from torch import Tensor

import spar
from spar import Spans
from spar._attention import mask_functions, tiles
from spar._attention.spans import closed
from spar._exchange.layouts import Piece

TOTAL = 23
QUERY, KEY = torch.arange(TOTAL)[:, None], torch.arange(TOTAL)
IDS = torch.tensor([[0] * 5 + [1] * 1 + [4] * 17, [7] * 20 + [2] * 3])
IMAGES = torch.tensor([[-1] * 4 + [0] * 6 + [-1] * 2 + [1] * 11, [-1] * TOTAL])
VALID = torch.ones(2, TOTAL, dtype=torch.bool)
VALID[0, :4], VALID[1, 3], VALID[1, -2:] = False, False, False


def spans_of(rows: list[list[list[int]]], keys: int | None = None) -> Spans:
    """Make spans of the intervals of each query, of one sample and head."""
    return Spans(torch.tensor([[[list(itertools.chain(*row)) for row in rows]]], dtype=torch.int32), keys)


def of_booleans(allowed: Tensor) -> Spans:
    return Spans.of(lambda b, h, q, k: allowed[b, h, q, k], allowed.shape)


# ---- closed forms ----

BEGINS = torch.tensor([0, 3])
FORMS: dict[str, tuple[Callable[[], Spans], Tensor, int]] = {
    # name: the spans, their booleans, and the number of intervals
    "causal": (lambda: Spans.causal(TOTAL), KEY <= QUERY, 1),
    "window": (lambda: Spans.window(TOTAL, 3, 2), (QUERY - KEY <= 3) & (KEY - QUERY <= 2), 1),
    "window of the own key": (lambda: Spans.window(TOTAL, 0, 0), QUERY == KEY, 1),
    "window without a left side": (lambda: Spans.window(TOTAL, None, 1), KEY - QUERY <= 1, 1),
    "window without a right side": (lambda: Spans.window(TOTAL, 4, None), QUERY - KEY <= 4, 1),
    "window wider than the sequence": (lambda: Spans.window(TOTAL, 10**6, 2**31 - 2), QUERY > -1, 1),
    "chunks": (lambda: Spans.chunks(TOTAL, 5), QUERY // 5 == KEY // 5, 1),
    "one chunk": (lambda: Spans.chunks(TOTAL, 99), QUERY > -1, 1),
    "chunks that begin elsewhere": (
        lambda: Spans.chunks(TOTAL, 5, BEGINS),
        torch.stack([(QUERY - b).div(5, rounding_mode="floor") == (KEY - b) // 5 for b in (0, 3)])[:, None],
        1,
    ),
    "documents": (lambda: Spans.documents(IDS), (IDS[:, :, None] == IDS[:, None])[:, None], 1),
    "documents of all samples": (lambda: Spans.documents(IDS[0]), IDS[0][:, None] == IDS[0], 1),
    "one number twice": (
        lambda: Spans.documents(KEY // 6 % 2),
        QUERY // 6 == KEY // 6,  # neighbours alone are together
        1,
    ),
    "padding": (lambda: Spans.padding(VALID), VALID[:, None, None], 2),
    "padding of ints": (lambda: Spans.padding(VALID.long() * 3), VALID[:, None, None], 2),
    "nothing but padding": (lambda: Spans.padding(VALID & False), VALID[:, None, None] & False, 1),
    "together": (
        lambda: Spans.together(IMAGES),
        ((IMAGES[:, :, None] == IMAGES[:, None]) & (IMAGES[:, None] >= 0))[:, None],
        1,
    ),
    "prefix": (lambda: Spans.prefix(TOTAL, 4), KEY < 4, 1),
    "empty prefix": (lambda: Spans.prefix(TOTAL, 0), KEY < 0, 1),
    "prefix beyond the sequence": (lambda: Spans.prefix(TOTAL, TOTAL + 9), KEY >= 0, 1),
    "causal or together": (
        lambda: Spans.causal(TOTAL) | Spans.together(IMAGES),
        (KEY <= QUERY) | ((IMAGES[:, :, None] == IMAGES[:, None]) & (IMAGES[:, None] >= 0))[:, None],
        1,
    ),
    "first tokens and a window": (
        lambda: Spans.causal(TOTAL) & (Spans.window(TOTAL, 3, 0) | Spans.prefix(TOTAL, 4)),
        (KEY <= QUERY) & ((QUERY - KEY <= 3) | (KEY < 4)),
        2,
    ),
    "documents and a window and padding": (
        lambda: Spans.documents(IDS) & Spans.window(TOTAL, 4, 0) & Spans.padding(VALID),
        (IDS[:, :, None] == IDS[:, None])[:, None]
        & ((QUERY - KEY <= 4) & (KEY <= QUERY))
        & VALID[:, None, None],
        2,
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_closed_forms_are_the_booleans(name: str) -> None:
    make, allowed, intervals = FORMS[name]
    spans, shape = make(), torch.broadcast_shapes(allowed.shape, (1, 1, TOTAL, TOTAL))
    assert torch.equal(spans.dense().expand(shape), allowed.expand(shape))
    assert spans.ends.size(3) == 2 * intervals and spans.ends.dtype == torch.int32
    assert torch.equal(spans.dense(4, 9, 2, 5), spans.dense()[:, :, 4:13, 2:7])
    # A function of the same booleans makes the same spans.
    assert torch.equal(of_booleans(allowed.expand(shape)).ends, spans.ends)


def test_keywords_have_spans_for_unequal_numbers() -> None:
    """Without a window, which needs as many keys as queries: all keys, or those up to the query's place."""
    for queries, keys, causal in ((5, 9, False), (5, 9, True), (9, 5, False), (9, 5, True)):
        expected = torch.ones(queries, keys, dtype=torch.bool)
        spans = closed(queries, keys, causal, None, ())
        assert torch.equal(spans.dense()[0, 0], expected.tril() if causal else expected)
        assert spans.shape == (1, 1, queries, keys)


def test_combinations_are_those_of_booleans() -> None:
    generator = torch.Generator().manual_seed(1)
    for shapes in (((2, 1), (1, 3)), ((1, 1), (2, 3)), ((2, 3), (2, 3))):
        one, two = (torch.rand(*shape, 9, 12, generator=generator) > 0.5 for shape in shapes)
        a, b = of_booleans(one), of_booleans(two)
        for joined, expected in ((a & b, one & two), (a | b, one | two)):
            assert torch.equal(joined.dense().expand(2, 3, 9, 12), expected.expand(2, 3, 9, 12))
        assert torch.equal((a & a).ends, a.ends) and torch.equal((a | a).ends, a.ends)


# ---- one form of the same keys ----


def test_intervals_are_in_order_and_apart() -> None:
    rows = [
        [[5, 9], [0, 3], [2, 6]],  # unordered, overlapping
        [[3, 6], [0, 3], [8, 8]],  # touching, and an empty one
        [[7, 4], [9, 9], [0, 0]],  # empty, one of them backwards
        [[1, 8], [2, 3], [4, 5]],  # one inside the other
        [[8, 9], [0, 1], [3, 4]],  # apart
    ]
    spans = spans_of(rows, 9)
    assert spans.ends[0, 0].tolist() == [
        [0, 9, 0, 0, 0, 0],
        [0, 6, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [1, 8, 0, 0, 0, 0],
        [0, 1, 3, 4, 8, 9],
    ]
    assert spans_of(rows[:4], 9).ends[0, 0].tolist() == [[0, 9], [0, 6], [0, 0], [1, 8]]
    assert spans_of([[[2, 1]], [[0, 1]]]).ends[0, 0].tolist() == [[0, 0], [0, 1]]


def test_equal_samples_and_heads_are_kept_once() -> None:
    same = Spans.documents(IDS[:1].expand(4, -1))
    assert same.shape == (1, 1, TOTAL, TOTAL)
    ends = Spans.causal(4).ends.expand(2, 3, -1, -1).clone()
    assert Spans(ends).shape == (1, 1, 4, 4)
    ends[1, :, 2] = 0
    assert Spans(ends).shape == (2, 1, 4, 4)
    ends[:, 2, 3] = 0
    assert Spans(ends).shape == (2, 3, 4, 4)


def test_spans_are_remembered_pickled_copied_and_moved() -> None:
    spans = Spans.documents(IDS) & Spans.padding(VALID)
    assert repr(spans) == "Spans(B=2, H=1, S=23, T=23, intervals=2)"
    assert spans.ndim == len(spans.shape) == 4
    for other in (pickle.loads(pickle.dumps(spans)), copy.copy(spans), copy.deepcopy(spans)):
        assert torch.equal(other.ends, spans.ends) and other.keys == spans.keys
        assert other.digest == spans.digest
    assert pickle.loads(pickle.dumps(Spans.prefix(3, 1))).shape == (1, 1, 3, 3)
    assert spans.to("cpu") is spans and spans.on_cpu is spans.on_cpu
    assert spans.digest != (spans & Spans.causal(TOTAL)).digest
    several = Spans.of(lambda b, h, q, k: k <= q - h, (1, 3, TOTAL, TOTAL))
    assert torch.equal(several.of_heads(1, 2).dense(), several.dense()[:, 1:3])
    assert several.of_heads(1, 2) is several.of_heads(1, 2) and spans.of_heads(1, 2) is spans


def test_default_device_is_the_callers_alone() -> None:
    with torch.device("meta"):
        found = [make() for make, _, _ in FORMS.values()]
        found += [closed(9, 9, True, (2, None), (4, 5)), closed(5, 9, True, None, ())]
        found += [Spans.of(lambda b, h, q, k: k <= q, (1, 1, 9, 9), contiguous=c) for c in (False, True)]
        pieces = [Piece(0, TOTAL, 0)]
        blocks = tiles.blocks_by(found[0], pieces, pieces)
        digests = [spans.digest for spans in found]
    assert all(spans.ends.device.type == "cpu" for spans in found)
    assert blocks == tiles.blocks_by(Spans.causal(TOTAL), pieces, pieces)
    assert digests[0] == Spans.causal(TOTAL).digest


# ---- functions ----


def sliding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) & (q - k <= 3 + b + h)


def test_bisection_finds_what_all_pairs_have(monkeypatch: pytest.MonkeyPatch) -> None:
    functions: list[tuple[Any, tuple[int, ...]]] = [
        (sliding, (2, 3, TOTAL, TOTAL)),
        (lambda b, h, q, k: k <= q, (1, 1, 1, 1)),
        (lambda b, h, q, k: q // 5 == k // 5, (1, 1, TOTAL, TOTAL)),
        (lambda b, h, q, k: IDS[b, q] == IDS[b, k], (2, 1, TOTAL, TOTAL)),
        (lambda b, h, q, k: (q - k).abs() <= 2 * b, (2, 1, TOTAL, TOTAL)),
    ]
    for function, shape in functions:
        expected = Spans.of(function, shape)
        assert torch.equal(Spans.of(function, shape, contiguous=True).ends, expected.ends)
        # Few pairs at a time: the strips have unequal numbers of intervals.
        with monkeypatch.context() as patch:
            patch.setattr(mask_functions, "_PAIRS", 7)
            assert torch.equal(Spans.of(function, shape).ends, expected.ends)


def test_bisection_evaluates_few_pairs() -> None:
    total, calls = 65_536, []

    def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        calls.append(1)  # each is of all queries, with a key for each
        return (k <= q) & (q - k < 512)

    spans = Spans.of(window, (1, 1, total, total), contiguous=True)
    assert torch.equal(spans.ends, Spans.window(total, 511, 0).ends)
    assert len(calls) <= 2 * 17 + 1


def test_functions_may_ignore_indices_and_need_no_equal_numbers() -> None:
    spans = Spans.of(lambda b, h, q, k: k < 4, (2, 3, 5, 9))
    assert spans.shape == (1, 1, 5, 9) and torch.equal(
        spans.dense()[0, 0], (torch.arange(9) < 4).expand(5, 9)
    )
    for shape in ((1, 1, 0, 4), (1, 1, 4, 0), (1, 1, 0, 0)):
        assert Spans.of(lambda b, h, q, k: k < q, shape).shape == shape


def check_empty(rank: int, world: int, group: dist.ProcessGroup) -> None:
    ids = torch.zeros(0, 6, dtype=INT)
    x = torch.zeros(0, 6 // world, 2, 4, requires_grad=True)
    for method in ("ulysses", "gather", "ring"):
        for spans in (Spans.documents(ids), Spans.padding(ids), Spans.together(ids) | Spans.causal(6)):
            out = spar.attention(x, x, x, spar.SequenceLayout.even(6, group), mask=spans, method=method)
            out.sum().backward()  # type: ignore[no-untyped-call]
            assert out.shape == x.shape


def test_empty_batches_have_spans(ranks: Ranks) -> None:
    ranks(2, check_empty)


def check_divided(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Each rank evaluates its part of the queries; parts have unequal numbers of intervals."""

    def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k % (q // 8 + 2) != 1 + b)

    for total in (TOTAL, 2):
        calls: list[int] = []

        def counted(b: Tensor, h: Tensor, q: Tensor, k: Tensor, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            return function(b, h, q, k)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mask_functions, "_PAIRS", 1)  # a query at a time
            divided = Spans.of(counted, (2, 1, total, total), group=group)
        assert len(calls) <= -(-total // world)
        assert torch.equal(divided.ends, Spans.of(function, (2, 1, total, total)).ends)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_functions_are_divided_over_the_ranks(ranks: Ranks, world: int) -> None:
    ranks(world, check_divided)


def check_failing(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A function that fails on one rank: the others do not wait for its part."""

    def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sliding(b, h, q, k) if rank != 1 else k < 1 // 0

    begin, own = time.monotonic(), rank == 1
    for raises in (True, False):
        error = ZeroDivisionError if own else spar.MismatchError
        with pytest.raises(error) if raises else contextlib.nullcontext():
            Spans.of(function if raises else sliding, (1, 1, TOTAL, TOTAL), group=group)
    assert time.monotonic() - begin < 10


def test_function_that_fails_on_a_rank_is_reported(ranks: Ranks) -> None:
    ranks(3, check_failing)


# ---- errors ----

INT = torch.int32
WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no tensor": (lambda: Spans([[0, 1]]), TypeError, "ends is a list; expected an int32 tensor"),  # type: ignore[arg-type]
    "dtype": (
        lambda: Spans(torch.zeros(1, 1, 3, 2, dtype=torch.int64)),
        TypeError,
        "ends is a tensor of torch.int64; expected an int32 tensor [B, H, S, 2n]",
    ),
    "three dims": (
        lambda: Spans(torch.zeros(1, 3, 2, dtype=INT)),
        ValueError,
        "ends is of shape [1, 3, 2]; expected [B or 1, H or 1, S, 2n]",
    ),
    "odd": (lambda: Spans(torch.zeros(1, 1, 3, 3, dtype=INT)), ValueError, "ends is of shape [1, 1, 3, 3]"),
    "no interval": (lambda: Spans(torch.zeros(1, 1, 3, 0, dtype=INT)), ValueError, "of shape [1, 1, 3, 0]"),
    "negative key": (
        lambda: spans_of([[[-1, 2]]]),
        ValueError,
        "ends has -1; expected 0 to 1, the number of",
    ),
    "key behind the last": (lambda: spans_of([[[0, 7]]], 6), ValueError, "ends has 7; expected 0 to 6"),
    "number of keys": (lambda: spans_of([[[0, 1]]], -1), ValueError, "keys is -1; expected an int from 0"),
    "kind of keys": (lambda: spans_of([[[0, 1]]], 1.5), TypeError, "keys"),  # type: ignore[arg-type]
    "too many intervals": (
        lambda: spans_of([[[i, i + 1] for i in range(0, 600, 2)]], 600),
        ValueError,
        "a query has 300 intervals of 600 keys, which take more bytes than booleans; pass a mask tensor",
    ),
    "negative window": (
        lambda: Spans.window(4, -1, 0),
        ValueError,
        "Spans.window: left is -1; expected an int from 0 to",
    ),
    "kind of window": (lambda: Spans.window(4, 1, 0.5), TypeError, "Spans.window: right"),  # type: ignore[arg-type]
    "size of chunks": (
        lambda: Spans.chunks(4, 0),
        ValueError,
        "Spans.chunks: size is 0; expected an int from 1",
    ),
    "begin of chunks": (
        lambda: Spans.chunks(4, 2, [1]),  # type: ignore[arg-type]
        TypeError,
        "Spans.chunks: begin is a list; expected an int tensor [B]",
    ),
    "shape of begin": (
        lambda: Spans.chunks(4, 2, torch.zeros(1, 1, dtype=torch.int64)),
        ValueError,
        "Spans.chunks: begin is of shape [1, 1]; expected [B]",
    ),
    "floating documents": (
        lambda: Spans.documents(torch.zeros(1, 4)),
        TypeError,
        "Spans.documents: ids is a tensor of torch.float32; expected a bool or int tensor [B, S]",
    ),
    "dims of documents": (
        lambda: Spans.documents(torch.zeros(1, 1, 4, dtype=INT)),
        ValueError,
        "Spans.documents: ids is of shape [1, 1, 4]; expected [B, S] with at least one token",
    ),
    "no padding mask": (lambda: Spans.padding(None), TypeError, "Spans.padding: valid is a NoneType"),  # type: ignore[arg-type]
    "images": (
        lambda: Spans.together(torch.zeros(0, dtype=INT)),
        ValueError,
        "Spans.together: ids is of shape [0]",
    ),
    "prefix": (lambda: Spans.prefix(4, -2), ValueError, "Spans.prefix: size is -2; expected an int from 0"),
    "total": (lambda: Spans.causal(-3), ValueError, "total is -3; expected an int from 0"),
    "unequal": (
        lambda: Spans.causal(4) & Spans.causal(5),
        ValueError,
        "Spans(B=1, H=1, S=4, T=4, intervals=1) and Spans(B=1, H=1, S=5, T=5, intervals=1); expected the sa",
    ),
    "unequal batches": (
        lambda: Spans.documents(IDS) | Spans.documents(torch.cat([IDS, IDS[:1].flip(1)])),
        ValueError,
        "Spans(B=2, H=1, S=23, T=23, intervals=1) and Spans(B=3, H=1, S=23, T=23, intervals=1); expected",
    ),
    "no spans": (lambda: Spans.causal(4) & True, TypeError, "combined with a bool; expected Spans"),  # type: ignore[operator]
    "shape of a function": (
        lambda: Spans.of(sliding, (1, 1, 4)),
        ValueError,
        "shape is (1, 1, 4); expected (B, H",
    ),
    "no mask": (
        lambda: Spans.of(lambda b, h, q, k: q - k, (1, 1, 4, 4)),
        TypeError,
        "Spans.of: the function returned a tensor of torch.int64; expected a bool tensor",
    ),
    "no result": (
        lambda: Spans.of(lambda b, h, q, k: True, (1, 1, 4, 4)),  # type: ignore[arg-type,return-value]
        TypeError,
        "returned a bool; expected",
    ),
    "shape of a mask": (
        lambda: Spans.of(lambda b, h, q, k: torch.ones(3, dtype=torch.bool), (1, 1, 4, 4)),
        ValueError,
        "returned a tensor of shape [3] for one batch, head, query and key; expected a scalar",
    ),
    "not itself": (
        lambda: Spans.of(lambda b, h, q, k: (k <= q) & (q + h != 3), (1, 2, 4, 4), contiguous=True),
        ValueError,
        "contiguous=True, and query 3 of sample 0, head 0, does not attend to the key in its own place",
    ),
    "unequal and contiguous": (
        lambda: Spans.of(sliding, (1, 1, 4, 5), contiguous=True),
        ValueError,
        "contiguous=True and 4 queries of 5 keys; expected as many",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    call, error, text = WRONG[name]
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error and text in str(caught.value), caught.value
