# SPDX-License-Identifier: Apache-2.0
"""The push transport: CUDA tensors of ranks of one host, which write to memory of each other's GPUs.

The core maps the ranks' slots. Outputs that peers write to are of a pool of torch's allocator, whose segments
lie in this rank's slot.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from .. import _C
from .._control.state import GroupState
from .core import CoreChannel
from .cuda import is_capturing, pooled_empty
from .nccl import Device, NcclChannel

_synchronize = torch.cuda.synchronize


class PushChannel(NcclChannel):
    """Calls are given to the current stream, as NCCL's are."""

    name = "push"

    def __init__(self, group: GroupState, device: torch.device, op: str, deadline: float) -> None:
        assert group.peer_info is not None
        self.device = Device(device)
        self.has_native = False
        place = group.peer_info, group.rank, group.local_ranks, group.name
        CoreChannel.__init__(self, group, _C.comm("push", *place, self.device.index))

    def watch(self) -> None:
        if self.pooled is None:
            self.pooled = pooled_empty(self.device.place)

    def close(self) -> None:
        """Free the pool when the device has ended its work; keep what a graph may still write to.

        The wait for the device would invalidate a capture.
        """
        pool, self.pooled = [self.pooled], None
        kept = self.core.captured or is_capturing(self.device.place)
        if not kept:
            try:
                threading.Thread(target=_drop, args=(pool, self.device.place), daemon=True).start()
            except RuntimeError:  # no thread can be started, as at the interpreter's exit
                kept = True
        if kept:
            _kept.extend(pool)
        super().close()


_kept: list[Any] = []  # for good


def _drop(pool: list[Any], device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):  # the device is gone
        _synchronize(device)  # without the GIL; torch waits, too, but with it
    pool.clear()
