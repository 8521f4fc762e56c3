# SPDX-License-Identifier: Apache-2.0
"""The transports shm and tcp: outputs lie in memory that the ranks of a host share; TCP connects hosts."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from .. import _C
from .._control.state import GroupState
from . import fork_warning
from .core import CoreChannel


class ShmChannel(CoreChannel):
    """One exchange is one call of the core, which allocates the output in the arena."""

    name = "shm"
    lists = True
    core: _C.Comm
    copies_alone = True  # between the ranks nothing needs time but copies

    def __init__(self, group: GroupState, device: torch.device, op: str, deadline: float) -> None:
        assert group.peer_info is not None
        place = group.peer_info, group.rank, group.local_ranks, group.name
        super().__init__(group, _C.comm(self.name, *place))
        self.exchange = self._exchange_and_copy if group.own_output else self.core.exchange
        # in flight it copies and polls: without a core of its own it takes its time from the kernel
        if self.copies_alone and group.core_share <= torch.get_num_threads():
            self.in_flight_from = sys.maxsize

    def _exchange_and_copy(self, *arguments: Any) -> list[Any] | None:
        """Exchange, and copy what lies in shared memory to torch's own (SPAR_OUTPUT=torch)."""
        outputs = self.core.exchange(*arguments)
        if outputs is None:
            return None
        return [None if output is None else output.clone() for output in outputs]

    def watch(self) -> None:
        """Warn in forked workers that receive an output."""
        fork_warning.watch()

    def allocate(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        if self.group.own_output:
            return super().allocate(shape, like)
        flat = _C.arena_take(math.prod(shape) * like.element_size())
        # not a view of it, which autograd could not rebase
        return (
            torch.empty(0, dtype=like.dtype, device="cpu").set_(flat.untyped_storage()).resize_(tuple(shape))
        )


class TcpChannel(ShmChannel):
    """The same for a group that spans hosts."""

    name = "tcp"
    copies_alone = False
