# SPDX-License-Identifier: Apache-2.0
"""Show exchanges to torch.profiler, without a change of what they run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import _C
from .._control.state import GroupState
from .._transports.channel import Channel

is_profiled = torch._C._autograd._profiler_enabled  # on this thread


def event(name: str, tensors: Sequence[torch.Tensor] = (), **inputs: Any) -> AbstractContextManager[Any]:
    """Return one event of a profile, which shows the inputs under `record_shapes=True`."""
    profile_event: AbstractContextManager[Any] = torch._C._profiler._RecordFunctionFast(
        f"spar::{name}", list(tensors), inputs
    )
    return profile_event


def plan_of(channel: Channel, core: _C.Exchange, inputs: Sequence[torch.Tensor]) -> _C.Plan:
    """Return the plan that the exchange itself uses on a channel."""
    return core.plan(inputs, channel.sides)[0]


def profiled(
    group: GroupState, channel: Channel, core: _C.Exchange, inputs: Sequence[torch.Tensor], *args: Any
) -> list[Any] | None:
    """Run an exchange on a channel as an event of the profile.

    The event's inputs are the tensors, and by name the bytes that this rank sends to others, the group, the
    number of its ranks, the transport, and the layouts before and after.
    """
    try:
        plan = plan_of(channel, core, inputs)
    except Exception:  # the exchange itself then fails likewise, and reports that to the peers
        return channel.exchange(core, inputs, *args)
    layouts, sent_bytes = plan.describe("", "", 0, 0)[0].strip(), sum(plan.push_bytes)
    details = {"bytes": sent_bytes, "group": group.name, "ranks": group.world, "transport": channel.name}
    with event(core.op, inputs, **details, layouts=layouts):
        return channel.exchange(core, inputs, *args)
