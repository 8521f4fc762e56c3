# SPDX-License-Identifier: Apache-2.0
"""spar.attention with windows and spans in compiled code: exact, and few graphs whatever the spans are."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.whole_attention import METHODS, inputs
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import spar
from spar import SequenceLayout
from spar._attention import tiles

pytestmark = [pytest.mark.one_transport, pytest.mark.compiler, pytest.mark.long]
Group = dist.ProcessGroup


def documents_of(total: int, seed: int) -> spar.Spans:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 4, (2, total), generator=generator).sort(1)[0]
    return spar.Spans.causal(total) & spar.Spans.documents(ids)


def saves_exchanges(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saves = op in (torch.ops.spar.exchange.default, torch.ops.spar.attend.default)
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def check_compiled(rank: int, world: int, group: Group, method: str, backend: str, kind: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, s: Tensor, layout: SequenceLayout, mask: Any) -> Tensor:
        keywords: dict[str, Any] = {"mask": mask} if mask is not None else {"window": (5, 0)}
        if kind == "capped":
            keywords["softcap"] = 3.0
        function = spar.attention
        if kind == "checkpoint":
            return checkpoint(
                lambda a: function(a, k, v, layout, causal=True, method=method, sinks=s, **keywords),
                q * 2,
                use_reentrant=False,
                context_fn=partial(create_selective_checkpoint_contexts, saves_exchanges),
            )
        return function(q * 2, k, v, layout, causal=True, method=method, sinks=s, **keywords)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for i, total in enumerate((24, 29, 29, 41, 50)):
        layout = (
            SequenceLayout.packed([3, total - 3], group)
            if kind == "packed"
            else SequenceLayout.zigzag(total, group)
        )
        whole = inputs(total, 4, 2, torch.float32)
        mask = None if kind in ("window", "packed") else documents_of(total, i)
        results = []
        for run in (attend, compiled):
            *leaves, upper = [x[:, layout.index()].requires_grad_() for x in whole]
            sinks = torch.arange(4.0, requires_grad=True)
            y = run(*leaves, sinks, layout, mask)
            results.append([y, *torch.autograd.grad(y, [*leaves, sinks], upper)])
        for eager, other in zip(*results, strict=True):
            torch.testing.assert_close(other, eager, rtol=1e-5, atol=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert graphs in (1, 2), graphs


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *((method, "window") for method in METHODS),
        ("ring", "documents"),
        ("gather", "packed"),
        ("ulysses", "capped"),
        ("ring", "checkpoint"),
    ],
)
def test_windows_and_spans_compile_twice(ranks: Ranks, method: str, kind: str) -> None:
    # all ranks compile, or none: spans are described otherwise in compiled code
    ranks(
        3 if (method, kind) == ("ring", "window") else 2,
        check_compiled,
        method,
        "aot_eager",
        kind,
        timeout=280,
    )


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_inductor_computes_spans(ranks: Ranks, method: str) -> None:
    ranks(2, check_compiled, method, "inductor", "documents", timeout=280)


def check_refusals(rank: int, world: int, group: Group) -> None:
    """What a graph cannot have is named, also where gather becomes a ring in compiled code; on one rank."""
    layout = SequenceLayout.even(8, group)
    if rank > 0:
        return
    x = torch.zeros(1, 4, 4, 8)
    wrong: list[dict[str, Any]] = [{"dropout_p": 0.1}, {"bias": lambda b, h, q, k: 0.1 * k}]
    for method, keywords in itertools.product(METHODS, wrong):
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend="eager")
        def run(x: Tensor) -> Tensor:
            return spar.attention(x, x, x, layout, window=(3, 0), method=method, **keywords)  # noqa: B023

        with pytest.raises(
            torch._dynamo.exc.Unsupported, match=f"{next(iter(keywords))} is .* in compiled code"
        ):
            run(x)


def test_what_compiled_code_cannot_have_is_named(ranks: Ranks) -> None:
    ranks(2, check_refusals, timeout=120)


def check_failing_plan(rank: int, world: int, group: Group) -> None:
    """A rank that fails while it finds the blocks reports it: its peers do not wait for the exchange."""
    layout = SequenceLayout.even(24, group)
    q, k, v = [x[:, layout.index()] for x in inputs(24, 4, 2, torch.float32)[:3]]

    def attend(q: Tensor, layout: SequenceLayout, mask: spar.Spans) -> Tensor:
        return spar.attention(q, k, v, layout, mask=mask, method="ring")

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    compiled(q, layout, documents_of(24, 0))
    failing = mock.patch.object(tiles, "_classified", side_effect=RuntimeError("mine"))
    expected = RuntimeError if rank == 1 else spar.MismatchError
    with failing if rank == 1 else contextlib.nullcontext(), pytest.raises(expected, match="mine"):
        compiled(q, layout, documents_of(24, 1))


def test_failing_plan_of_compiled_code_is_reported(ranks: Ranks) -> None:
    ranks(2, check_failing_plan, timeout=60)
