# SPDX-License-Identifier: Apache-2.0
"""Functions that stand for others while a view runs, and attributes that are replaced meanwhile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from .functions import name_of
from .part import has_part
from .view import View, current_view, without_view

_ABSENT = object()


def standing_for(own: Any, function: Callable[..., Any]) -> Any:
    """Return what calls function(view, own, ...) where a view runs, and else another's own function."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        view = current_view()
        return own(*args, **kwargs) if view is None else function(view, own, *args, **kwargs)

    return call


def in_views(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Make a function what returns, of another's own, one that calls this: see `standing_for`."""
    return functools.lru_cache(maxsize=256)(lambda own: standing_for(own, function))


class NoParts(TorchFunctionMode):
    """Raises where a function reads a part; name: of who does it then, None: of the function."""

    def __init__(self, view: View, name: str | None, problem: str, advice: str) -> None:
        super().__init__()
        self.view, self.name, self.error = view, name, (problem, advice)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_part(args, kwargs):
            raise self.view.error(self.name or name_of(func), *self.error)
        return func(*args, **(kwargs or {}))


def computing(
    view: View, name: str, tensors: Iterable[Tensor], work: tuple[int, int]
) -> contextlib.AbstractContextManager[None]:
    """Leave a view for what computes on parts; check what it reads, and count its multiply-adds.

    name: of the function, for messages. work: as of `Plan`.
    """
    for x in tensors:
        view.check_stale(name, x)
    count(view, work)
    return without_view()


def count(view: View, work: tuple[int, int]) -> None:
    """Add multiply-adds on this rank and in the whole to a view's report, if it counts them."""
    if view.recording:
        view.report.add(work, view.blocks > 0)


@contextlib.contextmanager
def replaced(*values: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes, each of an owner, until this is left."""
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in values]
    try:
        for each in values:
            setattr(*each)
        yield
    finally:
        for owner, name, own in reversed(before):
            if own is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
