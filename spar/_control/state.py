# SPDX-License-Identifier: Apache-2.0
"""What a rank knows of one process group, for messages and for what runs below the group."""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from .. import _C
from ..errors import GroupBrokenError, SparError
from . import fork, process_group
from .speeds import Measured

T = TypeVar("T")

# How far a rank's call has come, which decides what an exception in it means for the peers.
LOCAL = 0  # the peers know nothing of it: the failure must be reported to them
SHARED = 1  # the peers count on this rank: an exception breaks the group
OVER = 2  # the call has ended for every rank, or its transport reports failures by itself

_handles = itertools.count(1)


class Place(NamedTuple):
    """A rank's place in a group, as ints, which a compiled function may keep."""

    handle: int  # of the group; never reused in this process. 0: the process does not have the group
    world: int
    rank: int

    def remember(self, key: object, make: Callable[[], T]) -> T:
        """Return what make returns: a place keeps nothing, other than a group."""
        return make()


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
        hosts: the ranks of each host, which share memory; empty before the group's first exchange.
        shared_memory: the part of the bytes for other ranks that this rank writes to their memory, in an
            exchange of equal shards: 0 to 1.
        network: the part that goes to other hosts. The rest is moved inside the host, by NCCL, the process
            group, or TCP.
    """

    name: str | None
    reason: str
    device: str
    world_size: int
    rejected: tuple[tuple[str, str], ...] = ()
    hosts: tuple[tuple[int, ...], ...] = ()
    shared_memory: float = 0.0
    network: float = 0.0


class GroupState:
    """One rank's state in one process group, to which it refers weakly.

    Attributes:
        handle, world, rank: see Place.
        process: the process that made the group; a forked child cannot use it.
        calls: the number of this rank's newest call.
        progress: how far that call has come.
        broken: why the group is broken for good; None: it is not.
        peer_info: what each rank sent about itself in the set-up; None before.
        token: of the set-up, equal on all ranks: names of groups are reused. Empty before.
        shares_host: whether all ranks run on this host.
        hosts: the ranks of each host, which share memory; empty before the set-up.
        connects: whether the ranks' processes can connect, as far as a set-up has shown.
        compares: whether ranks compare their calls where that is a step of its own (SPAR_CHECK).
        synchronous: whether nccl's calls are compared before they are issued (SPAR_CHECK=1).
        own_output: whether outputs lie outside of shared memory (SPAR_OUTPUT).
        logs_calls: whether each call is logged (SPAR_LOG=debug).
        measured: the speeds that rank 0 has, of the device type of the first set-up.
        local_ranks: ranks of all groups on this host, as far as the launcher says.
        core_share: cores that are this rank's own.
        transports: by device type.
        connecting: the core's communicator during its set-up.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._process_group = weakref.ref(group)
        self._registry = process_group.registry(group)
        self.process = fork.maker(group)
        self.handle, self.world, self.rank = next(_handles), group.size(), group.rank()
        self.place = Place(self.handle, self.world, self.rank)
        self.name = process_group.group_name(group)
        self.calls = 0
        self.progress = OVER
        self.broken: str | None = None
        self.timeout: float | None = None
        self.peer_info: bytes | None = None
        self.token = ""
        self.hosts: tuple[tuple[int, ...], ...] = ()
        self.shares_host, self.connects = False, True
        self.compares = True
        self.synchronous = self.own_output = self.logs_calls = False
        self.measured: dict[str, Measured] = {}
        self.local_ranks, self.core_share = self.world, 0
        self.transports: dict[str, Transport] = {}
        self.connecting: _C.Comm | None = None

    @property
    def process_group(self) -> dist.ProcessGroup:
        group = self._process_group()
        if group is None:
            raise self.destroyed_error("a call")
        return group

    def where(self, op: str, call: int | None = None) -> dict[str, Any]:
        """Return the details that spar's errors carry; call: another than the newest one."""
        return {
            "op": op,
            "group": self.name,
            "call": self.calls if call is None else call,
            "rank": self.rank,
        }

    def moment(self, op: str) -> str:
        """Return when something happened, for a message."""
        return f"call {self.calls} ({op})" if self.calls else f"the group's set-up ({op})"

    def title(self, op: str, call: int | None = None) -> str:
        """Return what an error's message begins with; call: as for `where`."""
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
        """Return (id, nonce) of each rank's process; empty before the set-up, or where some are not known."""
        processes = _C.processes(self.peer_info) if self.peer_info is not None else []
        return processes if all(process for process, _ in processes) else []

    def deadline(self) -> float:
        """Return when a call that starts now must have ended (time.monotonic)."""
        if self.timeout is None:
            with contextlib.suppress(ValueError):  # the set-up reports an invalid value on all ranks
                self.timeout = _C.env("timeout")
            self.timeout = self.timeout or process_group.group_timeout(self.process_group)
        return time.monotonic() + self.timeout
