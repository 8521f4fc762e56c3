"""Waiting on a ProcessGroup so that Ctrl-C and time limits hold, and its errors in spar's words.

A blocking gloo call ignores Ctrl-C, and one that is abandoned holds the process's exit until its own time
limit: so each is issued with the remaining limit, and waited for in slices.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions

from . import _C, whereabouts
from .errors import ExchangeTimeoutError, PeerLostError, SparError, TransportError

if TYPE_CHECKING:
    from .communicator import Communicator

_SLICE = datetime.timedelta(milliseconds=50)
_DEFAULT_TIMEOUT = 1800.0
_TELL_AFTER = 0.5  # seconds of waiting, before this rank tells where it is and looks at the others' processes
_abandoned: list[tuple[dist.Work | None, tuple[torch.Tensor, ...]]] = []  # their threads may still touch them


def group_name(group: dist.ProcessGroup) -> str:
    """The group's name; groups that torch did not register have none."""
    try:
        return group.group_name or "unnamed"
    except RuntimeError:
        return "unnamed"


def group_timeout(group: dist.ProcessGroup) -> float:
    """The ProcessGroup's own limit in seconds; 1800 where it cannot be read."""
    with contextlib.suppress(AttributeError, RuntimeError):
        timeout: datetime.timedelta = group._get_backend(wire_device(group)).options._timeout
        return timeout.total_seconds()
    return _DEFAULT_TIMEOUT


def wire_device(group: dist.ProcessGroup, wanted: torch.device | None = None) -> torch.device:
    """A device whose tensors the group can move: the wanted one, else the CPU, else the group's own."""
    for device in (wanted, torch.device("cpu")):
        if device is not None:
            with contextlib.suppress(RuntimeError):
                group._get_backend(device)
                return device
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            group._get_backend(device)
            return torch.device(device.type, torch.accelerator.current_device_index())
    raise TransportError(f"process group {group_name(group)!r} has no backend")


def _options(kind: Any, comm: Communicator, op: str, deadline: float) -> Any:
    """A collective's options, with the time that is left as its own limit."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise _give_up(comm, op, ExchangeTimeoutError, "the limit had passed before anything was sent")
    options = kind()
    options.timeout = datetime.timedelta(seconds=max(remaining, 0.001))
    return options


def _give_up(comm: Communicator, op: str, error: type[SparError], text: str) -> SparError:
    """Breaks the group for good; returns what to raise, with what the other ranks tell of themselves."""
    said = whereabouts.report(comm, op, error.__name__)
    if error is PeerLostError and said is not None and said.somebody(comm, ExchangeTimeoutError.__name__):
        error = ExchangeTimeoutError  # who reached its limit hung up
    why, ranks = _causes(comm, error, said)
    comm.broken = f"call {comm.calls} ({op}): {why}: {text}" if text else f"call {comm.calls} ({op}): {why}"
    words = comm.broken.split(": ", 1)[1]
    limit = f" (limit {comm.timeout:g} s, SPAR_TIMEOUT)" if error is ExchangeTimeoutError else ""
    rows = str(said) if said is not None and error is ExchangeTimeoutError else ""
    return error(
        f"{op}, call {comm.calls} on group {comm.name!r}, rank {comm.rank} of {comm.world}: "
        f"{words}{limit}{rows}",
        **comm.where(op),
        ranks=ranks,
    )


def _causes(
    comm: Communicator, error: type[SparError], said: whereabouts.Report | None
) -> tuple[str, tuple[int, ...]]:
    """Why a call does not end, and which ranks it is for."""
    gave_up = (PeerLostError.__name__, ExchangeTimeoutError.__name__)
    if error is ExchangeTimeoutError:
        ranks = said.absent(comm, ("is in", *gave_up)) if said is not None else ()
        return f"{whereabouts.named(comm, ranks) or 'a rank'} did not come in time", ranks
    if error is PeerLostError:
        silent = said.absent(comm, gave_up) if said is not None else tuple(range(comm.world))
        ranks = whereabouts.unreachable(comm, silent)
        return f"{whereabouts.named(comm, ranks) or 'a rank'} is gone", ranks
    return "the process group failed", ()


def _translate(comm: Communicator, op: str, error: Exception) -> SparError:
    text = str(error)
    lowered = text.lower()
    if "timed out" in lowered or "timeout" in lowered:
        return _give_up(comm, op, ExchangeTimeoutError, text)
    if any(word in lowered for word in ("closed by peer", "connection reset", "broken pipe", "closed")):
        return _give_up(comm, op, PeerLostError, text)
    return _give_up(comm, op, TransportError, text)


def _ended(work: dist.Work) -> bool:
    """Waits one slice. Raises what the work failed with."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it ended while the slice did: now it tells how
    return True


def _run(
    comm: Communicator,
    op: str,
    buffers: tuple[torch.Tensor, ...],
    deadline: float,
    issue: Callable[[], dist.Work],
) -> None:
    """Issues one collective and waits for it; whatever ends the wait early keeps its buffers alive."""
    work = None
    begun = _C.begin(comm.name, op, comm.calls)
    told, tell_at = False, time.monotonic() + _TELL_AFTER
    try:
        work = issue()
        if buffers[0].device.type != "cpu":
            work.wait()  # puts the wait into the device's own queue
            return
        while not _ended(work):
            if time.monotonic() > deadline + 1.0:  # its own limit is the deadline: let it speak first
                raise _give_up(comm, op, ExchangeTimeoutError, "")
            if not told and time.monotonic() > tell_at:
                whereabouts.tell(comm, op, "is in")
                told = True
            if told and whereabouts.dead(comm):  # gloo tells its neighbours alone
                raise _give_up(comm, op, PeerLostError, "")
        if told:
            whereabouts.tell(comm, op, "has ended")
    except BaseException as error:
        if work is None or not work.is_completed():
            _abandoned.append((work, buffers))
        if isinstance(error, RuntimeError) and not isinstance(error, SparError):
            raise _translate(comm, op, error) from error
        raise
    finally:
        _C.end(begun, comm.broken is not None)


def all_gather(comm: Communicator, own: torch.Tensor, op: str, deadline: float) -> list[torch.Tensor]:
    """Everybody's `own` (same shape and dtype), on the CPU, in rank order."""
    group = comm.group
    own = own.to(wire_device(group))
    rows = [torch.empty_like(own) for _ in range(comm.world)]
    options = _options(AllgatherOptions, comm, op, deadline)
    _run(comm, op, (own, *rows), deadline, lambda: group.allgather([rows], [own], options))
    return [row.cpu() for row in rows]


def meet(comm: Communicator, device: torch.device, op: str, deadline: float) -> None:
    """A tiny collective on a device: in a group's first one there torch makes its communicator."""
    group = comm.group
    with torch.cuda.device(device):
        one = torch.zeros(1, device=device)
        options = _options(AllreduceOptions, comm, op, deadline)
        _run(comm, op, (one,), deadline, lambda: group.allreduce([one], options))
        one.cpu()


def all_to_all(
    comm: Communicator,
    op: str,
    received: torch.Tensor,
    sent: torch.Tensor,
    received_sizes: list[int],
    sent_sizes: list[int],
    deadline: float,
) -> None:
    """One uneven all_to_all of bytes: flat uint8 tensors, sizes for each rank."""
    group = comm.group
    options = _options(AllToAllOptions, comm, op, deadline)
    _run(
        comm,
        op,
        (received, sent),
        deadline,
        lambda: group.alltoall_base(received, sent, received_sizes, sent_sizes, options),
    )
