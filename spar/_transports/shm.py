"""The shm transport: ranks of one host, whose outputs lie in memory that they share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import _C
from .._group import fork_warning
from .._group.agreement import mark_reported
from .._group.member import OVER, Member
from ..errors import SparError
from .channel import Operation
from .core import CoreChannel
from .dtypes import ITEM_TYPES, apply_scale, call_text, copy_items


class ShmChannel(CoreChannel):
    """One exchange is one call of the core, which allocates the output in the arena."""

    def __init__(self, member: Member, device: torch.device, op: str, deadline: float) -> None:
        assert member.facts is not None
        super().__init__(_C.comm("shm", member.facts, member.rank, member.local_ranks, member.name))
        # an exchange in flight copies and polls: without a core of its own it takes its time from the kernel
        self.overlaps = member.core_share > torch.get_num_threads()

    def watch(self, member: Member) -> None:
        """Warn in forked workers that receive an output."""
        fork_warning.watch()

    def allocate(self, member: Member, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        if member.own_output:
            return super().allocate(member, shape, like)
        flat = _C.arena_take(math.prod(shape) * like.element_size())
        # not a view of it, which autograd could not rebase
        return (
            torch.empty(0, dtype=like.dtype, device="cpu").set_(flat.untyped_storage()).resize_(tuple(shape))
        )

    def exchange(
        self,
        member: Member,
        operation: Operation,
        inputs: Sequence[torch.Tensor],
        deadline: float,
        outs: list[torch.Tensor] | None = None,
        forward: int = 0,
    ) -> list[torch.Tensor]:
        op, args, factor, divide, gradient, sums, note = operation
        dtype = inputs[0].dtype
        size, kind, sum_kind, _, _ = ITEM_TYPES[dtype]
        if not sums:
            sum_kind = 0
        text = call_text(dtype, "cpu", factor, divide, gradient, note)
        targets = None if outs is None else tuple([out.data_ptr() for out in outs])
        try:
            member.progress = OVER  # the core reports whatever fails in it
            results = self.core.exchange(
                op,
                size,
                inputs,
                args,
                kind,
                divide,
                factor,
                sum_kind,
                text,
                member.calls,
                forward,
                deadline,
                targets,
            )
        except SparError as error:
            raise self.explain(member, op, error) from None
        except Exception as error:  # of this rank alone: the core has reported it
            mark_reported(error)
            raise
        if outs is not None:
            _fill(outs, results, kind, factor, divide)
            return outs
        outputs: list[torch.Tensor] = results
        if kind == 0:  # the core knows the items' size alone
            outputs = [output if output.dtype == dtype else output.view(dtype) for output in outputs]
            for output in outputs:
                apply_scale(output, factor, divide)
        return [output.clone() for output in outputs] if member.own_output else outputs


def _fill(
    outs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor | None],
    kind: int,
    factor: float,
    divide: bool,
) -> None:
    """Copy the outputs that peers could not write to `outs`, which lies outside the arena."""
    for out, result in zip(outs, results, strict=True):
        if result is not None:
            copy_items(out, result)
        if kind == 0:
            apply_scale(out, factor, divide)
