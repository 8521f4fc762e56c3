# SPDX-License-Identifier: Apache-2.0
"""Choose between push and nccl by time: all ranks make the same exchanges over each, and keep the faster one.

nccl is timed where that costs little, or where push is as slow as over PCIe. All ranks take part in the same
steps and know each rank's times and failures, so all make the same choice. Collective.
"""

from __future__ import annotations

import math
import struct
import time
from typing import NamedTuple

import torch

from .. import _C
from .._control.agreement import failure_text
from .._control.state import SHARED, GroupState
from .._transports.cuda import empty
from .._transports.nccl import NcclChannel, has_communicator
from .._transports.push import PushChannel
from ..errors import SparError
from .stages import all_gather, connect

BYTES = 32 << 20  # of a rank's input, or what a slot has room for: longer calls would let it grow
RUN = 2048  # bytes that lie together: 8 heads of 128 in 16 bits
CALLS, BATCHES = 16, 3  # the shortest batch counts; one before them is not timed
MARGIN = 1.1  # nccl must be faster by so much: push needs less host time and memory
SLOW = 64e9  # bytes a second that a GPU sends: PCIe 5 reaches less, NVLink between a server's GPUs more
LEAST_BYTES = 8 << 20  # of a rank's input: the speed of shorter calls is the host's, not that of the link
BATCH_S = 10.0  # the limit of a batch that is timed
CONNECT_S = 30.0  # the limit of nccl's set-up, after which push stays

_DTYPE = torch.bfloat16


class Outcome(NamedTuple):
    """What a trial found.

    Attributes:
        channel: the one that the ranks keep; the other is closed.
        speeds: of both, or why there is none, for messages.
        failure: why push failed in the trial: it is closed, and no other is open. Empty: it did not fail.
    """

    channel: NcclChannel
    speeds: str
    failure: str


def compare(group: GroupState, push: PushChannel, device: torch.device, op: str, deadline: float) -> Outcome:
    """Time push, and nccl if that is worth it; close the one that is not taken."""
    rival: NcclChannel | None = None
    try:
        calls, why = _prepare(group, push.core, device, op)
        own = _Answer(why, native=has_communicator(group.process_group, device))
        answers = _share(group, own, "to be timed", device, op, deadline)
        if (why := _first_failure(answers)) or calls is None:
            return Outcome(push, f"push not timed: {why}", "")
        speed, why = _time(group, push, calls, device, op, deadline)
        if why:
            push.close()
            return Outcome(push, "", why)
        is_slow = speed < SLOW and calls.bytes >= LEAST_BYTES
        if not is_slow and not all(answer.native for answer in answers):
            return Outcome(push, f"push {_text(speed)}", "")
        rival = NcclChannel(group, device, op, deadline, connects=False)
        limit, other = time.monotonic() + CONNECT_S, 0.0
        why = connect(group, rival.core, device, op, deadline, limit)
        if not why:
            other, why = _time(group, rival, calls, device, op, deadline)
    except BaseException:
        push.close()
        if rival is not None:
            rival.close()
        raise
    loses = other <= MARGIN * speed
    (rival if loses else push).close()
    speeds = f"push {_text(speed)}; nccl {why or _text(other)}"
    return Outcome(push if loses else rival, speeds, "")


def _text(speed: float) -> str:
    return f"{speed / 1e9:.3g} GB/s"


# ---- the exchanges ----


class _Calls(NamedTuple):
    """An all_to_all of equal parts, as before attention.

    Attributes:
        exchange, input_: its arguments.
        bytes: of the input.
        sent: bytes of it for other ranks.
    """

    exchange: _C.Exchange
    input_: torch.Tensor
    bytes: int
    sent: int


def _prepare(group: GroupState, core: _C.Comm, device: torch.device, op: str) -> tuple[_Calls | None, str]:
    """Allocate what the exchanges need; return also why that failed, or ""."""
    world = group.world
    columns = RUN * world // _DTYPE.itemsize
    rows = max(1, min(BYTES, core.room or BYTES) // (RUN * world))
    try:
        input_ = empty((rows, columns), (columns, 1), _DTYPE)
        empty((rows, columns), (columns, 1), _DTYPE)  # the output has room, too
        # The numbers of layouts.pair: shards of dim 0 become shards of dim 1, both by the size rule.
        numbers = 3, 0, 0, rows * world, 1, 0, columns
        text = f" of {_DTYPE} on {device.type}"
        place = world, group.rank, _DTYPE.itemsize
        exchange = _C.Exchange(op, text, *place, (numbers,), 0, False, 1.0, 0)
    except Exception as error:
        return None, failure_text(error)
    part = rows * RUN
    return _Calls(exchange, input_, part * world, part * (world - 1)), ""


def _time(
    group: GroupState, channel: NcclChannel, calls: _Calls, device: torch.device, op: str, deadline: float
) -> tuple[float, str]:
    """Return the bytes a second that a rank sends, by the slowest one's time; or 0, and why a rank failed."""
    own = _Answer()
    group.progress, group.connecting = SHARED, channel.core
    try:
        channel.bind()
        channel.watch()
        own = _Answer(seconds=_shortest(channel.core, calls, deadline))
    except Exception as error:
        own = _Answer(failure_text(error), isinstance(error, SparError) and bool(error.ranks))
        channel.give_up(op, own.why)  # the peers' calls end
    finally:
        group.connecting = None
    answers = _share(group, own, f"timed over {channel.name}", device, op, deadline)
    if why := _first_failure(answers):
        return 0.0, why
    return calls.sent / max(answer.seconds for answer in answers), ""


def _shortest(core: _C.Comm, calls: _Calls, deadline: float) -> float:
    """Return the seconds of a call in the shortest batch, from the host's first call to the device's end.

    The core makes the calls, which ranks do not compare (SPAR_CHECK=1) or count.
    """
    shortest, limit = math.inf, deadline
    for batch in range(1 + BATCHES):
        begin = time.monotonic()
        for _ in range(CALLS):
            core.enqueue(calls.exchange, [calls.input_], None, 0, False, 0, limit)
        core.wait(limit)
        if batch > 0:  # the first one has waited for the stream's earlier work
            shortest = min(shortest, time.monotonic() - begin)
        limit = min(deadline, time.monotonic() + BATCH_S)
    return shortest / CALLS


# ---- what ranks share ----


class _Answer(NamedTuple):
    """What a rank sends in a stage.

    Attributes:
        why: why it failed; empty: it did not.
        is_caused: whether a peer's failure is the cause.
        seconds: of a call.
        native: whether torch has a communicator of the group there.
    """

    why: str = ""
    is_caused: bool = False
    seconds: float = 0.0
    native: bool = False


_ROW = struct.Struct("=160s?d?")  # an answer


def _share(
    group: GroupState, own: _Answer, stage: str, device: torch.device, op: str, deadline: float
) -> list[_Answer]:
    """Return each rank's answer."""
    row = _ROW.pack(own.why.encode(errors="replace"), *own[1:])
    rows = [_ROW.unpack(other) for other in all_gather(group, row, stage, op, device, deadline)]
    return [_Answer(why.rstrip(b"\0").decode(errors="replace"), *rest) for why, *rest in rows]


def _first_failure(answers: list[_Answer]) -> str:
    """Return the reason of the first rank that failed, of those that no peer made fail if there are some."""
    failed = [(answer.is_caused, rank) for rank, answer in enumerate(answers) if answer.why]
    return f"rank {min(failed)[1]}: {answers[min(failed)[1]].why}" if failed else ""
