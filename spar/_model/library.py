# SPDX-License-Identifier: Apache-2.0
"""What a view is told of libraries, whose names it does not know: `integrations` makes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import nn

# run(view, module, own, args, kwargs), where own is the module's own forward
RunModule = Callable[[Any, nn.Module, Callable[..., Any], Any, Any], Any]


def _runs_as_any_code(module: nn.Module) -> RunModule | None:
    return None


def _keeps_nothing(*_: Any) -> None: ...


class Library(NamedTuple):
    """Functions for views of a library's models.

    Attributes:
        around: what is entered while any view runs, also in backward for a checkpoint; the same of all views.
        run_of: returns what runs a module on parts in place of its forward; None if that runs as any code.
        follow: called with a view, and a forward's keyword arguments and output.
    """

    around: Callable[[], AbstractContextManager[None]] = nullcontext
    run_of: Callable[[nn.Module], RunModule | None] = _runs_as_any_code
    follow: Callable[..., None] = _keeps_nothing


NO_LIBRARY = Library()
