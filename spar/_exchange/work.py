# SPDX-License-Identifier: Apache-2.0
"""`async_op=True`: start an exchange, and wait for it later, also in backward.

Autograd sees two functions. `SparStart` begins the exchange; `Work.wait` rebases the outputs on `SparWait`.
In backward `SparWait` begins the transposed exchange and passes the gradients on, and `SparStart` waits for
it. Autograd runs what was recorded last first: the exchanges that forward had in flight together, and what it
computed meanwhile, overlap in backward, too.

Ranks may wait in different orders, or make some of the calls sync, but all issue them in one order. So
backward follows the order of issue: `SparWait` begins no exchange before those that were issued later. It
leaves it to `SparStart`, which autograd runs in the reverse order of issue on every rank.
"""

from __future__ import annotations

import datetime
import functools
import logging
import math
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch

from .._checks import check_number
from .._control.mismatch import add_advice
from .._group.group import Group
from .._group.profiling import event, is_profiled
from .._group.queue import Job
from .._group.registry import group_at
from .._transports.channel import Channel
from .._transports.cuda import Beside
from ..errors import ExchangeTimeoutError, SparError
from .arguments import Arguments
from .autograd import apply
from .exchange import Exchange, Tensors
from .observers import have_tangents, is_any_traced, is_transformed, must_record
from .outputs import checked, note_write, write_to

_NOT_TRACED = "call it outside of compiled code, or without async_op"
_log = logging.getLogger("spar")


