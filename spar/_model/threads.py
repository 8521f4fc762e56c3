# SPDX-License-Identifier: Apache-2.0
"""Threads that a model starts: a view is one of its thread alone, so that others would compute on parts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.overrides import TorchFunctionMode

from .functions import name_of
from .part import has_part
from .view import View, current_view, without_view


class _Beside(TorchFunctionMode):
    """Refuses parts in a thread beside that of a view."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self.view = view

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_part(args, kwargs):
            problem = "gets a sharded tensor in a thread that the model started"
            raise self.view.error(name_of(func), problem, "call it in the thread that runs the model")
        return func(*args, **(kwargs or {}))


def _beside(function: Callable[..., Any]) -> Callable[..., Any]:
    view = current_view()
    if view is None:
        return function

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Beside(view):
            return function(*args, **kwargs)

    return run


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, the name and the value of each attribute that is replaced while a view runs."""
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    def started(thread: threading.Thread) -> None:
        if current_view() is not None:
            thread.run = _beside(thread.run)  # type: ignore[method-assign]
        start(thread)

    def submitted(
        pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        function = _beside(function)
        if current_view() is None:
            return submit(pool, function, *args, **kwargs)
        with without_view():  # its threads outlive the forward
            return submit(pool, function, *args, **kwargs)

    yield threading.Thread, "start", started
    yield ThreadPoolExecutor, "submit", submitted
