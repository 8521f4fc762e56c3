"""What every transport offers for one group and device type; csrc/transports has the same slots in C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from .. import _C
from .._group.member import Member


class Operation(NamedTuple):
    """One exchange of tensors, or one selection: what all ranks must agree on besides the shapes.

    Attributes:
        op: the operation's name, for messages.
        args: for each tensor its two layouts, as `layouts.pair` returns them.
        factor, divide: the outputs are multiplied or divided by it.
        gradient: what backward will do; empty if no gradient is recorded.
        sums: whether the outputs, which have a row for each rank, are summed over the rows.
        note: other arguments of the operation that must be equal on all ranks, for messages.
    """

    op: str
    args: tuple[tuple[int, ...], ...]
    factor: float
    divide: bool
    gradient: str
    sums: bool = False
    note: str = ""


class Channel(Protocol):
    """A transport of one group for the tensors of one device type.

    Creating one is the first stage of its set-up: `__init__(member, device, op, deadline)`. It holds no
    reference to the member, which is freed with its group.

    Attributes:
        name: the transport's name.
        core: its communicator in the C core, if it has one.
        enqueues: whether a call only gives work to the device's current stream.
        overlaps: whether an exchange in flight leaves this process's cores to what the rank computes.
    """

    @property
    def name(self) -> str: ...

    @property
    def core(self) -> _C.Comm | None: ...

    @property
    def enqueues(self) -> bool: ...

    @property
    def overlaps(self) -> bool: ...

    def watch(self, member: Member) -> None:
        """Start what must run once the set-up is over."""

    def exchange(
        self,
        member: Member,
        operation: Operation,
        inputs: Sequence[torch.Tensor],
        deadline: float,
        outs: list[torch.Tensor] | None = None,
        forward: int = 0,
    ) -> list[torch.Tensor]:
        """Run one exchange; return new contiguous outputs, in whatever memory the transport uses.

        outs: contiguous tensors to write the outputs to instead; they are returned.
        forward: the number of the call whose gradient it moves. Ranks that know it must agree; 0: not known.

        The inputs have one dtype and device. CPU outputs are complete on return; those on a GPU when the
        current stream reaches this point.
        """

    def allocate(self, member: Member, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Return an output of an exchange that has not begun, where peers can write to it if possible."""

    def report(self, member: Member, op: str, why: str, memory: bool, deadline: float) -> None:
        """Take part in the peers' next exchange with a failure, without waiting for them."""

    def can_report(self, member: Member) -> bool:
        """Whether the peers notice a failure that this rank reports."""

    def give_up(self, op: str, why: str) -> None:
        """Break the group for good, on all ranks that can be reached."""

    def abort(self) -> None:
        """Make a call under way raise GroupBrokenError soon. Any thread may call it."""

    def close(self) -> None:
        """Release what the transport holds; does not wait."""
