"""An exchange planned by the core before it runs: for the torch transport, and where ranks compare calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import _C
from .._group.agreement import agree
from .._group.hints import Gathered
from .._group.member import Member
from .channel import Operation
from .dtypes import ITEM_TYPES, add_rows, apply_scale, call_text


def finish(outputs: Sequence[torch.Tensor], kind: int, divide: bool, factor: float) -> None:
    """Scale outputs of a dtype that the core cannot scale."""
    if kind == 0:
        for output in outputs:
            apply_scale(output, factor, divide)


def sums_of(outputs: Sequence[torch.Tensor], totals: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
    """Sum each output over its rows, into `totals` if there are any."""
    found = [add_rows(output) for output in outputs]
    if not totals:
        return found
    return [total.copy_(x) for total, x in zip(totals, found, strict=True)]


@dataclass(eq=False, slots=True)  # frozen ones take 2 us to make
class PlannedExchange:
    """One exchange on its way. Inputs are read through their strides; outputs are contiguous."""

    op: str
    plan: _C.Plan
    inputs: Sequence[torch.Tensor]
    outputs: list[torch.Tensor]
    addresses: tuple[int, ...]  # of the inputs
    output_addresses: tuple[int, ...]
    scale: tuple[int, bool, float]  # the core's code of the dtype, whether it divides, the factor
    text: str  # what must be equal on all ranks besides the plan
    deadline: float
    forward: int  # the number of the call whose gradient it moves; 0: not known
    totals: list[torch.Tensor] | None = None  # where the sums of the outputs' rows go; empty: to new tensors

    @classmethod
    def of(
        cls,
        member: Member,
        operation: Operation,
        inputs: Sequence[torch.Tensor],
        device: str,
        deadline: float,
        outs: list[torch.Tensor] | None = None,
        forward: int = 0,
    ) -> PlannedExchange:
        """Plan it, and allocate what `outs` does not give."""
        op, args, factor, divide, gradient, sums, note = operation
        first = inputs[0]
        dtype = first.dtype
        size, kind, _, _, _ = ITEM_TYPES[dtype]
        plan, addresses = _C.plan_of(op, member.world, member.rank, _C.SIDE_PULL, size, inputs, args)
        outputs = outs
        if outputs is None or sums:
            outputs = [first.new_empty(shape) for shape in plan.out_shapes]
        targets = tuple([output.data_ptr() for output in outputs])
        text = call_text(dtype, device, factor, divide, gradient, note)
        totals = None if not sums else outs or []
        scale = kind, divide, factor
        return cls(op, plan, inputs, outputs, addresses, targets, scale, text, deadline, forward, totals)

    def finish(self) -> None:
        finish(self.outputs, *self.scale)

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs[0].dtype

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    def results(self) -> list[torch.Tensor]:
        """Return the outputs, or the sums of their rows."""
        return self.outputs if self.totals is None else sums_of(self.outputs, self.totals)

    def compare(self, member: Member) -> None:
        """Raise on all ranks if they do not make the same call, or one failed."""

        def describe() -> tuple[str, Gathered]:
            text, gathered = self.plan.describe(self.op, self.text, member.calls, self.forward)
            return text, Gathered(*gathered)

        agree(member, self.op, self.plan.signature(self.text), describe, self.deadline, forward=self.forward)
