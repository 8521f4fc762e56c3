# SPDX-License-Identifier: Apache-2.0
"""What the transports that run in the C core have in common."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Sequence

import torch

from .. import _C
from .._control.state import GroupState
from ..errors import SparError
from .channel import WORTH_A_CALL


class CoreChannel:
    """A channel over a `_C.Comm`."""

    name: str
    sides = 0
    enqueues = False
    in_flight_from = WORTH_A_CALL
    lists = False

    def __init__(self, group: GroupState, core: _C.Comm | None) -> None:
        self.group: GroupState = weakref.proxy(group)
        self.core = core

    def watch(self) -> None:
        """Nothing has to run."""

    def drop_core(self) -> bool:
        return False

    def allocate(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def report(self, op: str, why: str, memory: bool, deadline: float) -> None:
        assert self.core is not None
        self.core.fail(op, why, memory, False, deadline)

    def can_report(self) -> bool:
        return True

    def give_up(self, op: str, why: str) -> None:
        if self.core is not None:
            with contextlib.suppress(SparError):  # another thread closes it
                self.core.fail(op, why, False, True, time.monotonic())

    def abort(self) -> None:
        if self.core is not None:
            self.core.abort()

    def close(self) -> None:
        if self.core is not None:
            self.core.close()
