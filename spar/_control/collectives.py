# SPDX-License-Identifier: Apache-2.0
"""Wait for a ProcessGroup's collectives so that Ctrl-C and timeouts work; translate its errors into spar's.

A blocking gloo call ignores Ctrl-C, so each collective is issued with the remaining time and polled. On a GPU
a wait is only enqueued, and the copy to the CPU then blocks: such collectives are polled, too. There torch's
watchdog ends the process when a collective exceeds its timeout, so those that are polled get a later one.
Destroying a group waits for its collectives, so one that may never end keeps its group alive, even at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions

from .. import _C
from ..errors import ExchangeTimeoutError, PeerLostError, SparError, TransportError
from . import connecting, status
from .process_group import backend_name, group_timeout, wire_device
from .state import GroupState
from .status import CallState, Report

# how a rank that gave up with these errors ended its call
_STATES: dict[type[SparError], CallState] = {
    ExchangeTimeoutError: CallState.TIMED_OUT,
    PeerLostError: CallState.PEER_LOST,
}
_SLICE = datetime.timedelta(milliseconds=50)
_DEVICE_SLICE = 0.0005  # seconds
# Seconds for which the process's exit waits for gloo's threads.
_EXIT_S = 10.0
_PUBLISH_AFTER = 0.5  # seconds of waiting until this rank publishes its call and asks whether a peer gave up
# Seconds in which a peer that ended its connections publishes why.
_CAUSE_S = 1.0


@dataclass(frozen=True, eq=False)
class Unfinished:
    """A collective that this rank issued and did not wait for; the backend's threads still use it."""

    process_group: dist.ProcessGroup
    work: dist.Work | None  # None: an exception interrupted its issue
    buffers: tuple[torch.Tensor, ...]

    def is_over(self) -> bool:
        return self.work is not None and self.work.is_completed()


_unfinished: list[Unfinished] = []


def forget_finished() -> None:
    """Release the collectives that have ended, and their groups."""
    for collective in list(_unfinished):
        if collective.is_over():
            with contextlib.suppress(ValueError):  # another thread was quicker
                _unfinished.remove(collective)


@atexit.register
def _outlive_the_process() -> None:
    """Leak unfinished collectives: their groups' destructors would delay the exit until they time out."""
    for collective in _unfinished:
        if not collective.is_over():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(collective))


@atexit.register
def _wait_for_releases() -> None:
    """Wait until gloo's threads have released the tensors of collectives that ended, whoever issued them.

    A thread that releases the last reference to a tensor takes the GIL. While Python finalizes, that ends the
    thread (hangs it from 3.14 on): C++ then terminates the process, or a group's destructor waits forever.
    Threads outlive destroy_process_group while a variable holds the group.
    """
    end = time.monotonic() + _EXIT_S
    while _is_gloo_running() and time.monotonic() < end:
        time.sleep(0.001)


def _is_gloo_running() -> bool:
    """Whether a thread of gloo runs, or waits for a core; where there is no /proc, none is seen.

    To read a thread's state releases the GIL, so that a thread which waits for the GIL is awake by then.
    """
    for task in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread ended
            if re.match(r"\d+ \(pt_gloo_runloop\) [RD] ", task.read_text()):
                return True
    return False


def _give_up(
    group: GroupState, op: str, error: type[SparError], text: str, mailboxes: _C.Comm | None = None
) -> SparError:
    """Break the group for good; return the error, with the last call that each peer published."""
    report = None
    if mailboxes is None:
        report = status.report(group, op, _STATES.get(error, CallState.ABORTED))
    if error is PeerLostError and report is not None and report.has(group, CallState.TIMED_OUT):
        error = ExchangeTimeoutError  # a peer timed out and disconnected
    why, ranks = _causes(group, error, report)
    words = f"{why}: {text}" if text else why
    group.broken = f"{group.moment(op)}: {words}"
    if mailboxes is not None:
        with contextlib.suppress(SparError):  # another thread closes it
            mailboxes.fail(op, group.broken, False, True, time.monotonic())
    limit = f" (limit {group.timeout:g} s, SPAR_TIMEOUT)" if error is ExchangeTimeoutError else ""
    rows = str(report) if report is not None and error is ExchangeTimeoutError else ""
    return error(f"{group.title(op)}: {words}{limit}{rows}", **group.where(op), ranks=ranks)


