# SPDX-License-Identifier: Apache-2.0
"""Balanced layouts beside each document alone: any lengths, ranks without tokens, what travels, compiled."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.whole_attention import error_of, expected_of, inputs

import spar
from spar import SequenceLayout

pytestmark = [pytest.mark.one_transport, pytest.mark.long]

Group = dist.ProcessGroup
METHODS = ("gather", "ring", "ulysses", None)


def drawn_lengths(draw: random.Random) -> list[int]:
    """Return lengths of documents, some of no token or one; often one document alone."""
    most = draw.choice([1, 4, 30, 90])
    return [draw.randint(0, most) for _ in range(draw.choice([1, 1, 2, 5, 12]))] + [1]


def options_of(draw: random.Random, method: str | None, total: int) -> dict[str, Any]:
    options: list[dict[str, Any]] = [{}, {}, {"window": (5, None)}]
    options.append({"mask": (torch.ones(1, total, total) > 0).tril(3)})
    if method != "ring":
        options.append({"dropout_p": 1e-12})  # drops nothing
    return draw.choice(options)


def shared_expected(group: Group, whole: list[torch.Tensor], **arguments: Any) -> list[torch.Tensor]:
    """Compute the reference on rank 0 alone: its scores, of all pairs, take longer than the call."""
    expected = [torch.empty_like(x) for x in (whole[3], *whole[:3])]
    if dist.get_rank(group) == 0:
        expected = [x.contiguous() for x in expected_of(whole, **arguments)]
    for x in expected:
        dist.broadcast(x, 0, group)
    return expected


def check_random_lengths(rank: int, world: int, group: Group, count: int) -> None:
    draw = random.Random(world)
    for _ in range(count):
        lengths = drawn_lengths(draw)
        layout = SequenceLayout.balanced(lengths, group, draw.choice([0.0, 0.05, 0.5]))
        heads, key_heads = draw.choice([(4, 2), (3, 1), (4, 4)])
        whole = inputs(layout.total, heads, key_heads, torch.float64)
        for method in METHODS:
            options, causal = options_of(draw, method, layout.total), draw.random() < 0.7
            mask = options.get("mask")
            if "window" in options:
                places = torch.arange(layout.total)
                mask = (places[None] >= places[:, None] - 5)[None]
            expected = shared_expected(group, whole, causal=causal, mask=mask, documents=lengths)
            attend = partial(spar.attention, layout=layout, causal=causal, method=method, **options)
            assert error_of(attend, whole, expected, layout.index()) < 1e-9, (lengths, method, options)
        labels = torch.arange(layout.total)[None]
        ends = layout.cu_seqlens()[1:].tolist()
        expected_labels = [-100 if place + 1 in ends else place + 1 for place in range(layout.total)]
        shifted = layout.shift(labels[:, layout.index()], 1, 1, -100)
        assert shifted[0].tolist() == [expected_labels[place] for place in layout.index().tolist()]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_lengths_match_one_process(ranks: Ranks, world: int) -> None:
    ranks(world, check_random_lengths, 4 if world == 1 else 8)


def sent_by(layout: SequenceLayout, method: str) -> int:
    """Return the bytes that this rank sends in forward and backward of one head of one float64."""
    x = torch.randn(1, layout.index().numel(), 4, 1, dtype=torch.float64).requires_grad_()

    def count() -> int:
        return sum(n for name, n in spar.memory_stats().items() if name.startswith("sent."))

    before = count()
    spar.attention(x, x, x, layout, causal=True, method=method).sum().backward()  # type: ignore[no-untyped-call]
    return count() - before


def check_bytes(rank: int, world: int, group: Group) -> None:
    for method in ("gather", "ring"):
        # Two equal documents: nothing travels but what shows the layout to the peers, which has no byte.
        assert sent_by(SequenceLayout.balanced([50] * world, group), method) == 0
        # Of four ranks two share the long document; none of two does.
        layout = SequenceLayout.balanced([100, 50, 50], group, 1.0)
        held = int((layout.index() < 100).sum())
        assert (sent_by(layout, method) > 0) == (world == 4 and held > 0) == (held not in (0, 100))
        lengths = [400, *[40] * 30]
        packed = sent_by(SequenceLayout.packed(lengths, group), method)
        assert 3 * sent_by(SequenceLayout.balanced(lengths, group), method) < packed


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_without_a_shared_document_exchange_nothing(ranks: Ranks, world: int) -> None:
    ranks(world, check_bytes)


def check_compiled(rank: int, world: int, group: Group) -> None:
    lengths = [40, 3, 0, 9, 1]
    layout = SequenceLayout.balanced(lengths, group)
    whole = inputs(layout.total, 4, 2, torch.float64)
    expected = expected_of(whole, causal=True, documents=lengths)
    for method in ("gather", "ring", "ulysses"):
        torch._dynamo.reset()
        attend = partial(spar.attention, layout=layout, causal=True, method=method)
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        assert error_of(compiled, whole, expected, layout.index()) < 1e-9, method


@pytest.mark.compiler
def test_compiled_attention_matches_one_process(ranks: Ranks) -> None:
    ranks(2, check_compiled, timeout=200)


def check_errors(rank: int, world: int, group: Group) -> None:
    with pytest.raises(ValueError, match=r"SequenceLayout.balanced: lengths\[1\] is -1; expected at least 0"):
        SequenceLayout.balanced([3, -1], group)
    with pytest.raises(ValueError, match=r"tolerance is -0\.1; expected at least 0, and finite"):
        SequenceLayout.balanced([3], group, -0.1)
    with pytest.raises(TypeError, match="tolerance is '5%'; expected a number"):
        SequenceLayout.balanced([3], group, "5%")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lengths sum to \d+; expected a sum below 2\^63"):
        SequenceLayout.balanced([2**62, 2**62], group)
    huge = SequenceLayout.balanced([2**62, 1], group)
    assert sum(huge.sizes) == huge.total == 2**62 + 1
    layout = SequenceLayout.balanced([8, 4, 4] if rank == 0 else [4, 8, 4], group)
    x = torch.ones(1, layout.sizes[rank], 2, 2)
    with pytest.raises(spar.MismatchError):
        spar.attention(x, x, x, layout)
    layout = SequenceLayout.balanced([8, 4, 4], group)
    x = torch.ones(1, layout.sizes[rank] + 1, 2, 2)
    with pytest.raises(ValueError, match=r"'s shard in SequenceLayout.balanced\(\[8, 4, 4\], 2 ranks\)"):
        spar.attention(x, x, x, layout)


def test_errors_say_what_was_passed(ranks: Ranks) -> None:
    ranks(2, check_errors)
