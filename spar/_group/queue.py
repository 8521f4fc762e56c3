# SPDX-License-Identifier: Apache-2.0
"""Exchanges in flight: each group runs its own in the order of their issue, on one thread.

A thread for each group with something in flight, and not a pool: ranks may issue calls on several groups in
different orders, and a thread that waits for one group must not hold up another. It ends when it had nothing
to do for some seconds. Nothing of it exists in a forked child.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing import util
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .._control import fork
from ..errors import SparError, TransportError

if TYPE_CHECKING:
    import torch.distributed as dist

# Seconds after which a thread without work ends.
_IDLE_S = 5.0
# Seconds for which the process's exit waits for calls in flight.
_EXIT_S = 2.0


class _Group(Protocol):
    """What a queue uses of its group."""

    name: str
    rank: int
    calls: int
    queue: Queue | None
    process: int

    @property
    def process_group(self) -> dist.ProcessGroup: ...
    def close(self) -> None: ...
    def is_inside(self) -> bool: ...


class Job:
    """One call in flight. It keeps its group, and what its action refers to, until it is over."""

    def __init__(self, group: _Group, op: str, action: Callable[[], object]) -> None:
        self.group, self.op, self.process = group, op, fork.process
        self.error: BaseException | None = None
        self.over = False
        self._needed: Any = action, group.process_group, torch.is_inference_mode_enabled()
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        action, _, inference = self._needed
        try:
            with torch.inference_mode(inference), torch.no_grad():
                action()
        except BaseException as error:
            self.error = error
            with contextlib.suppress(AttributeError):
                error.__traceback__ = None  # its frames hold the tensors

    def end(self) -> None:
        self._needed = None
        self.over = True
        self._running.release()

    def wait(self, seconds: float | None) -> bool:
        """Return whether it is over, after at most so long; the error stays in `error`."""
        if self.over:
            return True
        where = f"{self.op} on rank {self.group.rank}"
        if self.process != fork.process:
            raise TransportError(
                f"{where}: a forked child cannot wait for an exchange that its parent, process "
                f"{self.process}, has in flight; wait in the parent"
            )
        if self.group.is_inside():
            name = self.group.name
            raise SparError(f"{where}: wait() was called from inside a call on the same group {name!r}")
        longest = threading.TIMEOUT_MAX  # a lock rejects more, and infinity
        if not self._running.acquire(timeout=-1 if seconds is None else min(max(seconds, 0.0), longest)):
            return False
        self._running.release()
        return True


class Queue:
    """The calls of one group that are in flight."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._thread: threading.Thread | None = None
        self._before = self._issued = self._ended = 0

    def count(self) -> int:
        """Return how many calls the group has, those in flight included."""
        return self._before + self._issued

    def in_flight(self) -> int:
        """Return how many calls are in flight; takes no lock."""
        return self._issued - self._ended

    def add(self, group: _Group, op: str, action: Callable[[], object]) -> Job:
        """Append a call; start the thread if there is none."""
        job = Job(group, op, action)
        with self._changed:
            if self._thread is None:
                _at_exit(fork.process)
                self._thread = threading.Thread(target=self._run, name="spar exchanges", daemon=True)
                try:
                    self._thread.start()
                except BaseException:
                    self._thread = None
                    raise
            if group.queue is None:
                self._before, self._issued, self._ended = group.calls, 0, 0
            self._issued += 1
            self._jobs.append(job)
            group.queue = self
            _busy.add(self)
            self._changed.notify_all()
        return job

    def drain(self, until: float | None = None) -> bool:
        """Wait for the calls in flight, not for those that other threads add meanwhile.

        until: a time of time.monotonic; return whether they are over.
        """
        with self._changed:
            issued = self._issued
            while self._jobs and self._ended < issued:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def close(self) -> None:
        """Close the group whose calls are in flight."""
        with self._changed:
            jobs = tuple(self._jobs)
        for job in jobs[:1]:
            job.group.close()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._changed:
                self._jobs.popleft()
                self._ended += 1
                job.over = True  # before a later call, which reads no lock, finds that there is no queue
                if not self._jobs:
                    job.group.queue = None
                    _busy.discard(self)
                job.end()
                self._changed.notify_all()
            del job

    def _next(self) -> Job | None:
        with self._changed:
            while not self._jobs:
                if not self._changed.wait(_IDLE_S) and not self._jobs:
                    self._thread = None
                    return None
            return self._jobs[0]


_busy: weakref.WeakSet[Queue] = weakref.WeakSet()
os.register_at_fork(after_in_child=_busy.clear)


@functools.cache
def _at_exit(process: int) -> None:
    """Register what ends calls in flight: once per process, and late: it runs before what they use ends."""
    atexit.register(_end_all)
    util.Finalize(None, _end_all, exitpriority=0)  # children of multiprocessing run no atexit callbacks


def _end_all() -> None:
    """Wait shortly for calls in flight; then close their groups, which the peers notice."""
    end = time.monotonic() + _EXIT_S
    for queue in list(_busy):
        if not queue.drain(end):
            queue.close()
    for queue in list(_busy):
        queue.drain(time.monotonic() + 1.0)