def _causes(group: GroupState, error: type[SparError], report: Report | None) -> tuple[str, tuple[int, ...]]:
    """Return why a call does not end, and the ranks that cause it."""
    if error is ExchangeTimeoutError:
        ranks = report.absent(group, (CallState.RUNNING, *_STATES.values())) if report is not None else ()
        return f"{status.named(group, ranks) or 'a rank'} did not make this call in time", ranks
    if error is PeerLostError:
        silent = report.absent(group, tuple(_STATES.values())) if report is not None else ()
        if len(silent) > 1:  # one died, and others are in no call
            return f"at least one of {status.named(group, silent)} is gone", ()
        return f"{status.named(group, silent) or 'a rank'} is gone", silent
    return "the process group failed", ()


def _translate(
    group: GroupState, op: str, error: Exception, deadline: float, mailboxes: _C.Comm | None
) -> SparError:
    """Return an error of the backend as one of spar's; raise its cause if a mailbox has it."""
    text = str(error)
    lowered = text.lower()
    end = time.monotonic() + _CAUSE_S
    while mailboxes is not None and time.monotonic() < end:
        mailboxes.poll(deadline)
        time.sleep(0.01)
    if "timed out" in lowered or "timeout" in lowered:
        return _give_up(group, op, ExchangeTimeoutError, text, mailboxes)
    lost = any(word in lowered for word in ("closed by peer", "connection reset", "broken pipe", "closed"))
    # With mailboxes, this rank would have seen that the peer is dead.
    if lost and mailboxes is None:
        return _give_up(group, op, PeerLostError, text)
    return _give_up(group, op, TransportError, text, mailboxes)


def _is_from_handler(error: Exception) -> bool:
    """Whether a Python function raised it, such as a signal handler, rather than the call in this frame."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is not None


def _ended(
    group: GroupState,
    op: str,
    work: dist.Work,
    on_cpu: bool,
    deadline: float,
    mailboxes: _C.Comm | None,
) -> bool:
    """Wait for one slice of time; raise the work's failure as an error of spar's."""
    if not on_cpu and not work.is_completed():
        time.sleep(_DEVICE_SLICE)
        return False
    try:
        work.wait(_SLICE)
    except RuntimeError as error:
        if _is_from_handler(error):
            raise
        if not work.is_completed():
            return False
        try:
            # It ended with the slice: this wait raises its failure.
            work.wait()
        except RuntimeError as reason:
            raise _translate(group, op, reason, deadline, mailboxes) from reason
    return True


def _wait(
    group: GroupState,
    op: str,
    collective: Unfinished,
    deadline: float,
    enqueue: bool = False,
    mailboxes: _C.Comm | None = None,
) -> None:
    """Wait for one collective; whatever ends the wait early breaks the group and keeps the buffers alive.

    enqueue: if it runs on a device, only make the current stream wait for it.
    mailboxes: of the ranks, by which they compared the call; the peers say there why it does not end.
    """
    work = collective.work
    if work is None:
        raise _give_up(
            group, op, TransportError, "an exception interrupted an earlier collective of this group"
        )
    begun, ended, watch, watch_at = 0, True, None, time.monotonic() + _PUBLISH_AFTER
    try:
        if mailboxes is None:
            begun = _C.last_call_begin(group.name, op, group.calls)
        on_cpu = collective.buffers[0].device.type == "cpu"
        if enqueue and not on_cpu:
            work.wait()
            return
        # A backend that has the time limit itself may end a moment later.
        patience = 1.0 if on_cpu else 0.0
        while not _ended(group, op, work, on_cpu, deadline, mailboxes):
            if mailboxes is not None:
                mailboxes.poll(deadline)
            if group.broken is not None:  # another thread closed the group, or was interrupted
                raise group.broken_error(op)
            if mailboxes is None and watch is None and time.monotonic() > watch_at:
                watch = status.Watch(group, op, CallState.RUNNING)
            if time.monotonic() > deadline + patience:
                raise _give_up(group, op, ExchangeTimeoutError, "", mailboxes)
            if watch is not None and (error := _passed_on(group, watch.report())):
                raise _give_up(group, op, error, "")
        if watch is not None:
            watch.stop(CallState.ENDED)
    except BaseException:
        ended = False
        if watch is not None:
            watch.stop(CallState.ABORTED if group.broken is None else None)
        if not work.is_completed() and collective not in _unfinished:
            _unfinished.append(collective)
        raise
    finally:
        _C.last_call_end(begun, not ended)


def _passed_on(group: GroupState, report: Report) -> type[SparError] | None:
    """Return the error with which a peer gave up in this call or before.

    Such a peer makes no other call on the group, and its connections may not tell every rank.
    """
    if not group.token:  # older groups have set-ups of the same name
        return None
    states = {place.state for place in report.places if place is not None and place.call <= group.calls}
    return next((error for error, state in _STATES.items() if state in states), None)


def _issue(
    group: GroupState,
    op: str,
    deadline: float,
    buffers: tuple[torch.Tensor, ...],
    options: Any,
    start: Callable[..., dist.Work],
    *args: object,
    mailboxes: _C.Comm | None = None,
    polled: bool = True,
) -> Unfinished:
    """Issue start(*args, options), with the remaining time as its timeout.

    Keep its buffers alive if an exception interrupts that.

    polled: whether `_wait` polls it, or a later call. Then on a GPU torch's timeout follows spar's by the
        group's own, in which the program can handle spar's error.
    """
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        if mailboxes is not None:
            mailboxes.poll(deadline)
        raise _give_up(group, op, ExchangeTimeoutError, "timed out before anything was sent", mailboxes)
    process_group, device, work = group.process_group, buffers[0].device, None
    if polled and device.type != "cpu":
        remaining += group_timeout(process_group)
    options.timeout = datetime.timedelta(seconds=max(remaining, 0.001))

    def poll() -> None:
        if group.broken is not None:
            raise group.broken_error(op)
        if time.monotonic() > deadline:
            raise _give_up(group, op, ExchangeTimeoutError, "", mailboxes)

    try:
        if connecting.may_connect(process_group, device):
            result = connecting.issue(process_group, device, lambda: start(*args, options), poll)
            if isinstance(result, Exception):
                raise result
            work = result
        else:
            work = start(*args, options)
    except RuntimeError as error:
        if _is_from_handler(error):
            raise
        raise _translate(group, op, error, deadline, mailboxes) from error
    finally:
        if work is None:
            _unfinished.append(Unfinished(process_group, None, buffers))
    return Unfinished(process_group, work, buffers)


def _issue_all_gather(
    group: GroupState, tensor: torch.Tensor, op: str, deadline: float
) -> tuple[Unfinished, list[torch.Tensor]]:
    """Gather a tensor of a few bytes from every rank.

    gloo's all_gather takes world - 1 steps one after another, and several times the CPU time of an
    all_to_all, which takes one step.
    """
    process_group, world = group.process_group, group.world
    tensor = tensor.to(wire_device(process_group))
    if backend_name(process_group, tensor.device) == "gloo":
        sent = tensor.repeat(world)
        received = torch.empty_like(sent)
        args: tuple[Any, ...] = process_group.alltoall_base, received, sent, [], []
        collective = _issue(group, op, deadline, (sent, received), AllToAllOptions(), *args)
        return collective, list(received.chunk(world))
    rows = [torch.empty_like(tensor) for _ in range(world)]
    buffers, options = (tensor, *rows), AllgatherOptions()
    return _issue(group, op, deadline, buffers, options, process_group.allgather, [rows], [tensor]), rows


def announce(group: GroupState, rows: list[torch.Tensor], op: str, deadline: float) -> None:
    """Take part in an all_gather of each row without waiting for the peers; `settle` waits later."""
    _unfinished.extend(_issue_all_gather(group, row, op, deadline)[0] for row in rows)


def settle(group: GroupState, op: str, deadline: float) -> None:
    """Wait for the group's collectives that this rank issued without waiting."""
    if not _unfinished:
        return
    process_group = group.process_group
    for collective in [pending for pending in list(_unfinished) if pending.process_group is process_group]:
        _wait(group, op, collective, deadline)
    forget_finished()


