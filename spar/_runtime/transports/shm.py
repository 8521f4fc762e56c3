"""The shm transport: ranks of one host, whose outputs lie in memory that they share."""

from __future__ import annotations

import torch

from ... import _C
from ...errors import SparError
from .. import fork_warning
from ..agreement import mark_reported
from ..channel import Operation
from ..items import SCALE_TYPES, apply_scale, call_text
from ..member import OVER, Member
from .core import CALLS, CoreChannel


class ShmChannel(CoreChannel):
    """One exchange is one call of the core, which allocates the output in the arena."""

    def __init__(self, member: Member, device: torch.device, op: str, deadline: float) -> None:
        assert member.facts is not None
        super().__init__(_C.comm("shm", member.facts, member.rank, member.local_ranks, member.name))

    def watch(self, member: Member) -> None:
        """Warn in forked workers that receive an output."""
        fork_warning.watch()

    def exchange(
        self, member: Member, operation: Operation, input_: torch.Tensor, deadline: float
    ) -> torch.Tensor:
        op, args, factor, divide, records = operation
        dtype = input_.dtype
        text = call_text(dtype, "cpu", factor, divide, records)
        tensor = (input_.element_size(), input_.shape, input_.stride(), args)
        kind, address = SCALE_TYPES.get(dtype, 0), input_.data_ptr()
        try:
            member.progress = OVER  # the core reports whatever fails in it
            capsule = self.core.exchange(
                op, tensor, address, kind, divide, factor, text, member.calls, deadline
            )
        except SparError as error:
            raise self.explain(member, op, error) from None
        except Exception as error:  # of this rank alone: the core has reported it
            mark_reported(error)
            raise
        CALLS["shm"] += 1
        output = torch._C._from_dlpack(capsule)
        if kind == 0:  # the core knows the items' size alone
            if output.dtype != dtype:
                output = output.view(dtype)
            apply_scale(output, factor, divide)
        return output.clone() if member.own_output else output
