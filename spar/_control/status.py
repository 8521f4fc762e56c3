# SPDX-License-Identifier: Apache-2.0
"""The last call of each rank and the state of its process, for the error of a call that does not end.

The shm transport reads them from shared memory (csrc/control/last_call.h). Elsewhere each rank publishes them
in torch.distributed's store, once a call has waited for half a second and when it gives up. Threads use the
store, since one whose server is stopped or gone does not answer.
"""

from __future__ import annotations

import contextlib
import enum
import json
import select
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from .. import _C
from ..errors import by_rank
from .state import GroupState

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_pidfds: dict[tuple[int, int], int] = {}  # of processes on this host, by (id, nonce), or one of these:
_ELSEWHERE, _BUSY, _UNKNOWN, _DEAD = -1, -2, -3, -4
_PATIENCE = 0.5  # seconds to wait for the peers' last calls when this rank gives up
_LONGER = 2.0  # the same if a connection is lost, but no process: the peer that closed it will tell why


class CallState(enum.IntEnum):
    """What a rank does in its last call. The store also keeps why it gave up."""

    UNKNOWN = _C.CALL_UNKNOWN
    NONE = _C.CALL_NONE
    RUNNING = _C.CALL_RUNNING
    ENDED = _C.CALL_ENDED
    ABORTED = _C.CALL_ABORTED
    TIMED_OUT = 5
    PEER_LOST = 6


_SENTENCES = {
    CallState.UNKNOWN: "its last call cannot be read",
    CallState.NONE: "has begun no call",
    CallState.RUNNING: "is in {0}",
    CallState.ENDED: "has ended {0}",
}


class CallStatus(NamedTuple):
    """The newest call that a rank published."""

    state: CallState
    op: str
    call: int
    group: str

    @classmethod
    def of(cls, state: int, op: str, call: int, group: str) -> CallStatus:
        return cls(CallState(state), op, call, group)

    def __str__(self) -> str:
        sentence = _SENTENCES.get(self.state, "gave up in {0}")
        return sentence.format(f"{self.op}, call {self.call} on group {self.group!r}")


class Report(NamedTuple):
    """The newest call that each rank of a group published; None: it published nothing."""

    places: list[CallStatus | None]

    def __str__(self) -> str:
        return listing([str(place or "published no call") for place in self.places])

    def absent(self, group: GroupState, states: tuple[CallState, ...]) -> tuple[int, ...]:
        """Return the ranks that did not publish the group's current call in one of these states."""
        return tuple(
            rank
            for rank, place in enumerate(self.places)
            if place is None or place.state not in states or place[2:] != (group.calls, group.name)
        )

    def has(self, group: GroupState, *states: CallState) -> bool:
        """Whether a rank gave up on the group like this: in this call, or in one before or behind it."""
        return any(place and place.state in states and place.group == group.name for place in self.places)


def listing(rows: list[str]) -> str:
    return f"\nlast call of each rank, on any group:\n{by_rank(rows)}"


def _shared_store(group: dist.ProcessGroup) -> tuple[Store, list[int]] | None:
    """Return the store that all ranks share, and the group's global ranks; None if torch does not know it."""
    from torch.distributed import distributed_c10d as c10d

    with contextlib.suppress(Exception):
        return c10d._get_default_store(), dist.get_process_group_ranks(group)
    return None


def publish(group: GroupState, op: str, state: CallState) -> None:
    """Publish this rank's call, without waiting."""
    found = _shared_store(group.process_group)
    if found is not None:
        place = CallStatus(state, op, group.calls, group.name)
        threading.Thread(target=_put, args=(*found, group.rank, place), daemon=True).start()


def _keys(rank: int, group: str) -> tuple[str, str]:
    """Return where a rank publishes its last call on a group, in which it gave up, and on any group."""
    return f"spar/gave_up/{group}/{rank}", f"spar/last_call/{rank}"


def _put(store: Store, ranks: list[int], rank: int, place: CallStatus) -> None:
    with contextlib.suppress(Exception):
        gave_up, last = _keys(ranks[rank], place.group)
        if place.state not in _SENTENCES:  # no later call on another group may hide it
            store.set(gave_up, json.dumps(place))
        store.set(last, json.dumps(place))


def report(group: GroupState, op: str, state: CallState) -> Report | None:
    """Publish that this rank gives up; return what the peers published, or None if the store is silent."""
    found = _shared_store(group.process_group)
    if found is None:
        return None
    store, ranks = found
    places: list[CallStatus | None] = [None] * group.world
    answered, over = threading.Event(), threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):
            _put(store, ranks, group.rank, CallStatus(state, op, group.calls, group.name))
            while not over.is_set():
                for rank, other in enumerate(ranks):
                    key = next((key for key in _keys(other, group.name) if store.check([key])), None)
                    if key is not None:
                        places[rank] = CallStatus.of(*json.loads(store.get(key)))
                answered.set()
                time.sleep(0.02)

    threading.Thread(target=ask, daemon=True).start()
    begin = time.monotonic()
    while time.monotonic() < begin + _patience(group, state, Report(list(places))):
        time.sleep(0.01)
    over.set()
    return Report(list(places)) if answered.is_set() else None


def _patience(group: GroupState, state: CallState, said: Report) -> float:
    """Return how many seconds to wait in all for the peers' last calls, which so far are `said`."""
    if not said.absent(group, (state,)):
        return 0.0
    everybody = tuple(range(group.world))
    if state is not CallState.PEER_LOST or unreachable(group, everybody):
        return _PATIENCE
    return _PATIENCE if said.has(group, CallState.TIMED_OUT, CallState.ABORTED) else _LONGER


def named(group: GroupState, ranks: tuple[int, ...]) -> str:
    """ "rank 2 (process 71), rank 3 (process 72)" """
    processes = group.processes()
    return ", ".join(
        f"rank {rank} (process {processes[rank][0]})" if processes else f"rank {rank}" for rank in ranks
    )


def watch(group: GroupState) -> None:
    """Open a pidfd for each of the group's processes on this host, so that their deaths are noticed."""
    for process in group.processes():
        if process not in _pidfds:
            _pidfds[process] = _C.open_pidfd(*process)  # the death of an _UNKNOWN process is not noticed


def dead(group: GroupState) -> tuple[int, ...]:
    """Return the ranks whose process on this host has ended since the group's set-up."""
    return tuple(rank for rank, process in enumerate(group.processes()) if _ended(process))


def _ended(process: tuple[int, int]) -> bool:
    pidfd = _pidfds.get(process, _ELSEWHERE)
    if pidfd == _BUSY:  # it was alive; while it is, its address is in use
        found = _C.open_pidfd(*process)
        pidfd = _pidfds[process] = {_ELSEWHERE: _DEAD, _UNKNOWN: _BUSY}.get(found, found)
    if pidfd < 0:
        return pidfd == _DEAD
    poll = select.poll()  # select.select is limited to 1,023 descriptors
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def unreachable(group: GroupState, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return those of the ranks that are dead, or not reachable on this host."""
    processes = group.processes()
    found = [(rank, processes[rank]) for rank in ranks if processes]
    unseen = (_ELSEWHERE, _UNKNOWN)
    return tuple(rank for rank, p in found if _ended(p) or _pidfds.get(p, _ELSEWHERE) in unseen)
