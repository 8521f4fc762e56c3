# SPDX-License-Identifier: Apache-2.0
"""What every transport offers for one group and device type; csrc/transports has the same slots in C."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .. import _C

# An exchange of fewer bytes takes less time than what a call in flight adds: a thread's wake-up, or events.
WORTH_A_CALL = 1 << 20
Tensors = Sequence[torch.Tensor]
Run = Callable[[_C.Exchange, Tensors, Tensors | None, int, bool, int, float], list[Any] | None]


class Channel(Protocol):
    """A transport of one group for the tensors of one device type.

    Creating one is the first stage of its set-up: `__init__(group, device, op, deadline)`. It holds no strong
    reference to the group, which is freed with its process group.

    Attributes:
        name: the transport's name.
        sides: those of a plan that the transport needs besides what it sends: `_C.SIDE_PULL`, or 0.
        core: its communicator in the C core, which also has the ranks' mailboxes, if it has one.
        enqueues: whether a call only gives work to the device's current stream.
        in_flight_from: so many bytes of a rank an exchange must have at least to be in flight while the rank
            computes: for fewer, or where it takes the kernel's cores, a wait for it takes less time.
        lists: whether it reads rows by an index: those of a core that has `rows`.
        exchange: `exchange(core, inputs, outs, forward, alike, number, deadline)` runs one exchange and
            returns its outputs, new contiguous tensors in whatever memory the transport uses. `core` is what
            all ranks agree on. `inputs` have one dtype and device. `outs`: contiguous tensors to write the
            outputs to, or None; the list that is returned has None for those that were written there, and
            tensors to copy for others. `forward` is the number of the call whose gradient the exchange
            moves: ranks that know it must agree; 0 is not known. With `alike` it does nothing and returns
            None unless the inputs have the dtype, device and extents of those of `core`'s newest call.
            `number` counts the group's calls, this one included. CPU outputs are complete on return; those
            on a GPU when the current stream reaches this point.
    """

    name: str
    sides: int
    enqueues: bool
    in_flight_from: int
    lists: bool

    @property
    def exchange(self) -> Run: ...

    @property
    def core(self) -> _C.Comm | None: ...

    def drop_core(self) -> bool:
        """Go on without the core, whose set-up failed; return whether the transport can."""

    def watch(self) -> None:
        """Start what must run once calls are made; it may be called again."""

    def allocate(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Return an output of an exchange that has not begun, where peers can write to it if possible."""

    def report(self, op: str, why: str, memory: bool, deadline: float) -> None:
        """Take part in the peers' next exchange with a failure, without waiting for them."""

    def can_report(self) -> bool:
        """Whether the peers notice a failure that this rank reports."""

    def give_up(self, op: str, why: str) -> None:
        """Break the group for good, on all ranks that can be reached."""

    def abort(self) -> None:
        """Make a call under way raise GroupBrokenError soon. Any thread may call it."""

    def close(self) -> None:
        """Release what the transport holds; does not wait."""
