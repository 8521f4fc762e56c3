"""An exchange planned by the core whose outputs torch allocates: for the nccl and torch transports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ... import _C
from ..agreement import agree
from ..channel import Operation
from ..hints import Gathered
from ..items import ITEM_TYPES, add_rows, apply_scale, call_text
from ..member import Member


def new_empty(like: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Allocate a contiguous tensor; its strides follow from its shape."""
    return like.new_empty(shape)


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
        new: Callable[..., torch.Tensor] = new_empty,
    ) -> PlannedExchange:
        """Plan it, and allocate what `outs` does not give.

        new: makes an output like a tensor, of a shape and strides.
        """
        op, args, factor, divide, gradient, sums = operation
        first = inputs[0]
        dtype = first.dtype
        size, kind, _, _ = ITEM_TYPES[dtype]
        plan, addresses = _C.plan_of(op, member.world, member.rank, _C.SIDE_PULL, size, inputs, args)
        if outs is None or sums:
            strides = plan.out_strides
            outputs = [new(first, shape, strides[t]) for t, shape in enumerate(plan.out_shapes)]
        else:
            outputs = outs
        targets = tuple([output.data_ptr() for output in outputs])
        text = call_text(dtype, device, factor, divide, gradient)
        totals = None if not sums else outs or []
        scale = kind, divide, factor
        return cls(op, plan, inputs, outputs, addresses, targets, scale, text, deadline, totals)

    def finish(self) -> None:
        """Scale outputs of a dtype that the core cannot scale."""
        kind, divide, factor = self.scale
        if kind == 0:
            for output in self.outputs:
                apply_scale(output, factor, divide)

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs[0].dtype

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    def results(self) -> list[torch.Tensor]:
        """Return the outputs, or the sums of their rows."""
        if self.totals is None:
            return self.outputs
        found = [add_rows(output) for output in self.outputs]
        if not self.totals:
            return found
        return [total.copy_(x) for total, x in zip(self.totals, found, strict=True)]

    def compare(self, member: Member) -> None:
        """Raise on all ranks if they do not make the same call, or one failed."""

        def describe() -> tuple[str, Gathered]:
            text, gathered = self.plan.describe(self.op, self.text, member.calls)
            return text, Gathered(*gathered)

        agree(member, self.op, self.plan.signature(self.text), describe, self.deadline)
