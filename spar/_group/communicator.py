"""A rank's part in one process group: its calls run one at a time, in one order on all ranks.

Whatever ends a call early is reported to the peers, or breaks the group.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from .._transports.channel import Channel, Operation
from .._transports.dtypes import plain
from ..errors import SparError, TransportError
from . import inherited, pg_wait, setup as rendezvous
from .agreement import announce_failure, failure_text, is_out_of_memory, mark_reported
from .member import LOCAL, OVER, SHARED, Member, Transport
from .profiling import exchange_event, is_profiled
from .queue import Job, Lane

_MOST_OPERATIONS = 256  # that a group remembers
Record = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Remembered = tuple[Operation, Record | None]


@functools.cache  # torch makes a new string, which takes 3 times as long
def _type_of(device: torch.device) -> str:
    return device.type


class Communicator(Member):
    """What spar does with one process group on this rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.channels: dict[str, Channel] = {}  # by device type
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread whose call it is
        self.lane: Lane | None = None  # while calls are in flight
        self._own_lane: Lane | None = None
        # what public operations decided from their arguments: it takes longer than the exchange
        self.operations: dict[tuple[object, ...], Remembered] = {}

    def count(self) -> int:
        """Return how many calls this rank has made, those in flight included."""
        lane = self.lane
        return self.calls if lane is None else lane.count()

    def remember(self, key: tuple[object, ...], operation: Operation, record: Record | None) -> None:
        """record: runs the same operation under autograd."""
        if len(self.operations) >= _MOST_OPERATIONS:
            self.operations.clear()
        self.operations[key] = operation, record

    def transport(self, device: str) -> Transport:
        """The transport for a device type, as far as it is known; never communicates."""
        if self.world == 1:
            return Transport(None, "a group of one exchanges nothing", device, 1)
        known = self.transports.get(device)
        if known is not None:
            return known
        reason = "the group has not exchanged anything yet"
        rejected = rendezvous.known_rejections(self, device)
        return Transport(None, reason, device, self.world, rejected)

    def set_up(self, op: str, device: torch.device, deadline: float) -> None:
        """Set up a transport for the device type, with all ranks, if there is none yet."""
        kind = device.type
        if kind in self.transports:
            return
        chosen, channel = rendezvous.set_up(self, op, device, deadline)
        self.transports[kind] = chosen  # and nothing between that a signal's handler could interrupt
        self.channels[kind] = channel
        channel.watch(self)
        self.progress = LOCAL

    def exchange(
        self,
        operation: Operation,
        inputs: Sequence[torch.Tensor],
        outs: list[torch.Tensor] | None = None,
        queued: bool = False,
        forward: int = 0,
    ) -> list[torch.Tensor]:
        """Exchange tensors of one dtype and device; the outputs are new, contiguous, and this rank's own.

        outs: write them to these contiguous tensors instead.
        queued: it is the turn of a call in flight; others wait until none is before them.
        forward: as in `Channel.exchange`.
        """
        thread = self._enter(operation.op, queued)
        deadline = self.deadline()
        before = None
        try:
            if (lane := self.lane) is not None and not queued:
                lane.drain()
            with self._lock:  # Python runs signal handlers after it, once its release is sure
                before = self.calls
                try:
                    self._owner = thread
                    self.progress = LOCAL
                    if self.broken is not None:
                        raise self.broken_error(operation.op)
                    inputs = plain(inputs)
                    first = inputs[0]
                    device = "cpu" if first.is_cpu else _type_of(first.device)
                    channel = self.channels.get(device)
                    if channel is None:
                        channel = self._first_channel(operation.op, first.device, deadline)
                    self.calls += 1
                    if not is_profiled():
                        return channel.exchange(self, operation, inputs, deadline, outs, forward)
                    place = self.world, self.rank, self.name, channel.name
                    with exchange_event(operation, inputs, *place):
                        return channel.exchange(self, operation, inputs, deadline, outs, forward)
                except BaseException as error:
                    self._account(operation.op, inputs[0].device.type, error, deadline, before)
                    raise
                finally:
                    self._owner = None
        except BaseException as error:
            if before is None:
                self._interrupt(operation.op, error)
            raise
        finally:
            if self.closing:
                self._close_when_idle()

    def start(self, op: str, device: torch.device, action: Callable[[], None]) -> Job:
        """Run an action that makes one queued exchange, in its turn, on the group's own thread.

        The group is set up for the device.
        """
        self._enter(op)
        if self.broken is not None:
            raise self.broken_error(op)
        if self._own_lane is None:
            self._own_lane = Lane()
        return self._own_lane.add(self, op, action)

    def is_inside(self) -> bool:
        """Whether this thread is inside a call of the group: in a signal handler, say."""
        return self._owner == threading.get_ident()

    def channel(self, op: str, device: torch.device) -> Channel:
        """Return the channel for a device; set it up with all ranks if there is none."""
        if device.type not in self.channels:
            with self.turn(op, device.type):
                return self._first_channel(op, device, self.deadline())
        return self.channels[device.type]

    def _first_channel(self, op: str, device: torch.device, deadline: float) -> Channel:
        self.set_up(op, device, deadline)
        if self.broken is not None:  # closed meanwhile
            raise self.broken_error(op)
        return self.channels[device.type]

    # ---- what ends a call early ----

    def fail(
        self, op: str, device: str | None, error: BaseException, why: str = "", queued: bool = False
    ) -> None:
        """Report that this rank fails before its next call on the group, which counts as that call.

        It does not wait for the peers, unless an earlier failure has not reached them yet. Behind calls in
        flight the report is queued.

        Args:
            op: the operation's name.
            device: the type of the device where the call's tensors lie; None: not known.
            error: what this rank raises.
            why: what the peers read instead of the error's text.
        """
        lane = self.lane if self.process == inherited.process else None
        if lane is not None and not queued:
            mark_reported(error)
            with contextlib.suppress(RuntimeError):  # no thread can be started
                lane.add(self, op, lambda: self.fail(op, device, error, why, queued=True))
            return
        with contextlib.suppress(SparError), self.turn(op, queued=queued):
            self._account(op, device, error, self.deadline(), self.calls, why)

    def _account(
        self, op: str, device: str | None, error: BaseException, deadline: float, before: int, why: str = ""
    ) -> None:
        """Report this rank's exception to the peers as the failure of its call, or break the group.

        before: how many calls there were before this one.
        """
        if self.broken is None and self.progress == OVER and not isinstance(error, SparError):
            return  # the peers have made this call, and go on to their next
        mark_reported(error)
        if self.broken is not None or self.progress == OVER:
            return
        if device is None and len(self.transports) == 1:
            device = next(iter(self.transports))
        if self.calls == before and (device in self.transports or (device is None and self.transports)):
            self.calls += 1
        if self.progress == SHARED or not isinstance(error, Exception) or not self._can_report(device):
            self._break(op, error)
            return
        channel, why = self.channels.get(device or ""), why or failure_text(error)
        with contextlib.suppress(SparError):
            if channel is not None:
                channel.report(self, op, why, is_out_of_memory(error), deadline)
            else:  # the peers are in the set-up
                announce_failure(self, op, why, is_out_of_memory(error), deadline)

    def _can_report(self, device: str | None) -> bool:
        """Whether the peers would notice a failure, on the way by which they wait for this call."""
        if device is None and self.transports:
            return False  # by several transports, and it is not known which
        channel = self.channels.get(device or "")
        return channel is None or channel.can_report(self)

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
        mark_reported(error)
        if self.broken is None:
            self.broken = (
                f"{op} was interrupted on rank {self.rank} while another thread's call was in progress"
            )
        self._abort()

    def _abort(self) -> None:
        for channel in tuple(self.channels.values()):
            channel.abort()
        if self.connecting is not None:
            self.connecting.abort()

    def close(self) -> None:
        """End spar's use of the group, without waiting; a call under way raises GroupBrokenError."""
        if self.process != inherited.process:  # a thread of the parent may have held the lock at the fork
            return
        self.broken = "it was closed"
        self.closing = True
        self._abort()
        self._close_when_idle()

    def _close_when_idle(self) -> None:
        """Close what the group has in C, unless a call uses it: that call then does so at its end."""
        while self.closing and self._lock.acquire(blocking=False):
            try:
                for channel in self.channels.values():
                    channel.close()
                self.channels.clear()
                self.closing = False
            finally:
                self._lock.release()
        pg_wait.forget_finished()

    def _enter(self, op: str, queued: bool = False) -> int:
        """The thread that asks for a turn. A call from inside a call on the same group, by a signal handler,
        say, is refused: the one around it could never end. So is a new call on a destroyed group, although
        shared memory could serve it."""
        if self.process != inherited.process:
            raise TransportError(
                f"{op} on rank {self.rank}: a forked child cannot exchange on group {self.name!r}, which its "
                f"parent, process {self.process}, made; exchange in the parent, or make a group here",
                **self.where(op),
            )
        if self._registry is not None and not queued and self._group() not in self._registry:
            self.close()  # so that peers which still call raise, too
            raise self.destroyed_error(op)
        thread = threading.get_ident()
        if self._owner == thread:
            raise SparError(
                f"{op} on rank {self.rank}: called from inside a call on the same group {self.name!r}"
            )
        return thread

    @contextlib.contextmanager
    def turn(self, op: str, device: str | None = None, queued: bool = False) -> Iterator[None]:
        """Around what is no exchange, but has a place in the group's order: its calls run one at a time."""
        thread = self._enter(op, queued)
        before = None
        try:
            if (lane := self.lane) is not None and not queued:
                lane.drain()
            with self._lock:
                before = self.calls
                try:
                    self._owner = thread
                    self.progress = LOCAL
                    if self.broken is not None:
                        raise self.broken_error(op)
                    yield
                except BaseException as error:
                    self._account(op, device, error, self.deadline(), before)
                    raise
                finally:
                    self._owner = None
        except BaseException as error:
            if before is None:
                self._interrupt(op, error)
            raise
        finally:
            if self.closing:
                self._close_when_idle()
