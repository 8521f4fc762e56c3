# SPDX-License-Identifier: Apache-2.0
"""Shared by pytest-xdist's workers: a folder, builds that one worker makes, exclusive use of the machine.

A run without workers, a rank and a program outside of pytest use the same functions.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_VARIABLE = "PYTEST_SPAR_FOLDER"  # inherited by workers and ranks
_own: tempfile.TemporaryDirectory[str] | None = None


def folder() -> Path:
    """Return the folder of this run; the first process that calls it creates it, and removes it at exit."""
    global _own
    if _VARIABLE not in os.environ:
        _own = tempfile.TemporaryDirectory(prefix="spar-tests-")
        os.environ[_VARIABLE] = _own.name
    return Path(os.environ[_VARIABLE])


@contextlib.contextmanager
def locked(name: str, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the lock of that name, against other processes and threads."""
    descriptor = os.open(folder() / f"{name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may hold the descriptor, too
        os.close(descriptor)


def built(name: str, build: Callable[[Path], object]) -> Path:
    """Return the folder that build(folder) has filled, once for all workers."""
    target = folder() / name
    with locked(name):
        if not (target / ".built").exists():
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            build(target)
            (target / ".built").touch()
    return target


class Machine:
    """Run tests side by side, except those marked `alone`: short timeouts, or load on every core.

    A process that waits to be alone holds the gate, so that no other process starts a test.
    """

    def __init__(self) -> None:
        self._held: contextlib.ExitStack | None = None

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with contextlib.ExitStack() as self._held:
            with locked("gate"):
                self._held.enter_context(locked("machine", fcntl.LOCK_SH))
            yield
        self._held = None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within shared() or without it."""
        if self._held is not None:
            self._held.close()
        try:
            with locked("gate"), locked("machine"):
                yield
        finally:
            if self._held is not None:
                with locked("gate"):
                    self._held.enter_context(locked("machine", fcntl.LOCK_SH))


machine = Machine()
