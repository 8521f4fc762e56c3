# SPDX-License-Identifier: Apache-2.0
"""The graph that flex keeps of a forward: computed once, for one backward, in the memory of what is saved."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import flex_standin
from helpers.whole_attention import METHODS, error_of, expected_of, inputs
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import spar
from spar import SequenceLayout, Spans
from spar._attention.kernels import block_mask, flex
from spar._exchange import observers

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
TOTAL = 40
# The oldest torch that reports hooks; without, forward is computed again.
KEEPS = observers._hooks_of_saved_tensors is not None
ONCE = 1 if KEEPS else 2


@contextmanager
def standin() -> Iterator[None]:
    with flex_standin.installed(), mock.patch.object(block_mask, "SIZE", 8):
        yield


def calls() -> int:
    """Return how often the kernel's forward was computed since the last time."""
    count = len(flex_standin.CALLS)
    flex_standin.CALLS.clear()
    return count


def leaves_of(layout: SequenceLayout) -> tuple[list[Tensor], Tensor]:
    """Return this rank's q, k and v, and the gradient of its output."""
    *leaves, upper = [x[:, layout.index()].clone() for x in inputs(TOTAL, 4, 2, torch.float32)]
    return [x.requires_grad_() for x in leaves], upper


# ---- how often ----


def check_once(rank: int, world: int, group: Group) -> None:
    layout, window = SequenceLayout.even(TOTAL, group), Spans.window(TOTAL, 9, 3)
    whole = inputs(TOTAL, 4, 2, torch.float64)
    expected = expected_of(whole, mask=window.dense())
    for method in METHODS:
        with standin():
            attend = partial(spar.attention, layout=layout, mask=window, method=method)
            found = error_of(attend, [x.float() for x in whole], expected, layout.index())
            # The ring has a block for each rank's keys, which are merged.
            blocks = world if method == "ring" else 1
            assert calls() == (ONCE if blocks == 1 else 2 * blocks), method
        assert found < 2e-5, (method, found)


@pytest.mark.parametrize("world", [1, 2])
def test_forward_of_an_only_block_is_computed_once(ranks: Ranks, world: int) -> None:
    ranks(world, check_once)


def gradients(layout: SequenceLayout, weight: float | None, **keywords: Any) -> list[Tensor]:
    """Return outputs and gradients, with `weight` times the log-sum-exp's."""
    leaves, upper = leaves_of(layout)
    sinks = [x for x in (keywords.get("sinks"),) if x is not None]
    outs = spar.attention(*leaves, layout, return_lse=weight is not None, **keywords)
    if weight is None:
        return [outs, *torch.autograd.grad(outs, [*leaves, *sinks], upper)]
    out, lse = outs
    uppers = upper, torch.full_like(lse, weight)
    return [out, lse, *torch.autograd.grad((out, lse), [*leaves, *sinks], uppers)]


