"""Wait for a ProcessGroup's collectives so that Ctrl-C and timeouts work; translate its errors into spar's.

A blocking gloo call ignores Ctrl-C, so each collective is issued with the remaining time and polled. On a GPU
a wait is only enqueued, and the copy to the CPU then blocks: such collectives are polled, too.
Destroying a group waits for its collectives, so one that may never end keeps its group alive, even at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions

from .. import _C
from ..errors import ExchangeTimeoutError, PeerLostError, SparError, TransportError
from . import status as peer_status
from .member import Member
from .pg_info import uses_gloo, wire_device
from .status import CallState

# how a rank that gave up with these errors ended its call
_STATES: dict[type[SparError], CallState] = {
    ExchangeTimeoutError: CallState.TIMED_OUT,
    PeerLostError: CallState.PEER_LOST,
}
_SLICE = datetime.timedelta(milliseconds=50)
_DEVICE_SLICE = 0.0005  # seconds
_PUBLISH_AFTER = 0.5  # seconds of waiting until this rank publishes its call and checks the peers' processes


@dataclass(frozen=True, eq=False)
class Unfinished:
    """A collective that this rank issued and did not wait for; the backend's threads still use it."""

    group: dist.ProcessGroup
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


def _give_up(member: Member, op: str, error: type[SparError], text: str) -> SparError:
    """Break the group for good; return the error, with the last call that each peer published."""
    said = peer_status.report(member, op, _STATES.get(error, CallState.ABORTED))
    if error is PeerLostError and said is not None and said.has(member, CallState.TIMED_OUT):
        error = ExchangeTimeoutError  # a peer timed out and disconnected
    why, ranks = _causes(member, error, said)
    words = f"{why}: {text}" if text else why
    member.broken = f"{member.moment(op)}: {words}"
    limit = f" (limit {member.timeout:g} s, SPAR_TIMEOUT)" if error is ExchangeTimeoutError else ""
    rows = str(said) if said is not None and error is ExchangeTimeoutError else ""
    return error(f"{member.title(op)}: {words}{limit}{rows}", **member.where(op), ranks=ranks)


def _causes(
    member: Member, error: type[SparError], said: peer_status.Report | None
) -> tuple[str, tuple[int, ...]]:
    """Return why a call does not end, and the ranks that cause it."""
    if error is ExchangeTimeoutError:
        ranks = said.absent(member, (CallState.RUNNING, *_STATES.values())) if said is not None else ()
        return f"{peer_status.named(member, ranks) or 'a rank'} did not make this call in time", ranks
    if error is PeerLostError:
        everybody = tuple(range(member.world))
        silent = said.absent(member, tuple(_STATES.values())) if said is not None else everybody
        ranks = peer_status.unreachable(member, silent)
        return f"{peer_status.named(member, ranks) or 'a rank'} is gone", ranks
    return "the process group failed", ()


def _translate(member: Member, op: str, error: Exception) -> SparError:
    text = str(error)
    lowered = text.lower()
    if "timed out" in lowered or "timeout" in lowered:
        return _give_up(member, op, ExchangeTimeoutError, text)
    if any(word in lowered for word in ("closed by peer", "connection reset", "broken pipe", "closed")):
        return _give_up(member, op, PeerLostError, text)
    return _give_up(member, op, TransportError, text)


