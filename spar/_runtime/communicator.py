"""A rank's part in one process group: rendezvous, the choice of transport, the group's calls in order.

State hangs on the ProcessGroup object, weakly; names are reused after destroy and init.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import _C, cuda, fallback, inherited, rendezvous, whereabouts, wire
from .agreement import (
    LOCAL,
    OVER,
    SHARED,
    announce_failure,
    failure_text,
    is_out_of_memory,
    mark_reported,
    mismatch,
)
from .errors import ExchangeTimeoutError, GroupBrokenError, MismatchError, SparError, TransportError
from .fallback import SCALE_TYPES, apply_scale, call_text
from .rendezvous import Transport

CALLS = dict.fromkeys(_C.transports(), 0)  # by each transport, in this process
_handles = itertools.count(1)


class Place(NamedTuple):
    """Where a call is made: whole numbers, which a compiled function may keep."""

    handle: int  # the communicator's; never used again in this process
    world: int
    rank: int


ALONE = Place(0, 1, 0)  # without a group


class Communicator:
    """What spar knows of one process group on this rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._process = inherited.maker(group)
        self.when_gone: weakref.finalize[[int, int], dist.ProcessGroup] | None = None  # forgets it
        self.world = group.size()
        self.rank = group.rank()
        self.place = Place(next(_handles), self.world, self.rank)
        self.name = wire.group_name(group)
        self.calls = 0
        self.progress = OVER  # of the newest call
        self.broken: str | None = None
        self.closing = False  # by a thread that found a call under way, which closes when it ends
        self.check = True
        self.synchronous = False  # the nccl transport's comparisons
        self.timeout: float | None = None
        self.facts: bytes | None = None
        self.local_ranks = self.world  # of all groups on this host, as far as the launcher says
        self.transports: dict[str, Transport] = {}
        self.comms: dict[str, _C.Comm] = {}  # by device, of the transports that the C core runs
        self.connecting: _C.Comm | None = None  # in its set-up
        self.device: cuda.Device  # set up with the nccl transport
        self.own_output = False
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread whose call it is

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise SparError(f"process group {self.name!r} was destroyed", group=self.name, rank=self.rank)
        return group

    def where(self, op: str) -> dict[str, Any]:
        """The details that spar's errors carry."""
        return {"op": op, "group": self.name, "call": self.calls, "rank": self.rank}

    def moment(self, op: str) -> str:
        """When something happened, for a message."""
        return f"call {self.calls} ({op})" if self.calls else f"the group's set-up ({op})"

    def title(self, op: str) -> str:
        """What an error's message begins with."""
        when = f"call {self.calls} on" if self.calls else "set-up of"
        return f"{op}, {when} group {self.name!r}, rank {self.rank} of {self.world}"

    def transport(self, device: str) -> Transport:
        """The transport for a device type, as far as it is known; never communicates."""
        if self.world == 1:
            return Transport(None, "a group of one exchanges nothing", device, 1)
        known = self.transports.get(device)
        if known is not None:
            return known
        reason = "the group has not exchanged anything yet"
        return Transport(None, reason, device, self.world, self._rejected(device))

    def _rejected(self, device: str) -> tuple[tuple[str, str], ...]:
        """What is known not to serve CUDA tensors, before the other ranks are met by this rank alone."""
        if device != "cuda":
            return ()
        cuda.find_libraries()
        own = _C.facts() * self.world if self.facts is None else self.facts
        try:
            rejected = _C.choose(own, device, ())[2]
        except (ValueError, SparError):  # settings that the first exchange will tell of
            return ()
        if self.facts is None:
            return tuple((name, re.sub(r"^rank 0\b", f"rank {self.rank}", why)) for name, why in rejected)
        return rejected

    def set_up(self, op: str, device: torch.device, deadline: float) -> None:
        """Set a transport for the device type up, with all ranks, where there is none yet."""
        if device.type not in self.transports:
            rendezvous.set_up(self, op, device, deadline)

    def processes(self) -> list[tuple[int, int]]:
        """(id, nonce) of each rank's process; empty before the set-up, or where some are not known."""
        found = _C.processes(self.facts) if self.facts is not None else []
        return found if all(process for process, _ in found) else []

    def deadline(self) -> float:
        """When a call that is entered now must have ended (time.monotonic)."""
        if self.timeout is None:
            with contextlib.suppress(ValueError):  # the set-up reports an invalid value on all ranks
                self.timeout = _C.env("timeout")
            self.timeout = self.timeout or wire.group_timeout(self.group)
        return time.monotonic() + self.timeout

    def exchange(
        self,
        op: str,
        input_: torch.Tensor,
        args: tuple[int, ...],
        scale: tuple[float, bool],
        records: bool,
    ) -> torch.Tensor:
        """One exchange of one tensor: the output is new, contiguous, and this rank's own."""
        deadline = self.deadline()
        thread = self._enter(op)
        try:
            with self._lock:  # Python looks for signals after it, and not before its release is sure
                before = self.calls
                try:
                    self._owner = thread
                    self.progress = LOCAL
                    if self.broken is not None:
                        raise self.broken_error(op)
                    return self._exchange(op, input_, args, scale, records, deadline)
                except BaseException as error:
                    self._account(op, input_.device.type, error, deadline, before)
                    raise
                finally:
                    self._owner = None
        finally:
            if self.closing:
                self._close_when_idle()

    def _exchange(
        self,
        op: str,
        input_: torch.Tensor,
        args: tuple[int, ...],
        scale: tuple[float, bool],
        records: bool,
        deadline: float,
    ) -> torch.Tensor:
        factor, divide = scale
        if input_.is_conj() or input_.is_neg():
            input_ = input_.resolve_conj().resolve_neg()
        device = "cpu" if input_.is_cpu else input_.device.type
        comm = self.comms.get(device)
        if comm is None and device not in self.transports:
            self.set_up(op, input_.device, deadline)
            comm = self.comms.get(device)
            if self.broken is not None:  # closed meanwhile
                raise self.broken_error(op)
        self.calls += 1
        text = call_text(input_.dtype, device, factor, divide, records)
        tensor = (input_.element_size(), input_.shape, input_.stride(), args)
        if comm is None or device == "cuda":
            if comm is not None:
                cuda.check_place(self, self.device, input_, op)
            plan = _C.plan(op, self.world, self.rank, _C.SIDE_PULL, (tensor,))
            output = torch.empty(plan.out_shapes[0], dtype=input_.dtype, device=input_.device)
            self._run(comm, fallback.Call(op, plan, input_, output, factor, divide, text, deadline))
            return output
        kind, address = SCALE_TYPES.get(input_.dtype, 0), input_.data_ptr()
        try:
            self.progress = OVER  # C reports whatever fails in it
            capsule = comm.exchange(op, tensor, address, kind, divide, factor, text, self.calls, deadline)
        except SparError as error:
            raise self._explain(comm, op, error) from None
        except Exception as error:  # of this rank alone: C has reported it
            mark_reported(error)
            raise
        CALLS[comm.transport] += 1
        output = torch._C._from_dlpack(capsule)
        if kind == 0:  # the core knows its size alone
            if output.dtype != input_.dtype:
                output = output.view(input_.dtype)
            apply_scale(output, factor, divide)
        return output.clone() if self.own_output else output

    def _run(self, comm: _C.Comm | None, call: fallback.Call) -> None:
        """A call whose output is torch's."""
        if comm is None:
            cuda.refuse_capture(call.op, call.input.device, "the torch transport waits for the device")
            fallback.run(self, call)
            CALLS["torch"] += 1
            return
        try:
            cuda.exchange(self, comm, self.device, call)
        except SparError as error:
            raise error if error.op is not None else self._explain(comm, call.op, error) from None
        CALLS[comm.transport] += 1

    def _explain(self, comm: _C.Comm, op: str, error: SparError) -> SparError:
        """An error of the C core with what only this side knows."""
        if isinstance(error, MismatchError) and comm.shown(0) is not None:
            texts = [comm.shown(rank) or "" for rank in range(self.world)]
            return mismatch(self, op, texts)
        text, rows = str(error), ""
        if isinstance(error, ExchangeTimeoutError):
            text += f" (limit {self.timeout:g} s, SPAR_TIMEOUT)"
            places = [comm.where(rank) or "" for rank in range(self.world)]
            rows = whereabouts.listing(places) if all(places) else ""
        ranks = re.findall(r"^rank (\d+)|rank (\d+) \(process", text)
        return type(error)(
            f"{self.title(op)}: {text}{rows}",
            **self.where(op),
            ranks=tuple(int(first or other) for first, other in ranks),
        )

    # ---- what ends a call early ----

    def fail(self, op: str, device: str | None, error: BaseException, why: str = "") -> None:
        """Report that this rank fails before its next call on the group, which counts as that call.

        It does not wait for the peers, unless an earlier failure has not reached them yet.

        Args:
            op: the operation's name.
            device: the type of the device where the call's tensors lie; None: not known.
            error: what this rank raises.
            why: what the peers read instead of the error's text.
        """
        with contextlib.suppress(SparError), self.turn(op):
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
        comm, why = self.comms.get(device or ""), why or failure_text(error)
        with contextlib.suppress(SparError):
            if comm is not None and not (device == "cuda" and self.synchronous):
                comm.fail(op, why, is_out_of_memory(error), False, deadline)
            else:
                announce_failure(self, op, error, why, deadline)

    def _can_report(self, device: str | None) -> bool:
        """Whether the peers would take notice of a failure, on the way by which they wait for this call."""
        if device is None and self.transports:
            return False  # by several transports, and it is not known which
        known = self.transports.get(device or "")
        return self.check or known is None or known.name != "torch"

    def _break(self, op: str, error: BaseException) -> None:
        """Break the group for good, on all ranks that can be told; the others reach their limit."""
        if isinstance(error, Exception):
            self.broken = f"{self.moment(op)} failed on rank {self.rank}: {failure_text(error)}"
        else:
            self.broken = f"{self.moment(op)} was interrupted on rank {self.rank}"
        for comm in self.comms.values():
            with contextlib.suppress(SparError):  # another thread closes it
                comm.fail(op, self.broken, False, True, time.monotonic())

    def abort_if_broken(self) -> bool:
        """Ends what hangs in torch's communicator; whether there is nothing to look at any more."""
        comm = self.comms.get("cuda")
        if comm is not None and comm.broken is None:
            return False
        if comm is not None:
            self.device.abort()
        return True

    def close(self) -> None:
        """End spar's use of the group, without waiting; a call under way raises GroupBrokenError."""
        if self._process != inherited.process:  # a thread of the parent may have held the lock at the fork
            return
        self.broken = "it was closed"
        self.closing = True
        for comm in (*self.comms.values(), self.connecting):
            if comm is not None:
                comm.abort()
        self._close_when_idle()

    def _close_when_idle(self) -> None:
        """Close what the group has in C, unless a call uses it: that call then does so at its end."""
        while self.closing and self._lock.acquire(blocking=False):
            try:
                for comm in self.comms.values():
                    comm.close()
                self.comms.clear()
                self.closing = False
            finally:
                self._lock.release()
        wire.forget_finished()

    def _enter(self, op: str) -> int:
        """The thread that asks for a turn. A call from inside a call on the same group, by a signal handler,
        say, is refused: the one around it could never end."""
        if self._process != inherited.process:
            raise TransportError(
                f"{op} on rank {self.rank}: a forked child cannot exchange on group {self.name!r}, which its "
                f"parent, process {self._process}, made; exchange in the parent, or make a group here",
                **self.where(op),
            )
        thread = threading.get_ident()
        if self._owner == thread:
            raise SparError(
                f"{op} on rank {self.rank}: called from inside a call on the same group {self.name!r}"
            )
        return thread

    def broken_error(self, op: str) -> GroupBrokenError:
        return GroupBrokenError(
            f"{op} on rank {self.rank}: group {self.name!r} is broken: {self.broken}",
            **self.where(op),
        )

    @contextlib.contextmanager
    def turn(self, op: str, device: str | None = None) -> Iterator[None]:
        """Around what is no exchange, but has a place in the group's order: its calls run one at a time."""
        thread = self._enter(op)
        try:
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
        finally:
            if self.closing:
                self._close_when_idle()
