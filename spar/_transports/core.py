"""What the transports that run in the C core have in common."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch

from .. import _C
from .._group import status as peer_status
from .._group.agreement import mismatch
from .._group.hints import Gathered, gathered_sizes
from .._group.member import Member
from .._group.status import CallStatus
from ..errors import ExchangeTimeoutError, MismatchError, SparError


class CoreChannel:
    """A channel over a `_C.Comm`."""

    enqueues = False
    overlaps = True

    def __init__(self, core: _C.Comm) -> None:
        self.core: _C.Comm = core
        self.name = core.transport

    def allocate(self, member: Member, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def report(self, member: Member, op: str, why: str, memory: bool, deadline: float) -> None:
        self.core.fail(op, why, memory, False, deadline)

    def can_report(self, member: Member) -> bool:
        return True

    def give_up(self, op: str, why: str) -> None:
        with contextlib.suppress(SparError):  # another thread closes it
            self.core.fail(op, why, False, True, time.monotonic())

    def abort(self) -> None:
        self.core.abort()

    def close(self) -> None:
        self.core.close()

    def explain(self, member: Member, op: str, error: SparError) -> SparError:
        """An error of the C core with what only this side knows."""
        core = self.core
        text, rows, sizes = str(error), "", None
        if isinstance(error, MismatchError):
            calls = [call for rank in range(member.world) if (call := core.description(rank)) is not None]
            if len(calls) == member.world:
                sizes = gathered_sizes([Gathered(*gathered) for _, gathered in calls])
                if all(text for text, _ in calls):
                    return mismatch(member, op, [text for text, _ in calls], sizes)
        if isinstance(error, ExchangeTimeoutError):
            text += f" (limit {member.timeout:g} s, SPAR_TIMEOUT)"
            last = [core.last_call(rank) for rank in range(member.world)]
            known = [str(CallStatus.of(*call)) for call in last if call is not None]
            rows = peer_status.listing(known) if len(known) == member.world else ""
        result = type(error)(f"{member.title(op)}: {text}{rows}", **member.where(op), ranks=error.ranks)
        if isinstance(result, MismatchError):
            result._gathered_sizes = sizes
        return result
