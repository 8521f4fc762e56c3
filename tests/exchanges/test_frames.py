# SPDX-License-Identifier: Apache-2.0
"""How far a call travels: the Python functions of spar that it enters, and how often it crosses into C."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.whole_attention import METHODS

import spar
from spar import _C

ROOT = str(Path(spar.__file__).parent)
MOST = {  # functions entered, crossings into C
    "first": (9, 3),
    "repeated": (2, 1),
    "recorded": (13, 3),
    "recorded, repeated": (3, 2),
    "backward": (4, 1),
    "attention by ulysses": (20, 2),
    "attention by ulysses, recorded": (28, 2),
    "attention by ulysses, backward": (8, 2),
    "attention by gather": (41, 1),
    "attention by gather, recorded": (45, 1),
    "attention by gather, backward": (62, 1),
    "attention by ring": (39, 1),
    "attention by ring, recorded": (42, 1),
    "attention by ring, backward": (75, 2),
    "attention in a view": (50, 2),
}


def count(call: Callable[[], Any]) -> tuple[tuple[int, int], Any, list[str]]:
    """Return what a call entered and crossed, its result, and the names of the functions."""
    entered: list[str] = []
    crossings = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal crossings
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            entered.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)
        elif event == "c_call":
            owner = getattr(argument, "__self__", None)
            crossings += owner is _C or any(kind.__module__ == _C.__name__ for kind in type(owner).__mro__)

    made = _C.Exchange
    try:
        _C.Exchange = _counted(made, entered)  # type: ignore[misc,assignment]
        sys.setprofile(profile)
        result = call()
    finally:
        sys.setprofile(None)
        _C.Exchange = made  # type: ignore[misc]
    constructed = entered.count("Exchange of C")
    names = [name for name in entered if name != "Exchange of C"]
    return (len(names), crossings + constructed), result, names


def _counted(kind: Callable[..., Any], entered: list[str]) -> Callable[..., Any]:
    """Return what makes an object of C, and notes that: the profile shows no calls of types."""

    def make(*arguments: Any) -> Any:
        entered.append("Exchange of C")
        return kind(*arguments)

    return make


def fits(counts: tuple[int, int], name: str) -> bool:
    return all(count <= most for count, most in zip(counts, MOST[name], strict=True))


def measured(name: str, call: Callable[[], Any]) -> Any:
    counts, result, names = count(call)
    assert fits(counts, name), (name, counts, names)
    return result


def check_calls(rank: int, world: int, group: dist.ProcessGroup) -> None:
    x = torch.zeros(1, 3, 2 * world, 5)
    learned = x.clone().requires_grad_()
    spar.all_to_all(torch.zeros(1, 2, world, 2), group, 2, 1)  # what is imported or set up once
    measured("first", lambda: spar.all_to_all(x, group, 2, 1))
    measured("repeated", lambda: spar.all_to_all(x, group, 2, 1))
    y = measured("recorded", lambda: spar.all_to_all(learned, group, 2, 1))
    ones = torch.ones_like(y)
    y.backward(ones)
    y = measured("recorded, repeated", lambda: spar.all_to_all(learned, group, 2, 1))
    measured("backward", lambda: y.backward(ones))


def check_attention(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Count what a call of an attention that was decided before enters."""
    layout = spar.SequenceLayout.zigzag(8 * world, group)
    q, learned = torch.zeros(1, 8, 4, 8), torch.zeros(1, 8, 4, 8, requires_grad=True)
    for method in METHODS:
        attend = functools.partial(spar.attention, layout=layout, causal=True, method=method)
        for x in (q, learned):
            attend(x, x, x).sum().backward() if x.requires_grad else attend(x, x, x)
        name = f"attention by {method}"
        measured(name, functools.partial(attend, q, q, q))
        y = measured(f"{name}, recorded", functools.partial(attend, learned, learned, learned))
        measured(f"{name}, backward", functools.partial(y.backward, torch.ones_like(y)))


class Layers(torch.nn.Module):
    """A model of which each block attends so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.blocks = torch.nn.ModuleList([torch.nn.Identity()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.blocks[0](x).unflatten(2, (4, 8)).transpose(1, 2)
        for _ in range(self.times):
            q = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        return q.transpose(1, 2).flatten(2)


def check_view(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Count what one more attention of a model in a view enters."""
    x, counts = torch.zeros(1, 8 * world, 32, requires_grad=True), []
    for times in (1, 2):
        model = Layers(times)
        spar.parallelize(model, group)
        for _ in range(2):
            model(x)
        entered, _, names = count(functools.partial(model, x))
        counts.append(entered)
    more = counts[1][0] - counts[0][0], counts[1][1] - counts[0][1]
    assert fits(more, "attention in a view"), (more, names)


@pytest.mark.one_transport
def test_calls_enter_few_functions_and_cross_into_c_once(ranks: Ranks) -> None:
    ranks(2, check_calls)


@pytest.mark.one_transport
def test_an_attention_that_was_decided_enters_few_functions(ranks: Ranks) -> None:
    ranks(2, check_attention)


@pytest.mark.one_transport
def test_an_attention_in_a_view_enters_few_functions(ranks: Ranks) -> None:
    ranks(2, check_view)
