# SPDX-License-Identifier: Apache-2.0
"""Functions that a compiled block's graph has as one node, in place of what they stand for.

Dynamo runs such a function on whole shapes, for the shapes and the dtypes of its results alone. The trace
under the view calls what computes on parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])
_IN_VIEW = "_spar_in_view"
_leaves: list[Any] = []


def leaf(in_view: Callable[..., Any]) -> Callable[[_F], _F]:
    """Mark a function as a node of graphs. in_view: called as in_view(view, ...) in its place."""

    def mark(function: _F) -> _F:
        setattr(function, _IN_VIEW, in_view)
        _leaves.append(function)
        return function

    return mark


def in_view_of(function: Any) -> Callable[..., Any] | None:
    """Return what computes on parts in the place of a node's function; None for any other function."""
    found: Callable[..., Any] | None = getattr(function, _IN_VIEW, None)
    return found


def allow_in_graph() -> None:
    """Let Dynamo take the functions as they are. Imports Dynamo."""
    for function in _leaves:
        torch.compiler.allow_in_graph(function)
