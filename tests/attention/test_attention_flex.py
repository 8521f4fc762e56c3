# SPDX-License-Identifier: Apache-2.0
"""Spans by flex_attention: its blocks, results over a stand-in and over torch's own, choice and refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import flash_attn_standin, flex_standin
from helpers.attention_cases import LIMITS, error_of_rank, make_case, whole
from helpers.whole_attention import METHODS, error_of, expected_of, inputs
from test_attention_kernels import standins
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import spar
from spar import SequenceLayout, Spans
from spar._attention.kernel_blocks import long_blocks
from spar._attention.kernels import block_mask, flex
from spar._attention.kernels.block_mask import tables_of
from spar._attention.kernels.kernel import BlockInputs, Needs
from spar._exchange.layouts import Piece

pytestmark = [pytest.mark.one_transport, pytest.mark.long]

Group = dist.ProcessGroup
CASES = 60


KINDS = ("all", "causal", "window", "both sides", "documents", "window in documents", "chunks")
KINDS += ("padding with holes", "left padding", "prefix", "images", "by sample", "by head", "by both", "none")


def spans_of(total: int) -> dict[str, Spans]:
    generator = torch.Generator().manual_seed(total)

    def ends(*shape: int) -> Tensor:
        return torch.randint(0, total + 1, (*shape, total, 4), generator=generator, dtype=torch.int32)

    ids = torch.randint(0, 4, (2, total), generator=generator).sort(1)[0]
    causal, window = Spans.causal(total), Spans.window(total, total // 5, 0)
    images = torch.where(torch.arange(total) // 7 % 3 == 1, torch.arange(total) // 7, -1)
    return {
        "all": Spans.window(total, None, None),
        "causal": causal,
        "window": window,
        "both sides": Spans.window(total, 3, total // 4),
        "documents": Spans.documents(ids),
        "window in documents": window & Spans.documents(ids),
        "chunks": causal & Spans.chunks(total, max(total // 3, 1), torch.tensor([0, 5])),
        "padding with holes": causal & Spans.padding(torch.arange(total)[None] % 19 > 2),
        "left padding": causal & Spans.padding(torch.arange(total) >= torch.tensor([[0], [total // 2]])),
        "prefix": causal & (window | Spans.prefix(total, 4)),
        "images": causal | Spans.together(images),
        "by sample": Spans(ends(2, 1)),
        "by head": Spans(ends(1, 4)),
        "by both": Spans(ends(2, 4)),
        "none": Spans(torch.zeros(1, 1, total, 2, dtype=torch.int32)),
    }


def check_random(rank: int, world: int, group: Group) -> None:
    used = 0
    for seed in range(7000 + 1000 * world, 7000 + 1000 * world + CASES):
        case = make_case(seed, world)
        case.keywords.pop("dropout_p", None)
        case.dtype, case.autocast = torch.float32, False
        case.keywords["kernel"] = ("flex", None)[seed % 2]
        with flex_standin.installed(), mock.patch.object(block_mask, "SIZE", 8):
            error = error_of_rank(case, group, whole(case))
            used += any(has_spans for *_, has_spans in flex_standin.CALLS)
        assert error < LIMITS[torch.float32], (seed, case.keywords, case.parts, error)
    assert used > CASES // 4, used


@pytest.mark.parametrize("world", [1, 2, 3])
def test_random_attentions_match_one_process(ranks: Ranks, world: int) -> None:
    ranks(world, check_random, timeout=60 + 4 * CASES)


def check_spans(rank: int, world: int, group: Group) -> None:
    total = 67
    tensors = inputs(total, 4, 2, torch.float64)
    zigzag, even = SequenceLayout.zigzag(total, group), SequenceLayout.even(total, group)
    cells = [(zigzag, torch.float32, 2e-5), (even, torch.bfloat16, 0.1), (even, torch.float32, 2e-5)]
    if world == 1:
        del cells[2]  # both layouts are the same
    elif world == 3:
        del cells[1:]  # 2 ranks have both layouts, and 16 bits
    for name, spans in spans_of(total).items():
        expected = expected_of(tensors, mask=spans.dense())
        for (layout, kind, limit), method in itertools.product(cells, METHODS):
            with flex_standin.installed(), mock.patch.object(block_mask, "SIZE", 8):
                found = error_of(
                    partial(spar.attention, layout=layout, mask=spans, method=method),
                    [x.to(kind) for x in tensors],
                    expected,
                    layout.index(),
                )
                calls = list(flex_standin.CALLS)
            assert found < limit, (name, layout, method, kind, found)
            # Forward and backward of one block; of one in each step of a ring.
            most = 2 * (world if method == "ring" else 1)
            assert len(calls) <= most and all(has_spans for *_, has_spans in calls), (name, method, calls)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_kind_of_spans_is_one_block(ranks: Ranks, world: int) -> None:
    ranks(world, check_spans, timeout=240)


def test_kinds_are_those_of_the_cells() -> None:
    assert tuple(spans_of(5)) == KINDS, (
        "pytest collects them by name, as torch.broadcast_shapes imports sympy"
    )


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("total", [128, 300])
def test_blocks_are_those_of_the_pairs(name: str, total: int) -> None:
    spans = spans_of(total)[name]
    made = block_mask.block_mask_of(spans, torch.device("cpu"))
    places = torch.meshgrid(torch.arange(2), torch.arange(4), *[torch.arange(total)] * 2, indexing="ij")
    allowed = made.mask_mod(*places)
    assert torch.equal(allowed, spans.dense().expand(allowed.shape))
    flex_standin.check_blocks(made, allowed)


def test_blocks_of_common_spans_are_as_few_as_those_of_pairs() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    found = spans_of(1200)
    for name in ("all", "causal", "window", "both sides", "left padding", "window in documents", "documents"):
        spans = found[name]
        made = block_mask.block_mask_of(spans, torch.device("cpu"))
        dense = create_block_mask(made.mask_mod, *made.shape, device="cpu")
        for part in ("kv", "full_kv", "q", "full_q"):
            ours, torchs = (getattr(x, f"{part}_num_blocks") for x in (made, dense))
            assert torch.equal(ours, torchs), (name, part)


class Largest(TorchDispatchMode):
    """Records the number of items of the largest tensor that an operation returns."""

    items = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        parts = result if isinstance(result, (tuple, list)) else [result]
        self.items = max(self.items, *[x.numel() for x in parts if isinstance(x, Tensor)], 0)
        return result


@pytest.mark.parametrize("total", [8192, 65536])
def test_tables_of_a_window_grow_with_the_sequence(total: int) -> None:
    spans = Spans.window(total, 511, 0) & Spans.documents(torch.arange(total) // 3000)
    with Largest() as largest:
        runs = [Piece(0, total, 0)]
        block = long_blocks(spans, runs, runs)[0]
        assert block.spans is not None
        tables = tables_of(block.spans)
    items = sum(x.numel() for table in tables for x in table)
    # A window of 512 touches 5 blocks: 4 tables of at most 6 columns, and their counts.
    assert items <= 28 * total // 128, items
    assert largest.items <= 8 * total, largest.items


def test_tables_are_made_once_for_layers_and_backward(ranks: Ranks) -> None:
    ranks(1, check_remembered)


def check_remembered(rank: int, world: int, group: Group) -> None:
    layout, spans = SequenceLayout.even(40, group), Spans.window(40, 5, 0)
    x = torch.randn(1, 40, 2, 16, requires_grad=True)
    with flex_standin.installed(), mock.patch.object(block_mask, "tables_of", wraps=tables_of) as made:
        y = x
        for _ in range(3):
            y = spar.attention(y, y, y, layout, mask=spans)
        y.sum().backward()
        # In forward, and in backward where it is computed again.
        assert len(flex_standin.CALLS) in (3, 6) and made.call_count == 1


# ---- torch's own ----


@pytest.mark.compiler
@pytest.mark.parametrize(("softcap", "compiles"), [(0.0, False), (3.0, True)])
def test_flex_attention_of_torch_computes_the_same(softcap: float, compiles: bool) -> None:
    """Its matrix products have gradients on a CPU, where only its check of the device refuses them."""
    q, k, v, grad = [x.transpose(1, 2) for x in inputs(140, 4, 2, torch.float32, 16)]
    # Each block is compiled twice, in seconds: one kind of spans is enough there.
    kinds = ("by both",) if compiles else ("window in documents", "by both", "none")
    blocks = [
        BlockInputs(q, k, v, False, None, 0.3, softcap, None, True, spans_of(140)[name]) for name in kinds
    ]
    mask = torch.zeros(1, 1, 1, 140).masked_fill(torch.arange(140) == 2, -torch.inf)
    blocks += [
        BlockInputs(q, k, v, True, None, 0.3, softcap),
        BlockInputs(q, k, v, False, mask, 0.3, softcap),
    ]

    def of_torch(variant: tuple[Any, ...]) -> Callable[..., Any]:
        function = flex.uncompiled()
        return (
            torch.compile(function, backend="eager", dynamic=True, fullgraph=True) if compiles else function
        )

    for block in blocks:
        found = []
        for make in (of_torch, lambda variant: flex_standin.attend):
            with (
                mock.patch.object(flex, "_compiled", make),
                # Dynamo traces a function, not a Mock.
                mock.patch("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None),
            ):
                out, lse = flex.Flex().forward(block)
                found.append((out, lse, *flex.Flex().backward(block, grad, out, lse)))
                graph = flex.Flex().kept(block)
                assert (graph is None) == (block.mask is not None)
                if graph is not None:
                    found[-1] += (graph.out, graph.lse, *graph.gradients(grad, grad[..., 0]))
        for one, other in zip(*found, strict=True):
            assert torch.allclose(one, other, atol=2e-5)


@pytest.mark.compiler
def test_calls_of_one_variant_share_a_graph() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph

    made: dict[Any, Any] = {}

    def compiled(variant: tuple[Any, ...]) -> Any:
        if variant not in made:
            made[variant] = torch.compile(flex.uncompiled(), backend=backend, dynamic=True, fullgraph=True)
        return made[variant]

    with mock.patch.object(flex, "_compiled", compiled), mock.patch.object(block_mask, "SIZE", 8):
        for total, softcap in itertools.product((83, 130, 99, 61), (0.0, 2.0, 3.0)):
            q, k = torch.zeros(3, 4, total, 16), torch.zeros(3, 2, total, 16)
            for left in (1, 20, 47):
                spans = Spans.window(total, left, 0)
                flex.Flex().forward(BlockInputs(q, k, k, False, None, 1.0, softcap, spans=spans))
    assert len(made) == 2 and len(graphs) <= 4, len(graphs)
    assert flex.uncompiled().__code__ is not flex.uncompiled().__code__


# ---- the choice ----


def check_choice(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.even(40, group)
    window, prefix = Spans.window(40, 5, 0), Spans.causal(40) & (Spans.window(40, 5, 0) | Spans.prefix(40, 2))
    holes = Spans.padding(torch.arange(40)[None] % 2)
    assert holes.ends.size(3) > 2 * flex.MOST_INTERVALS
    x = torch.randn(1, layout.index().numel(), 2, 16).bfloat16()

    def used(shortest: int = 0, both: bool = False, **keywords: Any) -> tuple[bool, bool]:
        """Return whether flash_attn was called, and flex with spans."""
        flash_attn_standin.CALLS.clear()
        with standins() if both else nullcontext(), flex_standin.installed(shortest):
            spar.attention(x, x, x, layout, **keywords)
        return bool(flash_attn_standin.CALLS), any(has_spans for *_, has_spans in flex_standin.CALLS)

    assert used(mask=window) == used(window=(5, 0)) == used(mask=prefix) == (False, True)
    assert used(window=(5, 0), softcap=2.0, sinks=torch.zeros(2)) == (False, True)
    # Windows in long strips are flash_attn's, all other spans are not.
    assert used(both=True, mask=window) == (True, False)
    assert used(both=True, mask=prefix) == (False, True)
    # Too few queries to compile for, unless it is named; too many intervals; what is added to scores.
    assert used(1024, mask=window) == (False, False)
    assert used(1024, mask=window, kernel="flex") == (False, True)
    assert used(mask=holes) == used(mask=holes, kernel="flex") == (False, False)
    assert used(window=(5, 0), bias=lambda b, h, q, k: 0.1 * (k - q)) == (False, False)
    assert used(window=(5, 0), mask=torch.ones(40, 40, dtype=torch.bool)) == (False, False)
    assert used(window=(5, 0), kernel="blockwise") == used(causal=True) == (False, False)


@pytest.mark.parametrize("world", [1, 2])
def test_spans_choose_flex(ranks: Ranks, world: int) -> None:
    ranks(world, check_choice)


def test_reason_against_flex() -> None:
    refuses, needs = flex.Flex().refuses, Needs(spans=True)
    q = torch.zeros(1, 1, 1, 16, device="meta")
    assert "no gradients on a CPU" in refuses(torch.zeros(1, 1, 1, 16), q, needs)
    assert "the tensors are torch.float64" in refuses(q.double(), q.double(), needs)
    assert "windows" in refuses(q, q, Needs(window=True))
    assert "widths are 16 and 8, not at least 16" in refuses(q, q[..., :8], needs)
    with mock.patch.object(torch, "__version__", "2.6.0"):
        wide = torch.zeros(1, 1, 1, 48, device="meta")
        assert "torch 2.6.0 computes widths that are powers of 2, not 48 and 48" in refuses(wide, wide, needs)
    with mock.patch("torch.compiler.is_compiling", lambda: True):
        assert refuses(q, q, needs) == "it cannot be inside compiled code"


def test_failing_compiler_is_a_reason() -> None:
    q = torch.zeros(1, 1, 1, 16, device="meta")
    flex._why_not_compiled.cache_clear()
    with mock.patch("torch.compile", side_effect=RuntimeError("Python.h is missing\nmore")) as compiler:
        for _ in range(2):
            why = flex.Flex().refuses(q, q, Needs(spans=True))
            assert why == "torch.compile fails on meta: RuntimeError: Python.h is missing"
        assert compiler.call_count == 1
    flex._why_not_compiled.cache_clear()


@pytest.mark.parametrize("name", ["flash", "blockwise"])
def test_other_kernels_refuse_spans(name: str) -> None:
    from spar._attention.kernels import reason_against

    q = torch.zeros(1, 1, 1, 16)
    assert reason_against(name, q, q, Needs(spans=True)) == "it takes masks instead of spans"
