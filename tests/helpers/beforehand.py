"""What takes long to compile and many tests want: begun when they are, beside those that do not need it.

A test module names it in BEFOREHAND, a list of calls of what `once` made; conftest.py begins them, and has
the tests of the module come last.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def once(function: Callable[..., T]) -> Callable[..., T]:
    """A function that does for each arguments what it does once; who asks meanwhile waits for that."""
    results: dict[tuple[Hashable, ...], Future[T]] = {}
    lock = threading.Lock()

    def call(*args: Hashable) -> T:
        with lock:
            is_first = args not in results
            result = results.setdefault(args, Future())
        if is_first:
            try:
                result.set_result(function(*args))
            except BaseException as error:
                result.set_exception(error)
        return result.result()

    return call


def begin(calls: Iterable[Callable[[], Any]]) -> Callable[[], None]:
    """One after the other, by a thread that lets tests go first; returns what ends it."""
    ends = threading.Event()

    def work() -> None:
        if sys.platform == "linux":
            os.nice(5)  # also its compilers; with more, busy cores would keep them from a test that waits
        for call in calls:
            if ends.is_set():
                break
            with contextlib.suppress(BaseException):  # the test that asks for it will see it
                call()

    def end() -> None:
        ends.set()
        thread.join()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return end
