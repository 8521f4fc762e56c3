# SPDX-License-Identifier: Apache-2.0
"""Ranks that pass different masks, spans, windows, caps or sinks to spar.attention: all raise, and go on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.processes import finish, start

import spar
from spar import SequenceLayout, Spans

Group = dist.ProcessGroup
TOTAL, HEADS = 12, 6
LOWER = torch.ones(TOTAL, TOTAL, dtype=torch.bool).tril()
DOCUMENTS = Spans.documents(torch.arange(TOTAL) // 5)


def slope(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return 0.1 * (k - q)


# The arguments of the last rank, those of the others, and what the error names.
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "window": ({"window": (3, 0)}, {"window": (4, 0)}, "window"),
    "a side of a window": ({"window": (3, 0)}, {"window": (3, None)}, "window"),
    "whether there is a window": ({"window": (TOTAL, TOTAL)}, {}, "window"),
    "causal": ({"causal": True}, {}, "causal"),
    "causal beside a window": ({"window": (3, 0), "causal": True}, {"window": (3, 0)}, "causal"),
    "spans": ({"mask": Spans.causal(TOTAL)}, {"mask": DOCUMENTS}, "hash of the spans"),
    "whether there are spans": ({"mask": Spans.window(TOTAL, None, None)}, {}, "spans"),
    "spans or a mask": ({"mask": Spans.causal(TOTAL)}, {"mask": LOWER}, "mask of torch.bool"),
    "spans or causal": ({"mask": Spans.causal(TOTAL)}, {"causal": True}, "causal"),
    "spans and causal": ({"mask": DOCUMENTS, "causal": True}, {"mask": DOCUMENTS}, "causal"),
    "softcap": ({"softcap": 5.0}, {"softcap": 5.5}, "softcap"),
    "whether there is a softcap": ({"softcap": 5.0}, {}, "softcap"),
    "whether there are sinks": ({"sinks": torch.zeros(HEADS)}, {}, "sinks of torch.float32"),
    "dtype of sinks": (
        {"sinks": torch.zeros(HEADS)},
        {"sinks": torch.zeros(HEADS, dtype=torch.float64)},
        "sinks of",
    ),
    "whether there is a bias": ({"bias": slope}, {}, "a bias"),
    "values of a mask": ({"mask": LOWER}, {"mask": LOWER.flip(0)}, "hash of the mask"),
    "values of a key mask": ({"mask": LOWER[:2]}, {"mask": LOWER[3:5]}, "hash of the mask"),
    "values of an added mask": ({"mask": LOWER.float()}, {"mask": -LOWER.float()}, "hash of the mask"),
}


def check_different(rank: int, world: int, group: Group, method: str) -> None:
    """Each difference raises on every rank, the first time and repeated; equal calls then succeed."""
    layout, begin = SequenceLayout.even(TOTAL, group), time.monotonic()
    for name, (last, others, text) in DIFFERENT.items():
        for records in (False, True):
            x = torch.zeros(2, layout.sizes[rank], HEADS, 8, requires_grad=records)
            with pytest.raises(spar.MismatchError, match="calls differ") as caught:
                spar.attention(x, x, x, layout, method=method, **(last if rank == world - 1 else others))
            assert text in str(caught.value), (name, caught.value)
        for options in (last, others):
            y = spar.attention(x, x, x, layout, method=method, **options)
            y.sum().backward()  # type: ignore[no-untyped-call]
    assert spar.all_gather(torch.tensor([rank]), group).tolist() == list(range(world))
    assert time.monotonic() - begin < 20, "no rank waited for its timeout"


@pytest.mark.parametrize("method", ["ulysses", "gather", "ring"])
@pytest.mark.parametrize("world", [2, 3])
def test_arguments_that_differ_are_a_mismatch(ranks: Ranks, world: int, method: str) -> None:
    ranks(world, check_different, method, timeout=60)


def check_gradient_of_sinks(rank: int, world: int, group: Group, method: str) -> None:
    """Sinks that learn on one rank alone: its backward would make exchanges that its peers do not."""
    layout = SequenceLayout.even(TOTAL, group)
    x, sinks = torch.zeros(2, layout.sizes[rank], HEADS, 8), torch.zeros(HEADS, requires_grad=rank == 1)
    with pytest.raises(spar.MismatchError, match="gradient"):
        spar.attention(x, x, x, layout, method=method, sinks=sinks)
    # They learn alone: q, k and v need no gradient.
    sinks.requires_grad_()
    y = spar.attention(x, x, x, layout, method=method, sinks=sinks)
    (gradient,) = torch.autograd.grad(y.sum(), sinks)
    assert torch.equal(gradient, torch.zeros(HEADS)), "all values are 0"


@pytest.mark.one_transport
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_sinks_that_learn_on_one_rank_are_a_mismatch(ranks: Ranks, method: str) -> None:
    ranks(3, check_gradient_of_sinks, method)


def compare_sinks(rank: int, folder: Path) -> None:
    layout = SequenceLayout.even(TOTAL, dist.group.WORLD)
    x = torch.zeros(2, layout.sizes[rank], HEADS, 8)
    for method in ("ulysses", "gather", "ring"):
        with pytest.raises(spar.MismatchError, match="hash of the sinks"):
            spar.attention(x, x, x, layout, method=method, sinks=torch.full((HEADS,), float(rank)))
        spar.attention(x, x, x, layout, method=method, sinks=torch.ones(HEADS))


@pytest.mark.one_transport
def test_values_of_sinks_are_compared_on_request(tmp_path: Path) -> None:
    assert finish(start(compare_sinks, 2, tmp_path, SPAR_CHECK="1"), 60) == [0] * 2
