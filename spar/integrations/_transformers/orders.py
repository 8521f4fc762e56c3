# SPDX-License-Identifier: Apache-2.0
"""Sets of strings, which each process iterates over in another order.

Some models make a mask for each of the kinds of layers in a set. Ranks that share this work, or compare the
code that they run, need one order.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..._model.stand_ins import replaced

_LIBRARY, _MASKS = "transformers.", "transformers.masking_utils"
_owners: set[Any] = set()  # modules of transformers whose code makes sets


class Ordered(set[Any]):
    """A set whose iteration has the same order in each process."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=str))


def _ordered(*values: Any) -> set[Any]:
    """Stand for `set`; those of Dynamo iterate in the order of their values."""
    return set(*values) if is_dynamo_compiling() else Ordered(*values)


def order_sets(model: torch.nn.Module) -> None:
    """Let a model's modules hold ordered sets of strings, and note whose forwards make such."""
    for module in model.modules():
        kind: Any = type(module)
        if not kind.__module__.startswith(_LIBRARY):
            continue
        forward = inspect.unwrap(kind.forward)
        if "set" in getattr(getattr(forward, "__code__", None), "co_names", ()):
            _owners.add(sys.modules[forward.__module__])
        for name, value in vars(module).items():
            if type(value) is set and value and all(isinstance(entry, str) for entry in value):
                setattr(module, name, Ordered(value))


def restore_sets(model: torch.nn.Module) -> None:
    """Undo `order_sets`."""
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is Ordered:
                setattr(module, name, set(value))


@contextlib.contextmanager
def ordering(_: Any) -> Iterator[None]:
    """Let the sets that these modules make be ordered."""
    owners = {*_owners, sys.modules.get(_MASKS)} - {None}
    with replaced(*[(owner, "set", _ordered) for owner in owners]):
        yield
