# SPDX-License-Identifier: Apache-2.0
"""The arguments of compiled code: while it runs, hollow tensors are in the place of parts."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from .hollow import Hollows, local_of
from .leaves import Refused
from .nested import sequence_of
from .part import shard_of
from .spans_mask import SpansMask

_hollows = Hollows()


class HollowArguments:
    """One call's arguments: `take` gives them to the code, and `restore` ends that."""

    def __init__(self) -> None:
        self._used: dict[int, Tensor] = {}  # by the parts that they stand for
        self._containers: list[Any] = []

    def take(self, value: Any) -> Any:
        """Return nested arguments with hollow tensors in the place of parts and of masks of spans.

        Lists, dicts and dataclasses are changed in place, innermost first: others may refer to them.
        """
        return _replaced(self._hollow, value, self._containers)

    def restore(self) -> None:
        """Put the parts back into what `take` changed in place."""
        for container in self._containers:
            _replaced(local_of, container, [])
        self._containers.clear()

    def release(self) -> bool:
        """Give hollow tensors back, and return whether the code kept one, where its part is put then.

        Raises:
            KeptElsewhere: it keeps one where nobody can replace it.
        """
        kept = False
        for key in [*self._used]:
            if _references(self._used, key) > _ALONE:
                gc.collect()
            if _references(self._used, key) > _ALONE:
                kept = True
                _replace_everywhere(self._used[key], local_of(self._used[key]), self._used)
                if _references(self._used, key) > _ALONE:
                    raise KeptElsewhere
            else:
                _hollows.give_back(self._used.pop(key))
        return kept

    def _hollow(self, x: Tensor) -> Tensor:
        if shard_of(x) is None and not isinstance(x, SpansMask):
            return x
        if x.is_neg() or (x.is_complex() and x.is_conj()):
            raise Refused("an argument is a conjugate view, or a negative one")
        if id(x) not in self._used:
            self._used[id(x)] = _hollows.take(x)
        return self._used[id(x)]


class KeptElsewhere(Exception):
    """Compiled code keeps a hollow tensor where nobody can replace it."""


def _replaced(function: Callable[[Tensor], Any], value: Any, containers: list[Any]) -> Any:
    """Return a nested value with function's result for each tensor, and list what was changed for that.

    Lists, dicts and dataclasses are changed in place, innermost first: others may refer to them.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        entries = [_replaced(function, entry, containers) for entry in value]
        is_same = all(now is entry for now, entry in zip(entries, value, strict=True))
        return value if is_same else sequence_of(value, entries)
    if isinstance(value, list):
        places: Any = range(len(value))
    elif isinstance(value, MutableMapping):
        places = [*value]
    elif is_dataclass(value) and not isinstance(value, type):
        for name in [field.name for field in fields(value) if hasattr(value, field.name)]:
            before = getattr(value, name)
            now = _replaced(function, before, containers)
            if now is not before:
                object.__setattr__(value, name, now)
        containers.append(value)
        return value
    else:
        return value
    for place in places:
        now = _replaced(function, value[place], containers)
        if now is not value[place]:
            value[place] = now
    containers.append(value)
    return value


def _references(used: dict[int, Any], key: int) -> int:
    return sys.getrefcount(used[key])


_ALONE = _references({0: object()}, 0)  # of what nobody else refers to


def _replace_everywhere(hollow: Tensor, x: Tensor, used: dict[int, Tensor]) -> None:
    """Put a part in the place of a hollow tensor in dicts but `used`, as of attributes, and in lists."""
    for holder in gc.get_referrers(hollow):
        if holder is used:
            continue
        if isinstance(holder, dict):
            for key in [key for key, value in holder.items() if value is hollow]:
                holder[key] = x
        elif isinstance(holder, list):
            holder[:] = [x if value is hollow else value for value in holder]
