# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group agree over its ProcessGroup: one all_gather of a header before each step.

A rank that fails takes part in the next agreement with its failure instead of a step, and does not wait. So
its peers learn the reason, and all ranks issue the same collectives. Ranks of one host have the same protocol
in C, once they are set up (csrc/control/control.h).
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable

import torch

from .. import _C
from ..errors import MismatchError, OutOfMemoryError
from . import collectives, speeds
from .mismatch import GatheredSize, gathered_sizes, mismatch
from .state import OVER, SHARED, GroupState

TEXT = _C.TEXT_BYTES
# Bytes that a rank can send with a step: a token, the speeds that were measured, and its peer info.
ROOM = 8 + speeds.BYTES + _C.PEER_INFO_BYTES
# calls, step, status, forward, data: of one size, because a rank that failed does not know its peers' step
_HEADER = struct.Struct(f"=4q{ROOM}s")
_OK, _FAILED, _OUT_OF_MEMORY = range(3)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; torch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def agree(
    group: GroupState,
    op: str,
    step: int,
    describe: Callable[[], tuple[str, GatheredSize | None]],
    deadline: float,
    data: bytes = b"",
    forward: int = 0,
) -> list[bytes]:
    """Return each rank's `data`, in rank order, once every rank has reached the same step of the same call.

    The caller must have done before what can fail on one rank alone.

    Args:
        group: this rank's state in the group.
        op: the operation's name, for messages.
        step: an int that must be equal on all ranks: a call's signature, or a stage of the set-up.
        describe: returns this rank's step in words, and what it holds of the gathered dim if the step is a
            call that gathers; called only if ranks differ.
        deadline: in seconds of time.monotonic().
        data: what this rank sends with the step; as long on all ranks, ROOM at most.
        forward: the number of the call whose gradient the step moves, or a view's word; 0: equal to any.

    Raises:
        MismatchError: ranks differ, or one failed. Every rank that did not fail raises it.
        OutOfMemoryError: a rank ran out of memory.
    """
    group.progress = SHARED
    collectives.settle(group, op, deadline)
    headers = collectives.all_gather(group, _header(group, step, _OK, data, forward), op, deadline)
    rows = [row[:3].tolist() for row in headers]
    differs = _C.words_differ([int(row[3]) for row in headers])
    if all(row == rows[0] for row in rows) and not differs:
        return [bytes(row[4:].view(torch.uint8)[: len(data)].tolist()) for row in headers] if data else []
    descriptions = collectives.all_gather(group, _row(*describe()), op, deadline)
    texts = [bytes(row[:TEXT].tolist()).rstrip(b"\0").decode(errors="replace") for row in descriptions]
    group.progress = OVER
    for rank, (*_, status) in enumerate(rows):
        if status != _OK:
            kind = OutOfMemoryError if status == _OUT_OF_MEMORY else MismatchError
            text = f"{group.title(op)}: rank {rank} failed: {texts[rank]}"
            raise kind(text, **group.where(op), ranks=(rank,))
    gathered = [GatheredSize(*row[TEXT:].view(torch.int64).tolist()) for row in descriptions]
    raise mismatch(group, op, texts, gathered_sizes(gathered))


def compare(
    group: GroupState, core: _C.Exchange, plan: _C.Plan, forward: int, number: int, deadline: float
) -> None:
    """Raise on all ranks if they do not make the same call, or one failed."""

    def describe() -> tuple[str, GatheredSize]:
        text, gathered = plan.describe(core.op, core.text, number, forward)
        return text, GatheredSize(*gathered)

    agree(group, core.op, plan.signature(core.text), describe, deadline, forward=forward)


def announce_failure(group: GroupState, op: str, why: str, memory: bool, deadline: float) -> None:
    """Take part in the peers' next agreement with a failure, without waiting for them.

    memory: whether this rank ran out of memory.
    """
    group.progress = SHARED
    collectives.settle(group, op, deadline)
    status = _OUT_OF_MEMORY if memory else _FAILED
    collectives.announce(group, [_header(group, 0, status), _row(why)], op, deadline)
    group.progress = OVER


def _header(group: GroupState, step: int, status: int, data: bytes = b"", forward: int = 0) -> torch.Tensor:
    packed = bytearray(_HEADER.pack(group.calls, step, status, forward, data))
    return torch.frombuffer(packed, dtype=torch.int64)


def _row(text: str, gathered: GatheredSize | None = None) -> torch.Tensor:
    encoded = bytearray(text.encode(errors="replace")[:TEXT].ljust(TEXT, b"\0"))
    numbers = torch.tensor(gathered or (0, 0, 0), device="cpu")
    return torch.cat((torch.frombuffer(encoded, dtype=torch.uint8), numbers.view(torch.uint8)))


def failure_text(error: BaseException) -> str:
    """Return the text that is reported to the peers."""
    try:
        text = str(error)
    except Exception as failure:  # raised by the exception's own __str__
        text = f"(its text raised {type(failure).__name__})"
    return f"{type(error).__name__}: {text}".replace("\0", "?").encode(errors="replace").decode()


def mark_reported(error: BaseException, group: GroupState) -> None:
    """Note that the exception was reported to the peers of a group."""
    with contextlib.suppress(AttributeError):
        error._spar_reported = (*getattr(error, "_spar_reported", ()), group.handle)  # type: ignore[attr-defined]


def is_reported(error: BaseException, group: GroupState | None = None) -> bool:
    """Whether the exception was reported to the peers of the group, or of any group."""
    handles: tuple[int, ...] = getattr(error, "_spar_reported", ())
    return bool(handles) if group is None else group.handle in handles
