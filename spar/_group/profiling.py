"""Show exchanges to torch.profiler, without a change of what they run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import _C
from .._transports.channel import Operation
from .._transports.dtypes import ITEM_TYPES

is_profiled = torch._C._autograd._profiler_enabled  # on this thread


def event(name: str, tensors: Sequence[torch.Tensor] = (), **inputs: Any) -> AbstractContextManager[Any]:
    """Return one event of a profile, which shows the inputs under `record_shapes=True`."""
    made: AbstractContextManager[Any] = torch._C._profiler._RecordFunctionFast(
        f"spar::{name}", list(tensors), inputs
    )
    return made


def exchange_event(
    operation: Operation, tensors: Sequence[torch.Tensor], world: int, rank: int, group: str, transport: str
) -> AbstractContextManager[Any]:
    """Return the event of an exchange that is about to run.

    Its inputs are the tensors, and by name the bytes that this rank sends to others, the group, the number of
    its ranks, the transport, and the layouts before and after.
    """
    op, args, *_ = operation
    sides = _C.SIDE_PULL if transport == "torch" else 0  # of the plan that the exchange itself uses
    size = ITEM_TYPES[tensors[0].dtype].size
    plan, _ = _C.plan_of(op, world, rank, sides, size, tensors, args)
    layouts, sent = plan.describe("", "", 0, 0)[0].strip(), sum(plan.push_bytes)
    return event(op, tensors, bytes=sent, group=group, ranks=world, transport=transport, layouts=layouts)