class Work:
    """An exchange in flight, which `async_op=True` returns with its output; as `torch.distributed.Work`.

    Until `wait()` has returned, do not read the output, and do not modify the input. The exchange goes on if
    its Work is dropped.
    """

    _seen = True  # until there is an exchange that may fail
    _tensors = 0  # how many a list has

    def __init__(
        self,
        job: Job | None = None,
        beside: Beside | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._job, self._beside, self._finish = job, beside, finish
        self._seen = job is None

    def wait(self, timeout: float | datetime.timedelta | None = None) -> bool:
        """Block until the output is complete; on a GPU, let the current stream wait for it.

        Args:
            timeout: in seconds, or a timedelta; None or infinity: no limit but SPAR_TIMEOUT. The exchange
                goes on after it; wait again.

        Returns:
            True.

        Raises:
            ExchangeTimeoutError: it is not over after the timeout, or after SPAR_TIMEOUT from its turn.
            SparError: what ended the exchange; again at each wait.
            TypeError: timeout is not a number, a timedelta or None.
            ValueError: timeout is NaN.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
        if seconds is not None and seconds != math.inf:
            check_number("Work.wait", "timeout", seconds)
        job = self._job
        if job is not None:
            with event(job.op, in_flight=True) if is_profiled() else nullcontext():
                over = job.wait(seconds)
            if not over:
                where = f"{job.op} on rank {job.group.rank}"
                text = f"{where}: still in flight after a wait of {seconds:g} s; wait again"
                raise ExchangeTimeoutError(text, op=job.op, rank=job.group.rank)
            self._seen = True
            if job.error is not None:
                add_advice(job.error, self._tensors)
                raise job.error
        if self._beside is not None:
            self._beside.join()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        """Return whether `wait()` would return, or raise, at once."""
        over = self._job is None or self._job.over
        return over and (self._beside is None or self._beside.is_over())

    def __del__(self) -> None:
        if not self._seen and self._job is not None and self._job.over and self._job.error is not None:
            _log.warning("%s: failed, and nothing waited for it: %s", self._job.op, self._job.error)


class Works(Work):
    """The exchanges of one call, whose list of tensors is longer than what one exchange moves."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: float | datetime.timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
        begin = time.monotonic()
        for work in self._works:
            work.wait(None if seconds is None else max(seconds - (time.monotonic() - begin), 0.0))
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _allocate(exchange: Exchange, inputs: Tensors, group: Group, channel: Channel) -> list[torch.Tensor]:
    """Return outputs for an exchange that has not begun."""
    try:
        return [channel.allocate(shape, inputs[0]) for shape in exchange.shapes(inputs)]
    except SparError as error:
        name, call = exchange.name, group.count() + 1
        text, where = f"{group.title(name, call)}: {error}", group.where(name, call)
        raise type(error)(text, **where, ranks=error.ranks) from None


def _give(
    exchange: Exchange, inputs: Tensors, outs: list[torch.Tensor] | None, forward: int
) -> tuple[list[torch.Tensor], Beside]:
    """Give an exchange to the side stream of its device, in whose order new outputs are allocated."""
    beside = Beside(inputs[0].device, [*inputs, *exchange.reads, *(outs or ())])
    targets = None if outs is None else [out.data for out in outs]
    with torch.no_grad(), beside.entered():
        made = exchange.run(inputs, forward, targets, False, queued=True)
    if outs is not None:
        return outs, beside
    beside.lend(made)
    return list(made), beside


def begin(
    exchange: Exchange,
    inputs: Tensors,
    outs: list[torch.Tensor] | None,
    may_block: bool = False,
    forward: int = 0,
) -> tuple[Tensors, Work | None]:
    """Start an exchange; return its outputs, and what waits for them; None: they are complete.

    may_block: make the exchange at once where it would take its time from what the rank computes meanwhile.
    forward: as in `Exchange.run`.
    """
    before = exchange.begin()
    try:
        first = inputs[0]
        if first.is_meta or is_any_traced(inputs):
            return exchange.run(inputs), None
        group = exchange.group if isinstance(exchange.group, Group) else group_at(exchange.group.handle)
        channel = group.channels.get("cpu" if first.is_cpu else first.device.type)
        if channel is None:
            channel = group.channel(exchange.name, first.device)
        if may_block and sum([x.nbytes for x in inputs]) < channel.in_flight_from:
            return exchange.run(inputs, forward, traced=False), None
        has_outs, job = outs is not None, None
        if channel.enqueues:
            outs, beside = _give(exchange, inputs, outs, forward)
        else:
            if outs is None:
                outs = _allocate(exchange, inputs, group, channel)
            # other tensors of the same memory: autograd changes the metadata of the outputs meanwhile
            targets, beside = [out.data for out in outs], Beside(first.device, [*inputs, *outs])
            job = group.enqueue(
                exchange.name, lambda: exchange.run(inputs, forward, targets, False, queued=True)
            )
        if has_outs:
            note_write(outs)
        return outs, Work(job, beside, functools.partial(note_write, outs) if has_outs else None)
    except BaseException as error:
        exchange.report(before, inputs, error)
        raise


_flights: weakref.WeakValueDictionary[tuple[int, int], _Flight] = weakref.WeakValueDictionary()
_autograd_run: Callable[[], int] = torch._C._current_graph_task_id


class _Begun(NamedTuple):
    """An exchange of gradients in flight: in which run of autograd, of which tensors, and their versions."""

    run: int
    grads: Tensors
    versions: list[int]
    outputs: Tensors
    work: Work | None


class _Flight:
    """One recorded exchange, from its start to the end of its backward.

    Attributes:
        call: its number among the group's calls.
        later: the exchanges that were issued between its start and its wait; None: also others than flights.
        run: the run of autograd in which its newest backward began.
    """

    def __init__(self, exchange: Exchange, at_once: bool = False) -> None:
        self.exchange, self.at_once = exchange, at_once
        self.work: Work | None = None
        self.call = self.run = 0
        self.later: list[weakref.ref[_Flight]] | None = None
        self.begun: _Begun | None = None

    def issued(self) -> None:
        self.call = self.exchange.begin()
        _flights[self.exchange.group.handle, self.call] = self

    def waited(self, outputs: Tensors) -> None:
        """Note what was issued meanwhile, and whether hooks see the gradients before they are exchanged."""
        handle = self.exchange.group.handle
        numbers = range(self.call + 1, self.exchange.begin() + 1)
        flights = [flight for n in numbers if (flight := _flights.get((handle, n))) is not None]
        if len(flights) == len(numbers) and not any(output._backward_hooks for output in outputs):
            self.later = [weakref.ref(flight) for flight in flights]

    def may_begin(self) -> bool:
        """Whether all that was issued later has begun its backward, or never will."""
        if self.later is None:
            return False
        later = [flight for ref in self.later if (flight := ref()) is not None]
        return all(flight.run == _autograd_run() for flight in later)

    def begin_backward(self, grads: Tensors) -> None:
        self.run = _autograd_run()
        outputs, work = begin(self.exchange.transposed, grads, None, forward=self.call)
        self.begun = _Begun(self.run, grads, [grad._version for grad in grads], outputs, work)

    def end_backward(self, grads: Tensors) -> Tensors | None:
        """Wait for the exchange of the gradients; return None if none was begun."""
        begun, self.begun = self.begun, None
        if begun is None or begun.run != _autograd_run():
            self.run = _autograd_run()
            return None
        if begun.work is not None:
            begun.work.wait()
        changed = [a is not b for a, b in zip(begun.grads, grads, strict=True)]
        if any(changed) or [grad._version for grad in grads] != begun.versions:
            raise SparError(
                f"{self.exchange.transposed.name} on rank {self.exchange.group.rank}: the gradient of call "
                f"{self.call} "
                "was changed after its exchange had begun, and the peers received it as it was; register "
                "hooks on the output after Work.wait() has returned, not on its grad_fn before"
            )
        return begun.outputs


class SparStart(torch.autograd.Function):
    """Begin an exchange; in backward wait for the transposed one, or make it if none was begun."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.flight = flight
        if flight.at_once:
            return tuple(flight.exchange.run(inputs))
        outputs, flight.work = begin(flight.exchange, inputs, None)
        flight.issued()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        flight = ctx.flight
        back = flight.exchange.transposed
        before = back.begin()
        try:
            if (outputs := flight.end_backward(grads)) is not None:
                return None, *outputs
            if must_record(grads):
                return None, *_recorded(_Flight(back.recorded(), at_once=True), grads)
            return None, *back.run(grads, flight.call)
        except BaseException as error:
            back.report(before, grads, error)
            raise


class SparWait(torch.autograd.Function):
    """Rebase outputs that are complete; in backward begin the transposed exchange of their gradients."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.flight = flight
        ctx.mark_dirty(*outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.flight.may_begin() and not must_record(grads):
            ctx.flight.begin_backward(grads)
        return None, *grads


def _recorded(flight: _Flight, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    return cast(tuple[torch.Tensor, ...], SparStart.apply(flight, *inputs))  # type: ignore[no-untyped-call]


def launch(
    calls: Sequence[Arguments], at: Sequence[str], exchange: Exchange, out: Any, async_op: Any
) -> tuple[list[torch.Tensor], Work]:
    """Start the exchange of the calls' inputs; record it if one requires a gradient."""
    if torch.compiler.is_compiling():
        raise SparError(f"{calls[0].name}: async_op=True cannot be traced by torch.compile; {_NOT_TRACED}")
    if async_op is not True:
        raise calls[0].type_error("async_op", f"{async_op!r:.200}", "a bool")
    inputs = [call.input for call in calls]
    if exchange.group.world == 1:
        outputs = exchange.alone(inputs) if out is None else write_to(out, calls, at, exchange)
        return list(outputs), Work()
    if out is not None:
        outs = checked(out, calls, at, exchange)
        if inputs[0].is_meta or is_any_traced([*inputs, *outs]):
            return write_to(out, calls, at, exchange), Work()
        _, work = begin(exchange, inputs, outs)
        return outs, work or Work()
    outputs, work = start(exchange, inputs)
    return list(outputs), work


def start(exchange: Exchange, inputs: Tensors) -> tuple[Tensors, Work]:
    """Start an exchange of several ranks into new tensors; record it if an input requires a gradient."""
    if not must_record(inputs):
        made, in_flight = begin(exchange, inputs, None)
        return made, in_flight or Work()
    if is_transformed() or have_tangents(inputs):
        return apply(exchange.recorded(), inputs), Work()
    flight = _Flight(exchange.recorded())
    outputs = _recorded(flight, inputs)
    work, flight.work = flight.work or Work(), None
    if work._job is not None or work._beside is not None:
        work._finish = lambda: _rebase(flight, outputs)
    return outputs, work


def _rebase(flight: _Flight, outputs: Tensors) -> None:
    if torch.is_inference_mode_enabled():  # nothing is recorded: backward makes the exchange at once
        return
    flight.waited(outputs)
    with torch.enable_grad():
        SparWait.apply(flight, *outputs)  # type: ignore[no-untyped-call]
