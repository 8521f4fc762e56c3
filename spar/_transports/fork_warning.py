# SPDX-License-Identifier: Apache-2.0
"""Warn in forked workers that receive an output of spar, whose memory the parent continues to use.

multiprocessing runs a callback in the children that it forks, such as DataLoader workers; os.fork and
subprocess do not. Only a worker's arguments are searched: most programs hold outputs when they fork workers
that never use them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import multiprocessing
import warnings
from collections import deque
from collections.abc import Iterable
from multiprocessing import util
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from .. import _C

if TYPE_CHECKING:
    from multiprocessing.synchronize import Semaphore

_MOST = 1000  # objects to search: reading one copies its page in the child


@functools.cache
def watch() -> None:
    """Register the callback, once per process."""
    first: Semaphore | None = None  # where the system has none, each worker warns
    with contextlib.suppress(ImportError, OSError):
        first = multiprocessing.get_context("fork").Semaphore(1)  # children share it: the first one warns
    util.register_after_fork(_look, functools.partial(_look, first))


def _look(first: Semaphore | None, _: object) -> None:
    process: Any = multiprocessing.current_process()
    if first is not None and first.get_value() == 0:
        return
    if not _holds_output([process._target, process._args, process._kwargs]):
        return
    if first is not None and not first.acquire(block=False):  # another worker was quicker
        return
    warnings.warn(
        f"{process.name} was forked with an output of spar among its arguments (for a DataLoader: in its "
        "dataset). Its values may change here when the parent writes to the tensor, or drops it and reuses "
        "the memory. Set SPAR_OUTPUT=torch, or .clone() the tensor before the fork.",
        RuntimeWarning,
        stacklevel=1,
    )


def _holds_output(roots: list[object]) -> bool:
    """Whether a tensor in the arena is among the first objects that the roots refer to."""
    pending, seen = deque(roots), set[int]()
    while pending and len(seen) < _MOST:
        item = pending.popleft()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if item.is_cpu and item.layout == torch.strided and _C.in_arena(item.data_ptr()):
                return True
        else:
            pending.extend(itertools.islice(_referents(item), _MOST))
    return False


def _referents(item: object) -> Iterable[object]:
    if isinstance(item, (type, ModuleType)):
        return ()
    if isinstance(item, dict):
        return () if "__builtins__" in item else item.values()  # not a module's globals
    if isinstance(item, (list, tuple, set, frozenset, deque)):
        return item
    return gc.get_referents(item)
