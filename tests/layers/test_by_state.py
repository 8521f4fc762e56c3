# SPDX-License-Identifier: Apache-2.0
"""spar.by_state against one process: delta rules by matrices, state spaces by decays, documents and bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.traffic import sent
from test_by_heads import DOCUMENTS, LAYOUTS, TOTAL
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import spar
from spar import MismatchError, SequenceLayout
from spar._group.registry import group_of

# Exchanges over each transport are tested by other modules.
pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
HEADS, KEY, VALUE = 2, 3, 4


def delta_rule(v: Tensor, k: Tensor, q: Tensor, gate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A gated delta rule, token by token: v [B, S, H, V], k and q [B, S, H, K], gate [B, S, H]."""
    k, outputs = torch.nn.functional.normalize(k, dim=-1), []
    for i in range(v.size(1)):
        state = state * torch.sigmoid(gate[:, i])[..., None, None]
        seen = (k[:, i, :, None] @ state)[:, :, 0]
        state = state + k[:, i, :, :, None] * (v[:, i] - seen)[:, :, None]
        outputs.append((q[:, i, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, 1), state


def transition_of_delta_rule(v: Tensor, k: Tensor, q: Tensor, gate: Tensor) -> Tensor:
    zeros = v.new_zeros(*v.shape[:3], k.size(3))
    identity = torch.eye(k.size(3), dtype=v.dtype).expand(v.size(0), v.size(2), -1, -1)
    return delta_rule(zeros, k, q, gate, identity)[1]


def decaying(v: Tensor, k: Tensor, q: Tensor, gate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A state space: the state decays, and values are added."""
    outputs = []
    for i in range(v.size(1)):
        state = state * torch.sigmoid(gate[:, i])[..., None, None] + k[:, i, :, :, None] * v[:, i, :, None]
        outputs.append((q[:, i, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, 1), state


def decay_of(v: Tensor, k: Tensor, q: Tensor, gate: Tensor) -> Tensor:
    return torch.sigmoid(gate).prod(1)[..., None, None]


def correction(v: Tensor, k: Tensor, q: Tensor, gate: Tensor, state: Tensor) -> Tensor:
    factor = torch.sigmoid(gate).cumprod(1)[..., None]
    return torch.einsum("bshk,bhkv->bshv", q, state) * factor


WAYS: dict[str, dict[str, Any]] = {
    "delta rule": {"fn": delta_rule, "transition": transition_of_delta_rule},
    "delta rule by columns": {"fn": delta_rule, "values": 0},
    "decay": {"fn": decaying, "transition": decay_of, "decay": True},
    "corrected": {"fn": decaying, "transition": decay_of, "decay": True, "correct": correction},
}


def whole(fn: Callable[..., Any], tensors: list[Tensor], documents: list[int]) -> Tensor:
    zeros = torch.zeros(2, HEADS, KEY, VALUE, dtype=tensors[0].dtype)
    parts = [x.split(documents, 1) for x in tensors]
    return torch.cat([fn(*part, zeros)[0] for part in zip(*parts, strict=True) if part[0].size(1)], 1)


def check(rank: int, world: int, group: Group, way: str) -> None:
    generator = torch.Generator().manual_seed(7)
    for kind, make in LAYOUTS.items():
        layout = make(group)
        shapes = [(2, layout.total, HEADS, width) for width in (VALUE, KEY, KEY)]
        shapes.append((2, layout.total, HEADS))
        values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        leaves = [x.clone().requires_grad_() for x in values]
        expected = whole(WAYS[way]["fn"], leaves, DOCUMENTS if layout.is_packed else [layout.total])
        upper = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        gradients = torch.autograd.grad(expected, leaves, upper)
        own = layout.index()
        mine = [x[:, own].clone().requires_grad_() for x in values]
        run = partial(spar.by_state, layout=layout, state=(2, HEADS, KEY, VALUE), **WAYS[way])
        for function in (run, partial(checkpoint, run, use_reentrant=False)):
            before = group_of(group).count()
            y = function(tensors=mine)
            assert group_of(group).count() - before == int(world > 1)
            found = torch.autograd.grad(y, mine, upper[:, own])
            assert y.is_contiguous()
            torch.testing.assert_close(y, expected[:, own])
            for x, e in zip(found, gradients, strict=True):
                assert torch.allclose(x, e[:, own]), kind


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_by_state_matches_one_process(ranks: Ranks, world: int, way: str) -> None:
    ranks(world, check, way)


def check_without_tokens(rank: int, world: int, group: Group) -> None:
    """No state travels, and the tensors come from exchanges, which the last rank, too, makes in backward."""
    layout = SequenceLayout.even(world - 1, group).with_documents([1] * (world - 1))
    shapes = [(2, layout.total, HEADS, width) for width in (VALUE, KEY, KEY)] + [(2, layout.total, HEADS)]
    leaves = [torch.ones(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    mine = [layout.shard(x, 1, None) for x in leaves]
    y = spar.by_state(tensors=mine, layout=layout, state=(2, HEADS, KEY, VALUE), **WAYS["delta rule"])
    expected = whole(delta_rule, leaves, [1] * layout.total)
    torch.testing.assert_close(layout.gather(y, 1, None), expected)
    found = torch.autograd.grad(y.sum(), leaves)
    for x, e in zip(found, torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(x, e)


@pytest.mark.parametrize("world", [2, 3])
def test_rank_without_tokens_exchanges_gradients(ranks: Ranks, world: int) -> None:
    ranks(world, check_without_tokens)


def check_errors(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.even(4 * world, group)
    x = torch.zeros(1, 4, 2, 3)

    def fn(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return x, state

    given: dict[str, Any] = {
        "fn": fn,
        "tensors": [x],
        "layout": layout,
        "state": (1, 2, 3, 3),
        "transition": lambda x: torch.zeros(1, 2, 3, 3),
    }
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, r"tensors is an empty list", {"tensors": []}),
        (TypeError, r"tensors is a tensor; expected a list of tensors", {"tensors": x}),
        (ValueError, r"like is 1; expected the index", {"like": 1}),
        (ValueError, r"state is \[3\]; expected a shape", {"state": (3,)}),
        (ValueError, r"transition is None; expected one of transition and values", {"transition": None}),
        (ValueError, r"transition is passed besides values; expected one of", {"values": 0}),
        (ValueError, r"values is 1; expected the index", {"transition": None, "values": 1}),
        (ValueError, r"values is 0; expected None: fn", {"transition": None, "values": 0, "decay": True}),
        (
            ValueError,
            r"tensors\[0\] is of shape \[1, 4, 2, 3\]; expected \[1, 4, 2, 5\], as state",
            {"transition": None, "values": 0, "state": (1, 2, 3, 5)},
        ),
        (ValueError, r"the result of fn is a Tensor; expected \(output, state\)", {"fn": lambda x, s: x}),
        (ValueError, r"the output of fn is of shape", {"fn": lambda x, s: (x[:, :1], s)}),
        (ValueError, r"the state of fn is of shape \[1\]", {"fn": lambda x, s: (x, torch.zeros(1))}),
        (ValueError, r"input_ is of size 5 in dim 1; expected 4", {"tensors": [torch.zeros(1, 5, 2, 3)]}),
    ]
    for kind, message, arguments in cases:
        # The last rank calls fn once it has the states of the others, which raise before.
        with pytest.raises((kind, MismatchError), match=message):
            spar.by_state(**{**given, **arguments})
    with pytest.raises(MismatchError):
        spar.by_state(**{**given, "decay": rank == 0})
    # Only the rank between two others needs a transition.
    if world == 3:
        wrong = {**given, "transition": lambda x: x[:, :, :1, 0]}
        expected = ValueError if rank == 1 else MismatchError
        with pytest.raises(expected, match=r"the result of transition is of shape"):
            spar.by_state(**wrong)


def check_late_failure(rank: int, world: int, group: Group) -> None:
    """The last rank fails once it has the states of the others, which wait for it in backward."""
    layout = SequenceLayout.even(4 * world, group)
    x = torch.zeros(1, 4, 2, 3, requires_grad=True)

    def fn(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if rank == world - 1:
            raise KeyError("mine")
        return x, state + x.sum()

    with pytest.raises(KeyError if rank == world - 1 else MismatchError, match="mine"):
        y = spar.by_state(fn, [x], layout, (1, 2, 3, 3), lambda x: torch.ones(1, 2, 3, 1), decay=True)
        y.sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError if rank == 0 else MismatchError, match="tensors is an empty list"):
        spar.by_state(fn, [x] if rank else [], layout, (1, 2, 3, 3), lambda x: torch.ones(1, 2, 3, 3))
    assert spar.all_gather(torch.tensor([rank]), group).tolist() == list(range(world))


@pytest.mark.parametrize("world", [2, 3])
def test_failure_behind_the_exchange_of_states_is_reported(ranks: Ranks, world: int) -> None:
    ranks(world, check_late_failure, timeout=20)


@pytest.mark.parametrize("world", [2, 3])
def test_errors_of_by_state(ranks: Ranks, world: int) -> None:
    ranks(world, check_errors)


def check_bytes(rank: int, world: int, group: Group) -> None:
    """Only fragments that another one continues are gathered."""

    def sent_by(layout: SequenceLayout, **given: Any) -> int:
        tensors = [torch.zeros(2, layout.sizes[rank], HEADS, width) for width in (VALUE, KEY, KEY)]
        tensors.append(torch.zeros(2, layout.sizes[rank], HEADS))
        before = group_of(group).count(), sent()
        spar.by_state(tensors=tensors, layout=layout, state=(2, HEADS, KEY, VALUE), **given)
        assert group_of(group).count() - before[0] == int(min(layout.sizes) > 0)
        return sent() - before[1]

    one = 4 * (world - 1) * 2 * HEADS * KEY
    for way, width in (("delta rule", KEY), ("delta rule by columns", KEY), ("corrected", 1)):
        even, zigzag = SequenceLayout.even(TOTAL, group), SequenceLayout.zigzag(TOTAL, group)
        assert sent_by(even, **WAYS[way]) == int(rank < world - 1) * one * (width + VALUE)
        # Chunks P - 1 and P of 2P are neighbours on one rank, and the last chunk is on rank 0.
        assert sent_by(zigzag, **WAYS[way]) == [1, 2, 1][rank] * one * (width + VALUE)
        assert sent_by(SequenceLayout.packed([1] * 2, group), **WAYS[way]) == 0


def test_bytes_of_by_state(ranks: Ranks) -> None:
    ranks(3, check_bytes)


def running_sum(v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Sum values over tokens, [B, S, H, V]; a state [B, H, 1, V]."""
    output = v.cumsum(1) + state.transpose(1, 2)
    return output, output[:, -1, :, None]


def check_compiled(rank: int, world: int, group: Group, dynamic: bool) -> None:
    """Rank 0 compiles; lengths become symbolic."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    def run(v: Tensor, layout: SequenceLayout) -> Tensor:
        return spar.by_state(
            running_sum, [v], layout, (2, HEADS, 1, VALUE), lambda v: torch.ones(1, 1, 1, 1), decay=True
        )

    for make in (SequenceLayout.even, SequenceLayout.zigzag):
        torch._dynamo.reset()
        graphs.clear()
        compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend=backend)
        for total in (4 * world, 4 * world + 1, 6 * world + 3, 8 * world + 2):
            layout = make(total, group)
            whole = torch.randn(2, total, HEADS, VALUE, generator=torch.Generator().manual_seed(total))
            v = layout.shard(whole, 1, None).clone().requires_grad_()
            y = (compiled if rank == 0 else run)(v, layout)
            torch.testing.assert_close(y, layout.shard(whole.cumsum(1), 1, None))
            (gradient,) = torch.autograd.grad(y.sum(), v)
            index = layout.index()
            torch.testing.assert_close(gradient, (total - index.float())[None, :, None, None].expand_as(v))
        assert rank > 0 or len(graphs) <= (2 if dynamic else 4)


@pytest.mark.compiler
@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_by_state(ranks: Ranks, dynamic: bool) -> None:
    ranks(3, check_compiled, dynamic, timeout=200)
