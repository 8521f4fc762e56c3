# SPDX-License-Identifier: Apache-2.0
"""What a view remembers of calls: plans without tensors, so that no activation outlives its forward."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from conftest import Ranks
from helpers import view_cases
from helpers.view_cases import PAIRS, Inputs, compare, functions
from helpers.view_programs import program
from torch import Tensor

from spar._model.call import FunctionCall
from spar._model.part import Parts
from spar._model.view import View

pytestmark = pytest.mark.one_transport

_SKIPPED = (type, types.ModuleType, types.BuiltinFunctionType, Parts, dist.ProcessGroup)


def reached(*roots: Any) -> Iterator[Any]:
    """Yield all objects that others refer to, without modules, classes and the globals of functions."""
    seen, left = set(), list(roots)
    while left:
        x = left.pop()
        if id(x) in seen or isinstance(x, _SKIPPED):
            continue
        seen.add(id(x))
        yield x
        if isinstance(x, types.FunctionType):
            left += [x.__closure__, x.__defaults__, x.__kwdefaults__]
        else:
            left += gc.get_referents(x)


def remembered(view: View) -> list[Any]:
    """Return what a view keeps from one forward to the next: plans by keys, and what runs in C."""
    known = [x for x in gc.get_referents(view) if isinstance(x, (dict, set)) and x is not vars(view)]
    return [view._steps, *known]


def check_plans(rank: int, world: int, group: dist.ProcessGroup) -> None:
    # The globals of a hook in an expression hold its result, whose graph holds the hook: a cycle in torch.
    cases = {name: function for name, function in functions().items() if "register_hook" not in name}
    cases |= {f"program {seed}": program(seed, 14) for seed in range(900, 940)}
    views: list[View] = []
    used: list[weakref.ref[Any]] = []
    make = FunctionCall.__init__

    def viewed(*args: Any, **kwargs: Any) -> View:
        views.append(View(*args, **kwargs))
        return views[-1]

    @functools.wraps(make)
    def noted(call: FunctionCall, *args: Any, **kwargs: Any) -> None:
        make(call, *args, **kwargs)
        used.extend(map(weakref.ref, [call, *call.tensors]))

    with mock.patch.object(view_cases, "View", viewed), mock.patch.object(FunctionCall, "__init__", noted):
        for i, (name, function) in enumerate(cases.items()):
            try:
                compare(group, function, PAIRS[(i + world) % len(PAIRS)], Inputs(3))
            except RuntimeError as error:
                assert "changed in place through another one" in str(error), name
            found = {type(x).__name__ for x in reached(*remembered(views[-1])) if _is_kept(x)}
            assert not found, f"{name}: a plan holds {found}; copy what it needs from the call first"
    gc.collect()
    assert used and views[-1]._steps
    assert not [x for ref in used if (x := ref()) is not None]


def _is_kept(x: Any) -> bool:
    return isinstance(x, (Tensor, FunctionCall))


def test_plans_hold_no_tensors(ranks: Ranks) -> None:
    ranks(2, check_plans)
