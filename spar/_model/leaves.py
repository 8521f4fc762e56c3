# SPDX-License-Identifier: Apache-2.0
"""Functions that the graph of compiled code has as one node, in place of what they stand for.

Dynamo runs such a function on whole shapes, for the shapes and the dtypes of its results alone. The trace
under the view calls what computes on parts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .._tracing import constant

_F = TypeVar("_F", bound=Callable[..., Any])
_IN_VIEW = "_spar_in_view"
_leaves: list[Any] = []


class Traces(threading.local):
    """What this thread compiles: a block, or a model, in which blocks begin."""

    is_active = has_blocks = False


traces = Traces()


@constant
def is_traced() -> bool:
    """Whether Dynamo traces code for a view: others run whole. It calls this while it traces."""
    return traces.is_active


@constant
def has_blocks() -> bool:
    """Whether Dynamo traces a model for a view, in which blocks begin."""
    return traces.is_active and traces.has_blocks


class Refused(Exception):
    """Code is not compiled, for a reason that is for the user to know."""


@constant
def refuse(reason: str) -> None:
    """Refuse the code that Dynamo traces."""
    raise Refused(reason)


def begin_block(number: int, /, **arguments: Any) -> None:
    """Stand in a graph for the hook in front of a block, in which its arguments are parts."""


def end_block(number: int) -> None:
    """Stand in a graph behind a block: what is whole outside is whole again."""


_leaves += (begin_block, end_block)


def begins_blocks(graph: torch.fx.GraphModule) -> bool:
    """Whether a block begins in a graph."""
    return any(node.target is begin_block for node in graph.graph.nodes)


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
