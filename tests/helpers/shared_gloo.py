# SPDX-License-Identifier: Apache-2.0
"""gloo groups that share one thread: each group's own would poll a hundred times a second."""

from __future__ import annotations

import os
from typing import Any


def shared(gloo: Any) -> Any:
    """Return a class for torch's `ProcessGroupGloo`, by any version's arguments, whose groups share a device.

    torch's constructor with a timeout makes a device, and a thread with it; the one with options takes the
    device. What torch passes by name becomes a field of the options. If there is no such field, or torch
    passes it by place, its constructor gets the arguments as they are, and the group has its own thread.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    device = gloo.create_device(interface=interface) if interface else gloo.create_default_device()

    class ProcessGroupGloo(gloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, *args: Any, **named: Any) -> None:
            options = gloo._Options()
            fields = {name if hasattr(options, name) else f"_{name}": name for name in named}
            if args or not all(hasattr(options, field) for field in fields):
                super().__init__(store, rank, size, *args, **named)
                return
            for field, name in fields.items():
                setattr(options, field, named[name])
            options._devices = [device]
            super().__init__(store, rank, size, options)

    return ProcessGroupGloo
