"""What the transports that run in the C core have in common."""

from __future__ import annotations

import contextlib
import time

from ... import _C
from ...errors import ExchangeTimeoutError, MismatchError, SparError
from .. import peer_status
from ..agreement import mismatch
from ..member import Member
from ..peer_status import CallStatus

CALLS = dict.fromkeys(_C.transports(), 0)  # by each transport, in this process


class CoreChannel:
    """A channel over a `_C.Comm`."""

    def __init__(self, core: _C.Comm) -> None:
        self.core: _C.Comm = core
        self.name = core.transport

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
        if isinstance(error, MismatchError) and core.call_text(0) is not None:
            texts = [core.call_text(rank) or "" for rank in range(member.world)]
            return mismatch(member, op, texts)
        text, rows = str(error), ""
        if isinstance(error, ExchangeTimeoutError):
            text += f" (limit {member.timeout:g} s, SPAR_TIMEOUT)"
            calls = [core.last_call(rank) for rank in range(member.world)]
            known = [str(CallStatus.of(*call)) for call in calls if call is not None]
            rows = peer_status.listing(known) if len(known) == member.world else ""
        return type(error)(f"{member.title(op)}: {text}{rows}", **member.where(op), ranks=error.ranks)
