# SPDX-License-Identifier: Apache-2.0
"""Tensors in nested values: lists, tuples, mappings and dataclasses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, cast

from torch import Tensor


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples, mappings and dataclasses, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(*value)
        elif isinstance(value, Mapping):
            found += tensors_in(*value.values())
        elif is_dataclass(value) and not isinstance(value, type):
            found += tensors_in(*[getattr(value, f.name, None) for f in fields(value)])
    return found


def changed(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a nested value with function's result for each tensor, called in the order of `tensors_in`.

    What holds no other tensors than before is the same object.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        entries = [changed(function, entry) for entry in value]
        is_same = all(now is entry for now, entry in zip(entries, value, strict=True))
        return value if is_same else sequence_of(value, entries)
    if isinstance(value, Mapping):
        items = {key: changed(function, entry) for key, entry in value.items()}
        return value if all(items[key] is entry for key, entry in value.items()) else _mapping(value, items)
    if is_dataclass(value) and not isinstance(value, type) and tensors_in(value):
        made: Any = copy(cast(Any, value))
        for f in fields(value):
            if hasattr(value, f.name):
                object.__setattr__(made, f.name, changed(function, getattr(value, f.name)))
        return made
    return value


def sequence_of(value: Any, entries: list[Any]) -> Any:
    """Return a list or tuple as a value is, with other entries."""
    kind = type(value)
    if isinstance(value, list):
        made = copy(value)
        made[:] = entries
        return made
    if kind is tuple or hasattr(kind, "n_sequence_fields"):  # one of torch.return_types
        return kind(entries)
    made = tuple.__new__(kind, entries)  # what a subclass is made of is its own affair
    for name, x in getattr(value, "__dict__", {}).items():
        setattr(made, name, x)
    return made


def _mapping(value: Any, entries: dict[Any, Any]) -> Any:
    """Return a mapping as a value is, with other entries, also among its attributes."""
    kind: Any = type(value)
    attributes = getattr(value, "__dict__", {})
    if kind is dict or not isinstance(value, MutableMapping):
        return kind(entries)
    if isinstance(value, defaultdict) or not isinstance(value, dict):
        made: Any = copy(value)
    elif attributes is value:
        made = kind.__new__(kind)
        made.__dict__ = made
    else:  # what a subclass is made of is its own affair
        made = kind.__new__(kind)
        now = {id(entry): entries[key] for key, entry in value.items()}
        for name, x in attributes.items():
            made.__dict__[name] = now.get(id(x), x)
    for key, entry in entries.items():
        made[key] = entry
    return made
