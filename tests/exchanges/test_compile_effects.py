# SPDX-License-Identifier: Apache-2.0
"""Tracers keep each exchange, once and in the program's order, also where this rank does not use its output.

Rank 0 compiles functions that ignore what they exchange. Its peer runs the exchanges eagerly and needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.operations import DIRECT
from helpers.reference import assert_same, cells, rule
from test_compile import INDUCTOR

import spar
from spar import SequenceLayout
from spar._group.registry import group_of

pytestmark = [pytest.mark.one_transport, pytest.mark.compiler, pytest.mark.long]

Group = dist.ProcessGroup
Exchanges = Callable[[torch.Tensor, SequenceLayout], list[torch.Tensor]]
TOTAL = 10


def operations(x: torch.Tensor, layout: SequenceLayout) -> list[torch.Tensor]:
    """Call each operation, and two of equal shapes, which a tracer could swap without a mismatch."""
    group, sizes = layout.group, list(layout.sizes)
    found = []
    for direct in DIRECT.values():
        given = x.repeat(1, len(sizes), 1, 1) if direct.whole else x
        found += [direct(given, group, sizes), direct(given + 1, group, sizes)]
        found += direct([given, given * 2], group, sizes)
    found += spar.all_to_all([x, x * 2], group, 2, 1, layout=layout)
    found.append(layout.gather(x, 1, "up"))
    found += layout.gather([x, x - 1], 1, backward="sum")
    found.append(spar.gather_forward_split_backward(x, group, 1, sizes))
    found.append(spar.mean_loss(x.sum(), 3, group))
    return found


def attention(method: str) -> Exchanges:
    def attend(x: torch.Tensor, layout: SequenceLayout) -> list[torch.Tensor]:
        return [spar.attention(x, x + 1, x - 1, layout, causal=True, method=method) for _ in range(2)]

    return attend


EXCHANGES: dict[str, Exchanges] = {"operations": operations}
EXCHANGES |= {method: attention(method) for method in ("ulysses", "gather", "ring")}


def check_unused(rank: int, world: int, group: Group, name: str, backend: str) -> None:
    exchanges = EXCHANGES[name]

    def ignored(x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        exchanges(x, layout)
        return x * 2

    torch._dynamo.reset()
    layout = SequenceLayout.even(TOTAL, group)
    x = cells((1, rule(TOTAL, world)[rank], 4, 8), torch.float32, salt=rank) % 5 - 2  # sums are exact
    expected = exchanges(x, layout)
    compiled = torch.compile(ignored, fullgraph=True, backend=backend)
    for records in (False, True):
        leaf = x.clone().requires_grad_(records)
        if rank == 0:
            assert_same(compiled(leaf, layout), x * 2)
        else:
            for y, wanted in zip(exchanges(leaf, layout), expected, strict=True):
                assert_same(y.detach(), wanted)
    calls = spar.all_gather(torch.tensor([group_of(group).count()]), group)
    assert calls.tolist() == [calls[0].item()] * world


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("operations", "aot_eager"),  # the tracer of all backends, where inductor does not run
        *(pytest.param(name, "inductor", marks=INDUCTOR) for name in EXCHANGES),
    ],
)
def test_exchanges_with_unused_outputs_are_made(ranks: Ranks, name: str, backend: str) -> None:
    ranks(2, check_unused, name, backend, timeout=280)


def check_saved_exchanges(rank: int, world: int, group: Group, method: str) -> None:
    """A checkpoint in compiled code recomputes all but the exchanges, whose outputs its policy saves."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = op is torch.ops.spar.exchange.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def block(x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        y = spar.attention(x, x + 1, x - 1, layout, causal=True, method=method)
        heads = spar.all_to_all(y, group, 2, 1, layout=layout).sin()
        return y + spar.all_to_all(heads, group, 1, 2, scatter_layout=layout)

    def run(x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(block, x, layout, use_reentrant=False, context_fn=contexts)
        return x

    torch._dynamo.reset()
    layout = SequenceLayout.even(TOTAL, group)
    x = cells((1, rule(TOTAL, world)[rank], 4, 8), torch.float64, salt=rank) / 10
    gradients = []
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for function in (run, compiled if rank == 0 else run):
        leaf = x.clone().requires_grad_()
        function(leaf, layout).square().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("method", ["ulysses", "gather", "ring"])
def test_checkpoints_in_compiled_code_save_exchanges(ranks: Ranks, method: str) -> None:
    ranks(2, check_saved_exchanges, method, timeout=280)


def check_crossed_gradients(rank: int, world: int, group: Group, backend: str) -> None:
    """Each rank's loss uses another call of a compiled function: their gradients do not match."""

    def gather(x: torch.Tensor) -> torch.Tensor:
        return spar.all_gather(x * 2, group, 1)

    torch._dynamo.reset()
    for compiles in (True, rank == 0):
        run = torch.compile(gather, fullgraph=True, backend=backend) if compiles else gather
        for used in ([0, 1], [rank]):
            inputs = [torch.ones(1, 2, 4, requires_grad=True) for _ in range(2)]
            outputs = [run(x) for x in inputs]
            loss = sum(outputs[i].sum() for i in used)
            if len(used) == 2:
                loss.backward()
                assert all(torch.equal(x.grad, torch.full_like(x, 2.0 * world)) for x in inputs)
                continue
            with pytest.raises(spar.MismatchError, match=r"gradient of call (\d+)(.|\n)*of call (?!\1)\d+"):
                loss.backward()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_compiled_gradients_of_different_calls_do_not_match(ranks: Ranks, backend: str) -> None:
    ranks(2, check_crossed_gradients, backend, timeout=280)
