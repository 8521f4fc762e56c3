"""What a rank knows of one process group: its place in it, its transports, its calls, and what broke it."""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from .. import _C
from ..errors import GroupBrokenError, SparError
from . import inherited, pg_info

# How far a rank's call has come, which decides what an exception in it means for the peers.
LOCAL = 0  # the peers know nothing of it: the failure must be reported to them
SHARED = 1  # the peers count on this rank: an exception breaks the group
OVER = 2  # the call has ended for every rank, or its transport reports failures by itself

_handles = itertools.count(1)


class Place(NamedTuple):
    """A rank's place in a group, as ints, which a compiled function may keep."""

    handle: int  # the communicator's; never reused in this process
    world: int
    rank: int


ALONE = Place(0, 1, 0)  # without a group


@dataclass(frozen=True)
class Transport:
    """The transport that moves a group's bytes, and why it was chosen.

    Attributes:
        name: its name; None before the group's first exchange.
        reason: why this one.
        device: the device type it was chosen for.
        world_size: ranks of the group.
        rejected: (name, reason) of each transport that was tried before it.
    """

    name: str | None
    reason: str
    device: str
    world_size: int
    rejected: tuple[tuple[str, str], ...] = ()


class Member:
    """One rank's state in one process group. It refers to the ProcessGroup weakly."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._registry = pg_info.registry(group)
        self.process = inherited.maker(group)
        self.world = group.size()
        self.rank = group.rank()
        self.place = Place(next(_handles), self.world, self.rank)
        self.name = pg_info.group_name(group)
        self.calls = 0
        self.progress = OVER  # of the newest call
        self.broken: str | None = None
        self.closing = False  # by a thread that found a call under way, which closes when it ends
        self.check = True
        self.synchronous = False  # the nccl transport's comparisons
        self.own_output = False
        self.timeout: float | None = None
        self.facts: bytes | None = None
        self.share_host = False
        self.local_ranks = self.world  # of all groups on this host, as far as the launcher says
        self.core_share = 0  # cores that are this rank's own
        self.transports: dict[str, Transport] = {}  # by device type
        self.connecting: _C.Comm | None = None  # in its set-up

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise self.destroyed_error("a call")
        return group

    def where(self, op: str, call: int | None = None) -> dict[str, Any]:
        """The details that spar's errors carry; call: another than the newest one."""
        return {
            "op": op,
            "group": self.name,
            "call": self.calls if call is None else call,
            "rank": self.rank,
        }

    def moment(self, op: str) -> str:
        """When something happened, for a message."""
        return f"call {self.calls} ({op})" if self.calls else f"the group's set-up ({op})"

    def title(self, op: str, call: int | None = None) -> str:
        """What an error's message begins with; call: as for `where`."""
        call = self.calls if call is None else call
        when = f"call {call} on" if call else "set-up of"
        return f"{op}, {when} group {self.name!r}, rank {self.rank} of {self.world}"

    def destroyed_error(self, op: str) -> SparError:
        return SparError(
            f"{op} on rank {self.rank}: process group {self.name!r} was destroyed; make each call, and its "
            "backward, before destroy_process_group(), or make a group anew and pass that",
            **self.where(op),
        )

    def broken_error(self, op: str) -> GroupBrokenError:
        return GroupBrokenError(
            f"{op} on rank {self.rank}: group {self.name!r} is broken: {self.broken}",
            **self.where(op),
        )

    def processes(self) -> list[tuple[int, int]]:
        """(id, nonce) of each rank's process; empty before the set-up, or where some are not known."""
        found = _C.processes(self.facts) if self.facts is not None else []
        return found if all(process for process, _ in found) else []

    def deadline(self) -> float:
        """When a call that starts now must have ended (time.monotonic)."""
        if self.timeout is None:
            with contextlib.suppress(ValueError):  # the set-up reports an invalid value on all ranks
                self.timeout = _C.env("timeout")
            self.timeout = self.timeout or pg_info.group_timeout(self.group)
        return time.monotonic() + self.timeout
