# SPDX-License-Identifier: Apache-2.0
"""A process group on this rank: its calls run one at a time, in one order on all ranks.

Whatever ends a call early is reported to the peers, or breaks the group.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .. import _C
from .._control import collectives, fork
from .._control.agreement import announce_failure, failure_text, is_out_of_memory, is_reported, mark_reported
from .._control.mismatch import add_advice, explained
from .._control.state import LOCAL, OVER, SHARED, GroupState, Place, Transport
from .._transports.channel import Channel, Run
from ..errors import GroupBrokenError, SparError, TransportError
from . import setup
from .log import failed, logged
from .profiling import is_profiled, profiled
from .queue import Job, Queue

T = TypeVar("T")

MOST_EXCHANGES = 2**62  # the peers may wait for any later exchange of a rank that fails


class Group(GroupState, _C.Turn):
    """What spar does with one process group on this rank. Its `exchange` is in C: csrc/python/turn_type.c.

    Attributes:
        channels: the transport of each device type.
        exchanges: what calls decided from their arguments, by these: it takes longer than an exchange.
        queue: while calls are in flight, those.
        newest: what the C core knows of the newest exchange.
        view: in a forward of a sharded model, what has its `word`, which ranks compare in each exchange but
            those in flight; else None.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.channels: dict[str, Channel] = {}
        self.exchanges: dict[tuple[object, ...], Any] = {}
        self.queue: Queue | None = None
        self.newest: _C.Exchange | None = None
        self.view: _C.Mode | None = None
        self._newest_queue: Queue | None = None
        self._is_profiled = is_profiled
        self._lock = threading.Lock()
        self._acquire, self._release = self._lock.acquire, self._lock.release

    def remember(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """Return what an equal call decided, or what this one decides by make."""
        found: T | None = self.exchanges.get(key)
        if found is None:
            found = self.exchanges[key] = make()
        return found

    # ---- calls ----

    def call(self, name: str, exchanges: int = 1, device: str | None = None) -> Call:
        """Return the block around one operation, which reports to the peers what ends it early.

        Args:
            name: of the operation.
            exchanges: how many the peers wait for, if this rank makes fewer.
            device: the type of the device where the call's tensors lie; None: not known.
        """
        return Call(self, name, exchanges, device)

    def count(self) -> int:
        """Return how many calls this rank has made, those in flight included."""
        return self.calls if self.queue is None else self.queue.count()

    def in_turn(
        self, op: str, device: str | None, action: Callable[[float], Any], queued: bool = False
    ) -> Any:
        """Return action(deadline), which has its turn and fails as an `exchange` does, but is no call."""
        return self.exchange(op, device, None, (), None, 0, False, queued, action)

    def _observed(self, channel: Channel) -> Run:
        """Return what runs an exchange on a channel, and shows it in the profile and in the log."""
        run = functools.partial(profiled, self, channel) if is_profiled() else channel.exchange
        return functools.partial(logged, self, channel, run) if self.logs_calls else run

    def _fail_call(
        self, op: str, device: str | None, error: BaseException, before: int, deadline: float
    ) -> None:
        """Report what ended a call, or break the group; raise what explains an error of the core.

        before: how many calls there were before this one.
        """
        if self.calls != before and self.core_has(self.calls):
            self.progress = OVER
        result = self._explained(op, device, error)
        try:
            self._account(op, device, result, before, "", deadline)
            if result is not error:
                raise result from None
        finally:
            del result  # its traceback has this frame, which would keep the tensors

    def enqueue(self, op: str, action: Callable[[], object]) -> Job:
        """Run an action that makes one queued exchange, in its turn, on the group's own thread.

        The group is set up for the device.
        """
        self.check(op)
        if self._newest_queue is None:
            self._newest_queue = Queue()
        return self._newest_queue.add(self, op, action)

    def check(self, op: str) -> None:
        """Raise where no call can be made."""
        if self.process != fork.process or self._owner == threading.get_ident() or self._is_destroyed():
            raise self._refusal(op)
        if self.broken is not None:
            raise self.broken_error(op)

    def is_inside(self) -> bool:
        """Whether this thread is inside a call of the group: in a signal handler, say."""
        return self._owner == threading.get_ident()

    # ---- transports ----

    def transport(self, device: str) -> Transport:
        """Return the transport for a device type, as far as it is known; never communicates."""
        if self.world == 1:
            return Transport(None, "a group of one exchanges nothing", device, 1)
        if device in self.transports:
            return self.transports[device]
        reason = "the group has not exchanged anything yet"
        return Transport(None, reason, device, self.world, setup.known_rejections(self, device))

    def channel(self, op: str, device: torch.device) -> Channel:
        """Return the channel for a device type; set it up with all ranks if there is none."""
        channel = self.channels.get(device.type)
        if channel is None:
            channel = self.in_turn(op, device.type, functools.partial(self._set_up, op, device))
        return channel

    def _set_up(self, op: str, device: torch.device, deadline: float) -> Channel:
        kind = device.type
        if kind not in self.transports:
            chosen, channel = setup.set_up(self, op, device, deadline)
            self.transports[kind] = chosen  # and nothing between that a signal's handler could interrupt
            self.channels[kind] = channel
            channel.watch()
            self.progress = LOCAL
        if self.broken is not None:  # closed meanwhile
            raise self.broken_error(op)
        return self.channels[kind]

    # ---- what ends a call early ----

    def report(
        self,
        op: str,
        device: str | None,
        error: BaseException,
        last: int,
    ) -> None:
        """Report an error to the peers that wait for this rank's next call, unless they know.

        last: the number of the operation's last call; once it is made, no peer waits.
        """
        if self.world > 1 and not is_reported(error, self) and self.count() < last:
            why = f"the exchange before it failed: {failure_text(error)}" if is_reported(error) else ""
            with contextlib.suppress(SparError):  # a broken group must not hide what is wrong here
                self.fail(op, device, error, why)

    def fail(
        self, op: str, device: str | None, error: BaseException, why: str = "", queued: bool = False
    ) -> None:
        """Report that this rank fails before its next call on the group, which counts as that call.

        It does not wait for the peers, unless they have not ended the call before. Behind calls in flight the
        report is queued.

        Args:
            op: the operation's name.
            device: the type of the device where the call's tensors lie; None: not known.
            error: what this rank raises.
            why: what the peers read instead of the error's text.
        """
        queue = self.queue if self.process == fork.process else None
        if queue is not None and not queued:
            mark_reported(error, self)
            with contextlib.suppress(RuntimeError):  # no thread can be started
                queue.add(self, op, lambda: self.fail(op, device, error, why, queued=True))
            return
        with contextlib.suppress(SparError):
            action = functools.partial(self._account, op, device, error, None, why)
            self.in_turn(op, None, action, queued=queued)

    def _explained(self, op: str, device: str | None, error: BaseException) -> BaseException:
        """Return an error of the C core with what only this side knows; other errors as they are."""
        core = self._core(device)
        if core is None or not isinstance(error, SparError) or error.op is not None:
            return error
        return explained(self, core, op, error)

    def core_has(self, number: int) -> bool:
        """Whether a transport of the C core has a call, so that it reports whatever fails in it."""
        cores = [channel.core for channel in self.channels.values()]
        return any(core is not None and core.begun == number for core in cores)

    def _core(self, device: str | None) -> _C.Comm | None:
        return self.channels[device].core if device in self.channels else None

    def _account(
        self,
        op: str,
        device: str | None,
        error: BaseException,
        before: int | None,
        why: str,
        deadline: float,
    ) -> None:
        """Report this rank's exception to the peers as the failure of its call, or break the group.

        before: how many calls there were before this one; None: as many as now.
        """
        outcome = self._reported(op, device, error, before, why, deadline)
        if self.logs_calls:
            failed(self, op, error, outcome)

    def _reported(
        self,
        op: str,
        device: str | None,
        error: BaseException,
        before: int | None,
        why: str,
        deadline: float,
    ) -> str:
        """Do what `_account` does; return how the peers learn of the exception, in words."""
        is_over = self.broken is None and self.progress == OVER
        if isinstance(error, Exception) or not is_over:
            mark_reported(error, self)
        if self.broken is not None:
            return "the group is broken"
        if is_over and isinstance(error, SparError):
            caused = error.ranks or isinstance(error, GroupBrokenError) or self._core(device) is None
            return "known to all ranks" if caused else "reported by this rank"
        if is_over:  # The core reports it; or the peers have made this call, and go on.
            return "reported by this rank" if self.core_has(self.calls) else "after its exchange"
        if device is None and len(self.transports) == 1:
            device = next(iter(self.transports))
        is_set_up = device in self.transports or (device is None and self.transports)
        if is_set_up and before in (None, self.calls):
            self.calls += 1
        if self.progress == SHARED or not isinstance(error, Exception) or not self._can_report(device):
            self._break(op, error)
            return "this rank broke the group"
        channel, why = self.channels.get(device or ""), why or failure_text(error)
        with contextlib.suppress(SparError):
            if channel is not None:
                channel.report(op, why, is_out_of_memory(error), deadline)
            else:  # the peers are in the set-up
                announce_failure(self, op, why, is_out_of_memory(error), deadline)
        return "reported by this rank"

    def _can_report(self, device: str | None) -> bool:
        """Whether the peers would notice a failure, on the way by which they wait for this call."""
        if device is None and self.transports:
            return False  # by several transports, and it is not known which
        channel = self.channels.get(device or "")
        return channel is None or channel.can_report()

    def _break(self, op: str, error: BaseException) -> None:
        """Break the group for good, on all ranks that can be reached; the others time out."""
        if isinstance(error, Exception):
            self.broken = f"{self.moment(op)} failed on rank {self.rank}: {failure_text(error)}"
        else:
            self.broken = f"{self.moment(op)} was interrupted on rank {self.rank}"
        for channel in self.channels.values():
            channel.give_up(op, self.broken)

    def _interrupt(self, op: str, error: BaseException) -> None:
        """Break the group from a thread that a signal handler's exception took out of the wait for its turn.

        The peers wait for its call. It cannot be reported before the other thread's call ends, which may take
        until the timeout: so that call is aborted.
        """
        mark_reported(error, self)
        if self.broken is None:
            self.broken = (
                f"{op} was interrupted on rank {self.rank} while another thread's call was in progress"
            )
        self._abort()
        if self.logs_calls:
            failed(self, op, error, "this rank broke the group")

    def _is_destroyed(self) -> bool:
        return self._registry is not None and self._process_group() not in self._registry

    def _refusal(self, op: str) -> SparError:
        """Return why this thread cannot make a call now.

        A call from inside a call on the same group, by a signal handler, say, could never end. A call on a
        destroyed group is refused although shared memory could serve it.
        """
        if self.process != os.getpid():  # also of a clone that runs no handlers of a fork
            return TransportError(
                f"{op} on rank {self.rank}: a forked child cannot exchange on group {self.name!r}, which its "
                f"parent, process {self.process}, made; exchange in the parent, or make a group here",
                **self.where(op),
            )
        if self._is_destroyed():
            self.close()  # so that peers which still call raise, too
            return self.destroyed_error(op)
        return SparError(
            f"{op} on rank {self.rank}: called from inside a call on the same group {self.name!r}"
        )

    # ---- its end ----

    def _abort(self) -> None:
        for channel in tuple(self.channels.values()):
            channel.abort()
        if self.connecting is not None:
            self.connecting.abort()

    def close(self) -> None:
        """End spar's use of the group, without waiting; a call under way raises GroupBrokenError."""
        if self.process != fork.process:  # a thread of the parent may have held the lock at the fork
            return
        self.broken = "it was closed"
        self._closes = True
        self.exchanges.clear()
        self._abort()
        self._close_when_idle()

    def _close_when_idle(self) -> None:
        """Close what the group has in C, unless a call uses it: that call then does so at its end."""
        while self._closes and self._lock.acquire(blocking=False):
            try:
                for channel in self.channels.values():
                    channel.close()
                self.channels.clear()
                self._closes = False
            finally:
                self._lock.release()
        collectives.forget_finished()


class Call:
    """The block around one operation on a group; see `Group.call`. It does nothing under torch.compile."""

    __slots__ = ("before", "device", "exchanges", "group", "name", "tensors")

    def __init__(
        self, group: Group | Place, name: str, exchanges: int = 1, device: str | None = None
    ) -> None:
        self.group, self.name, self.exchanges, self.device = group, name, exchanges, device
        self.tensors = 0  # how many a list has

    def __enter__(self) -> Call:
        group = self.group
        if self.exchanges and isinstance(group, Group):
            self.before = group.calls if group.queue is None else group.count()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and isinstance(self.group, Group):
            if self.exchanges and self.device != "meta" and not is_faking():
                self.group.report(self.name, self.device, error, self.before + self.exchanges)
            add_advice(error, self.tensors)


is_faking: Callable[[], Any] = functools.partial(
    torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
)
