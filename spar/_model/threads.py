# SPDX-License-Identifier: Apache-2.0
"""Threads that a model starts: a view is one of its thread alone, so that others would compute on parts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .stand_ins import NoParts
from .view import current_view, without_view


def _beside(function: Callable[..., Any]) -> Callable[..., Any]:
    view, problem = current_view(), "gets a sharded tensor in a thread that the model started"
    if view is None:
        return function

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with NoParts(view, None, problem, "call it in the thread that runs the model"):
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