def check_options(rank: int, world: int, group: Group) -> None:
    """Outputs, log-sum-exps and gradients are those of the kernel in matrix products."""
    layout = SequenceLayout.even(TOTAL, group)
    window, place = Spans.window(TOTAL, 9, 3), torch.arange(TOTAL)
    sinks = torch.linspace(-1.0, 1.0, 4, requires_grad=True)
    cases: list[tuple[dict[str, Any], int]] = [
        ({"mask": window, "softcap": 2.0}, ONCE),
        # Queries from 12 to 32 have no key.
        ({"mask": window & Spans.padding((place < 3) | (place > 35))}, ONCE),
        ({"causal": True}, ONCE),
        ({"causal": True, "softcap": 2.0}, ONCE),
        # A sink changes the output, which would be saved besides the block's.
        ({"mask": window, "sinks": sinks}, 2),
        # The first queries have no key: the block's output is copied into a longer one.
        ({"mask": window & Spans.padding(place > 14)}, 2),
        # A mask is as large as the scores.
        ({"mask": window.dense()}, 2),
    ]
    for (keywords, expected), weight in itertools.product(cases, (None, 0.0, 0.7)):
        of = partial(gradients, layout, weight, method="ulysses", **keywords)
        with standin():
            made = of(kernel="flex")
            assert calls() == expected, (keywords, weight)
        for one, other in zip(made, of(kernel="blockwise"), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_beside_softcaps_sinks_and_log_sum_exps(ranks: Ranks, world: int) -> None:
    ranks(world, check_options)


def check_other_shard(rank: int, world: int, group: Group) -> None:
    """A ring's only block, of another rank's keys: its graph would hold them until backward."""
    layout = SequenceLayout.even(TOTAL, group)
    ends = torch.tensor([[TOTAL // 2, TOTAL], [0, TOTAL // 2]]).repeat_interleave(TOTAL // 2, 0)
    spans = Spans(ends.to(torch.int32)[None, None])
    whole = inputs(TOTAL, 4, 2, torch.float64)
    with standin():
        attend = partial(spar.attention, layout=layout, mask=spans, method="ring")
        expected = expected_of(whole, mask=spans.dense())
        assert error_of(attend, [x.float() for x in whole], expected, layout.index()) < 2e-5
        assert calls() == 2
        # The first rank's own block.
        attend = partial(spar.attention, layout=layout, causal=True, method="ring", kernel="flex")
        expected = expected_of(whole, causal=True)
        assert error_of(attend, [x.float() for x in whole], expected, layout.index()) < 2e-5
        assert calls() == (4 if rank else ONCE)


def test_shards_of_other_ranks_are_not_kept(ranks: Ranks) -> None:
    ranks(2, check_other_shard)


# ---- backward, again and twice ----


def check_again(rank: int, world: int, group: Group) -> None:
    layout, window = SequenceLayout.even(TOTAL, group), Spans.window(TOTAL, 9, 3)
    for method, returns_lse in itertools.product(("ulysses", "gather"), (False, True)):
        leaves, upper = leaves_of(layout)
        with standin():
            outs = spar.attention(*leaves, layout, mask=window, method=method, return_lse=returns_lse)
            outs = outs if returns_lse else (outs,)
            backward = partial(torch.autograd.grad, outs, leaves, (upper, upper[..., 0])[: len(outs)])
            # An error of a second derivative costs no graph.
            with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
                backward(create_graph=True)
            results = [backward(retain_graph=True)]
            assert calls() == ONCE
            for _ in range(2):
                results.append(backward(retain_graph=True))
                assert calls() == 1
            results.append(backward())
            with pytest.raises(RuntimeError, match="a second time"):
                backward()
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_more_backwards_compute_it_again(ranks: Ranks, world: int) -> None:
    ranks(world, check_again)


def check_writes(rank: int, world: int, group: Group) -> None:
    layout, window = SequenceLayout.even(TOTAL, group), Spans.window(TOTAL, 9, 3)
    leaves, upper = leaves_of(layout)
    with standin():
        y = spar.attention(*leaves, layout, mask=window, method="gather")
        with torch.no_grad():
            leaves[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(upper)


@pytest.mark.parametrize("world", [1, 2])
def test_writes_into_queries_are_errors(ranks: Ranks, world: int) -> None:
    ranks(world, check_writes)


# ---- checkpoints and offload ----


def check_hooks(rank: int, world: int, group: Group) -> None:
    layout, window = SequenceLayout.even(TOTAL, group), Spans.window(TOTAL, 9, 3)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return spar.attention(q, k, v, layout, mask=window, method="ulysses").sin()

    def moved(*tensors: Tensor) -> Tensor:
        """Save copies, as torch's save_on_cpu does of what is on a GPU."""
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
            return attend(*tensors)

    runs: list[tuple[Callable[..., Tensor], int]] = [
        (attend, ONCE),
        (partial(checkpoint, attend, use_reentrant=True), 1 + ONCE),
        (partial(checkpoint, attend, use_reentrant=False), 3),
        (moved, 2),
    ]
    results = []
    for run, count in runs:
        leaves, upper = leaves_of(layout)
        with standin(), watched() as made:
            y = run(*leaves)
            # What hooks discard or move is not kept beside.
            if KEEPS or run is not attend:
                assert any(ref() is not None for ref in made) == (run is attend)
            y.backward(upper)
            results.append([y.detach(), *(x.grad for x in leaves)])
            assert calls() == count, run
            assert not any(ref() is not None for ref in made)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0.0, atol=0.0)


@contextmanager
def watched() -> Iterator[list[weakref.ref[Tensor]]]:
    """Return references to the outputs that the kernel made."""
    made: list[weakref.ref[Tensor]] = []

    def attend(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        outs = flex_standin.attend(*tensors, **options)
        made.extend(map(weakref.ref, outs))
        return outs

    with mock.patch.object(flex, "_compiled", lambda variant: attend):
        yield made


@pytest.mark.parametrize("world", [1, 2])
def test_hooks_of_saved_tensors_keep_nothing(ranks: Ranks, world: int) -> None:
    ranks(world, check_hooks)


# ---- memory ----


def node_of(y: Tensor) -> Any:
    """Return the attention's node in the graph of its output."""
    node: Any = y.grad_fn
    while node.name() != "SparAttentionBackward":
        ((node, _),) = node.next_functions
    return node


def check_memory(rank: int, world: int, group: Group) -> None:
    layout, window = SequenceLayout.even(TOTAL, group), Spans.window(TOTAL, 9, 3)
    for method in ("ulysses", "gather"):
        leaves, upper = leaves_of(layout)
        with standin(), watched() as made:
            y = spar.attention(*leaves, layout, mask=window, method=method)
            node = node_of(y)
            (graph,) = node.graphs
            saved = {x.untyped_storage().data_ptr() for x in node.saved_tensors if x is not None}
            assert {x.untyped_storage().data_ptr() for x in (*graph.leaves, graph.out, graph.lse)} <= saved
            del graph
            y.backward(upper)
            assert made and not any(ref() is not None for ref in made), "the output lives, its graph does not"
            # Without a backward they end with the output, of which nothing is a cycle.
            y = spar.attention(*leaves, layout, mask=window, method=method)
            assert any(ref() is not None for ref in made)
            del node, y
            assert not any(ref() is not None for ref in made)


@pytest.mark.skipif(not KEEPS, reason="this torch does not report hooks, and no graph is kept")
@pytest.mark.parametrize("world", [1, 2])
def test_graph_holds_what_is_saved_and_ends_with_backward(ranks: Ranks, world: int) -> None:
    ranks(world, check_memory)
