# SPDX-License-Identifier: Apache-2.0
"""The last call of each rank, for the error of a call that does not end.

A set-up group's ranks read them in shared memory, or send them (csrc/control/last_call.h, links.h). Before,
each rank publishes them in torch.distributed's store, once a call has waited for half a second and when it
gives up. Threads use the store, since one whose server is stopped or gone does not answer.
"""

from __future__ import annotations

import contextlib
import enum
import json
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from .. import _C
from ..errors import by_rank
from .state import GroupState

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PATIENCE = 0.5  # seconds to wait for the peers' last calls when this rank gives up
_LONGER = 1.5  # the same when a connection is lost: a rank that lost it, too, publishes that by then
_INTERVAL = 0.02  # seconds between two looks at the store


class CallState(enum.IntEnum):
    """What a rank does in its last call. The store also keeps why it gave up."""

    UNKNOWN = _C.CALL_UNKNOWN
    NONE = _C.CALL_NONE
    RUNNING = _C.CALL_RUNNING
    ENDED = _C.CALL_ENDED
    ABORTED = _C.CALL_ABORTED
    ARRIVED = _C.CALL_ARRIVED
    TIMED_OUT = 6
    PEER_LOST = 7


_SENTENCES = {
    CallState.UNKNOWN: "its last call cannot be read",
    CallState.NONE: "has begun no call",
    CallState.RUNNING: "is in {0}",
    CallState.ENDED: "has ended {0}",
    CallState.ARRIVED: "made {0}, the newest known here",
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


class Watch:
    """A thread that publishes this rank's call in the store, and reads those of the peers until `stop`.

    A rank that waits reads only in which call of the group a peer gave up.

    Attributes:
        answered: whether the store answered.
        places: the newest call that each rank published; None: it published nothing.
    """

    def __init__(self, group: GroupState, op: str, state: CallState) -> None:
        self.answered = False
        self.places: list[CallStatus | None] = [None] * group.world
        self._place = CallStatus(state, op, group.calls, group.name)
        self._last: CallStatus | None = None
        self._over = threading.Event()
        if (store_and_ranks := _shared_store(group.process_group)) is not None:
            args = (*store_and_ranks, group.rank, group.token)
            threading.Thread(target=self._run, args=args, daemon=True).start()

    def report(self) -> Report:
        return Report(list(self.places))

    def stop(self, state: CallState | None = None) -> None:
        """End the thread; before, publish the state in which the call ended."""
        if state is not None:
            self._last = self._place._replace(state=state)
        self._over.set()

    def _run(self, store: Store, ranks: list[int], rank: int, token: str) -> None:
        with contextlib.suppress(Exception):
            group, gave_up = self._place.group, self._place.state not in _SENTENCES
            any_key = f"spar/gave_up/{group}/{token}"
            _put(store, any_key, token, ranks[rank], self._place)
            while not self._over.is_set():
                if gave_up or store.check([any_key]):  # a rank that waits asks for one key alone
                    for peer, number in enumerate(ranks):
                        keys = [f"{any_key}/{number}", f"{_LAST}/{number}"][: 1 + gave_up]
                        if (key := next((key for key in keys if store.check([key])), None)) is not None:
                            *place, of = json.loads(store.get(key))
                            # Other rows are those of an older group with this name.
                            if of == token or place[-1] != group:
                                self.places[peer] = CallStatus.of(*place)
                self.answered = True
                self._over.wait(_INTERVAL if gave_up else 10 * _INTERVAL)
            if self._last is not None:
                _put(store, any_key, token, ranks[rank], self._last)


_LAST = "spar/last_call"  # before a rank's number: its last call on any group


def _put(store: Store, any_key: str, token: str, rank: int, place: CallStatus) -> None:
    text = json.dumps([*place, token])
    if place.state not in _SENTENCES:  # no later call on another group may hide it
        store.set(f"{any_key}/{rank}", text)
        store.set(any_key, "")
    store.set(f"{_LAST}/{rank}", text)


def report(group: GroupState, op: str, state: CallState) -> Report | None:
    """Publish that this rank gives up; return what the peers published, or None if the store is silent."""
    watch, begin = Watch(group, op, state), time.monotonic()
    while time.monotonic() < begin + _patience(group, state, watch.report()):
        time.sleep(0.01)
    watch.stop()
    return watch.report() if watch.answered else None


def _patience(group: GroupState, state: CallState, report: Report) -> float:
    """Return how many seconds to wait in all for the peers' last calls, which so far are `report`."""
    if not report.absent(group, (state,)):
        return 0.0
    if state is not CallState.PEER_LOST:
        return _PATIENCE
    if report.has(group, CallState.TIMED_OUT, CallState.ABORTED):
        return _PATIENCE
    return _LONGER if len(report.absent(group, (state,))) == 1 else 2 * _LONGER


def named(group: GroupState, ranks: tuple[int, ...]) -> str:
    """ "rank 2 (process 71), rank 3 (process 72)" """
    processes = group.processes()
    return ", ".join(
        f"rank {rank} (process {processes[rank][0]})" if processes else f"rank {rank}" for rank in ranks
    )
