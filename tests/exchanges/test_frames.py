# SPDX-License-Identifier: Apache-2.0
"""How far a call travels: the Python functions of spar that it enters, and how often it crosses into C."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks

import spar
from spar import _C

ROOT = str(Path(spar.__file__).parent)
MOST = {  # functions entered, crossings into C
    "first": (10, 2),
    "repeated": (5, 1),
    "recorded": (14, 2),
    "recorded, repeated": (7, 1),
    "backward": (6, 1),
    "ring attention": (60, 2),
    "its backward": (70, 4),
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
            crossings += owner is _C or type(owner).__module__ == _C.__name__

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


def check_calls(rank: int, world: int, group: dist.ProcessGroup) -> None:
    x = torch.zeros(1, 3, 2 * world, 5)
    learned = x.clone().requires_grad_()
    layout = spar.SequenceLayout.zigzag(8 * world, group)
    q = torch.zeros(1, 8, 4, 8, requires_grad=True)

    def attend() -> torch.Tensor:
        return spar.attention(q, q, q, layout, causal=True, method="ring")

    def measured(name: str, call: Callable[[], Any]) -> Any:
        counts, result, names = count(call)
        assert fits(counts, name), (name, counts, names)
        return result

    spar.all_to_all(torch.zeros(1, 2, world, 2), group, 2, 1)  # what is imported or set up once
    attend().sum().backward()
    measured("first", lambda: spar.all_to_all(x, group, 2, 1))
    measured("repeated", lambda: spar.all_to_all(x, group, 2, 1))
    y = measured("recorded", lambda: spar.all_to_all(learned, group, 2, 1))
    ones = torch.ones_like(y)
    y.backward(ones)
    y = measured("recorded, repeated", lambda: spar.all_to_all(learned, group, 2, 1))
    measured("backward", lambda: y.backward(ones))
    y = measured("ring attention", attend)
    ones = torch.ones_like(y)
    measured("its backward", lambda: y.backward(ones))


@pytest.mark.one_transport
def test_calls_enter_few_functions_and_cross_into_c_once(ranks: Ranks) -> None:
    ranks(2, check_calls)
