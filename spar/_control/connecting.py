# SPDX-License-Identifier: Apache-2.0
"""Issue a group's first collective on a device, in which torch may connect the ranks.

Before torch 2.15 a group that is not bound to a device creates its NCCL communicator there. That waits for
all ranks, ignores the collective's timeout, and runs no signal handler. So a thread issues it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

_SLICE_S = 0.05

_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, set[torch.device]] = weakref.WeakKeyDictionary()


def may_connect(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether torch may connect the ranks in the group's next collective on the device."""
    return device.type != "cpu" and device not in _connected.get(group, ())


def _place_of_caller(device: torch.device) -> Callable[[], None]:
    """Return a function that gives another thread the caller's stream, and with it the device."""
    stream = torch.accelerator.current_stream(device)
    return lambda: torch.accelerator.set_stream(stream)


def issue(
    group: dist.ProcessGroup, device: torch.device, start: Callable[[], dist.Work], poll: Callable[[], None]
) -> dist.Work | Exception:
    """Return what start() returned or raised on a thread.

    Calls `poll` meanwhile. If that raises, the thread is left alone.
    """
    enter = _place_of_caller(device)
    results: list[dist.Work | Exception] = []

    def run() -> None:
        try:
            enter()
            results.append(start())
        except Exception as error:
            results.append(error.with_traceback(None))

    thread = threading.Thread(target=run, name="spar connecting", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_SLICE_S)
        if thread.is_alive():
            poll()
    if not isinstance(results[0], Exception):
        _connected.setdefault(group, set()).add(device)
    return results[0]
