"""An exchange whose output torch allocates, from a plan of the core: for the nccl and torch transports."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ... import _C
from ..agreement import agree
from ..channel import Operation
from ..hints import Gathered
from ..items import call_text
from ..member import Member


@dataclass(frozen=True)
class PlannedExchange:
    """One exchange on its way. `input` is read through its strides; `output` is contiguous."""

    op: str
    plan: _C.Plan
    input: torch.Tensor
    output: torch.Tensor
    factor: float
    divide: bool
    text: str  # what must be equal on all ranks besides the plan
    deadline: float

    @classmethod
    def of(
        cls, member: Member, operation: Operation, input_: torch.Tensor, deadline: float
    ) -> PlannedExchange:
        op, args, factor, divide, records = operation
        tensor = (input_.element_size(), input_.shape, input_.stride(), args)
        text = call_text(input_.dtype, input_.device.type, factor, divide, records)
        plan = _C.plan(op, member.world, member.rank, _C.SIDE_PULL, (tensor,))
        output = torch.empty(plan.out_shapes[0], dtype=input_.dtype, device=input_.device)
        return cls(op, plan, input_, output, factor, divide, text, deadline)

    def compare(self, member: Member) -> None:
        """Raise on all ranks if they do not make the same call, or one failed."""

        def describe() -> tuple[str, Gathered]:
            text, gathered = self.plan.describe(self.text, member.calls)
            return text, Gathered(*gathered)

        agree(member, self.op, self.plan.signature(self.text), describe, self.deadline)