def all_gather(group: GroupState, tensor: torch.Tensor, op: str, deadline: float) -> list[torch.Tensor]:
    """Gather `tensor` of every rank (same shape and dtype) on the CPU, in rank order."""
    collective, rows = _issue_all_gather(group, tensor, op, deadline)
    _wait(group, op, collective, deadline)
    return [row.cpu() for row in rows]


def first_collective(group: GroupState, device: torch.device, op: str, deadline: float) -> None:
    """Run a small collective on a device, in which torch creates the group's communicator there."""
    with torch.cuda.device(device):
        one = torch.zeros(1, device=device)
        start = group.process_group.allreduce
        collective = _issue(group, op, deadline, (one,), AllreduceOptions(), start, [one])
        _wait(group, op, collective, deadline)
        one.cpu()


def all_to_all(
    group: GroupState,
    op: str,
    received: torch.Tensor,
    sent: torch.Tensor,
    received_sizes: list[int],
    sent_sizes: list[int],
    deadline: float,
    mailboxes: _C.Comm | None,
) -> None:
    """Exchange bytes of any sizes between all ranks: flat uint8 tensors, one size per rank."""
    buffers, start = (received, sent), group.process_group.alltoall_base
    args = *buffers, received_sizes, sent_sizes
    options = AllToAllOptions()
    collective = _issue(
        group, op, deadline, buffers, options, start, *args, mailboxes=mailboxes, polled=False
    )
    _wait(group, op, collective, deadline, enqueue=True, mailboxes=mailboxes)