def _is_from_handler(error: Exception) -> bool:
    """Whether a Python function raised it, such as a signal handler, rather than the call in this frame."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is not None


def _ended(member: Member, op: str, work: dist.Work, on_cpu: bool) -> bool:
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
            work.wait()  # it ended with the slice: now it reports how
        except RuntimeError as reason:
            raise _translate(member, op, reason) from reason
    return True


def _wait(member: Member, op: str, collective: Unfinished, deadline: float, enqueue: bool = False) -> None:
    """Wait for one collective; whatever ends the wait early breaks the group and keeps the buffers alive.

    enqueue: if it runs on a device, only make the current stream wait for it.
    """
    work = collective.work
    if work is None:
        raise _give_up(
            member, op, TransportError, "an exception interrupted an earlier collective of this group"
        )
    begun, published, publish_at = 0, False, time.monotonic() + _PUBLISH_AFTER
    try:
        begun = _C.last_call_begin(member.name, op, member.calls)
        on_cpu = collective.buffers[0].device.type == "cpu"
        if enqueue and not on_cpu:
            work.wait()
            return
        patience = 1.0 if on_cpu else 0.0  # of a backend that has the time limit itself
        while not _ended(member, op, work, on_cpu):
            if member.broken is not None:  # another thread closed the group, or was interrupted
                raise member.broken_error(op)
            if time.monotonic() > deadline + patience:
                raise _give_up(member, op, ExchangeTimeoutError, "")
            if not published and time.monotonic() > publish_at:
                peer_status.publish(member, op, CallState.RUNNING)
                published = True
            if published and peer_status.dead(member):  # gloo reports a death to the neighbours only
                raise _give_up(member, op, PeerLostError, "")
        if published:
            peer_status.publish(member, op, CallState.ENDED)
    except BaseException:
        if not work.is_completed() and collective not in _unfinished:
            _unfinished.append(collective)
        raise
    finally:
        _C.last_call_end(begun, member.broken is not None)


def _issue(
    member: Member,
    op: str,
    deadline: float,
    buffers: tuple[torch.Tensor, ...],
    options: Any,
    start: Callable[..., dist.Work],
    *args: object,
) -> Unfinished:
    """Issue start(*args, options), with the remaining time as its timeout.

    Keep its buffers alive if an exception interrupts that.
    """
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise _give_up(member, op, ExchangeTimeoutError, "timed out before anything was sent")
    options.timeout = datetime.timedelta(seconds=max(remaining, 0.001))
    group, work = member.group, None
    try:
        work = start(*args, options)
    except RuntimeError as error:
        raise error if _is_from_handler(error) else _translate(member, op, error) from error
    finally:
        if work is None:
            _unfinished.append(Unfinished(group, None, buffers))
    return Unfinished(group, work, buffers)


def _issue_all_gather(
    member: Member, own: torch.Tensor, op: str, deadline: float
) -> tuple[Unfinished, list[torch.Tensor]]:
    """Gather a tensor of a few bytes from every rank.

    gloo's all_gather takes world - 1 steps one after another, and several times the CPU time of an
    all_to_all, which takes one step.
    """
    group, world = member.group, member.world
    own = own.to(wire_device(group))
    if uses_gloo(group, own.device):
        sent = own.repeat(world)
        received = torch.empty_like(sent)
        args: tuple[Any, ...] = group.alltoall_base, received, sent, [], []
        collective = _issue(member, op, deadline, (sent, received), AllToAllOptions(), *args)
        return collective, list(received.chunk(world))
    rows = [torch.empty_like(own) for _ in range(world)]
    buffers, options = (own, *rows), AllgatherOptions()
    return _issue(member, op, deadline, buffers, options, group.allgather, [rows], [own]), rows


def announce(member: Member, rows: list[torch.Tensor], op: str, deadline: float) -> None:
    """Take part in an all_gather of each row without waiting for the peers; `settle` waits later."""
    _unfinished.extend(_issue_all_gather(member, own, op, deadline)[0] for own in rows)


def settle(member: Member, op: str, deadline: float) -> None:
    """Wait for the group's collectives that this rank issued without waiting."""
    if not _unfinished:
        return
    group = member.group
    for collective in [found for found in list(_unfinished) if found.group is group]:
        _wait(member, op, collective, deadline)
    forget_finished()


def all_gather(member: Member, own: torch.Tensor, op: str, deadline: float) -> list[torch.Tensor]:
    """Gather `own` of every rank (same shape and dtype) on the CPU, in rank order."""
    collective, rows = _issue_all_gather(member, own, op, deadline)
    _wait(member, op, collective, deadline)
    return [row.cpu() for row in rows]


def first_collective(member: Member, device: torch.device, op: str, deadline: float) -> None:
    """Run a small collective on a device, in which torch creates the group's communicator there."""
    with torch.cuda.device(device):
        one = torch.zeros(1, device=device)
        start = member.group.allreduce
        collective = _issue(member, op, deadline, (one,), AllreduceOptions(), start, [one])
        _wait(member, op, collective, deadline)
        one.cpu()


def all_to_all(
    member: Member,
    op: str,
    received: torch.Tensor,
    sent: torch.Tensor,
    received_sizes: list[int],
    sent_sizes: list[int],
    deadline: float,
) -> None:
    """Exchange bytes of any sizes between all ranks: flat uint8 tensors, one size per rank."""
    buffers, start = (received, sent), member.group.alltoall_base
    sizes = received_sizes, sent_sizes
    collective = _issue(member, op, deadline, buffers, AllToAllOptions(), start, *buffers, *sizes)
    _wait(member, op, collective, deadline, enqueue=True)
