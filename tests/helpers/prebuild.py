# SPDX-License-Identifier: Apache-2.0
"""Compile in the background, from the start of a test run, what slow builds several tests need.

A test module lists its builds in PREBUILD: calls of functions that `once` decorates. conftest.py starts them,
and runs the tests of these modules last.
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
    """Decorate a function to run once for each arguments; concurrent callers wait for its result."""
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
    """Run the calls in order on a low-priority thread; return a function that stops it."""
    ends = threading.Event()

    def work() -> None:
        if sys.platform == "linux":
            os.nice(
                5
            )  # its compilers inherit it; with more, busy cores would starve them while a test waits for one
        for call in calls:
            if ends.is_set():
                break
            with contextlib.suppress(BaseException):  # the test that needs the result raises it
                call()

    def end() -> None:
        ends.set()
        thread.join()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return end
