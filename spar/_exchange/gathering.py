# SPDX-License-Identifier: Apache-2.0
"""Gather listed pieces, as autograd sees it: one Function for an exchange and the copies around it.

Its derivative is its transpose. Recorded apart, each copy of a part would fill a whole gradient with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._group.group import Call, Group
from .arguments import Arguments, apply_together
from .cut_and_join import add_selected, added_back, ordered, selected
from .exchange import Exchange
from .gather_plan import GatherPlan
from .observers import is_any_traced, is_transformed, must_record


class Gathering(NamedTuple):
    """What moves pieces, or their gradients back."""

    exchange: Exchange
    plan: GatherPlan
    dim: int
    fill: float

    def run(self, tensors: Sequence[Tensor], transposed: bool, shard: int, forward: int = 0) -> list[Tensor]:
        """Gather the pieces of each tensor; or, transposed, add the gradients of pieces at their owners.

        shard: the size of dim that the rank holds. forward: as in Exchange.run.
        """
        plan, dim = self.plan, self.dim
        if not transposed:
            sent = [selected(x, plan.sent, dim) for x in tensors]
            received = sent if self.exchange.group.world == 1 else self.exchange.run(sent)
            return [ordered(plan, x, y, dim, self.fill) for x, y in zip(tensors, received, strict=True)]
        world, rank = self.exchange.group.world, self.exchange.group.rank
        size = sum(plan.sizes[rank * world : (rank + 1) * world])
        pairs = [added_back(plan, x, shard, size, dim) for x in tensors]
        if world == 1:
            return [own for own, _ in pairs]
        returned = self.exchange.transposed.run([others for _, others in pairs], forward)
        for (own, _), back in zip(pairs, returned, strict=True):
            add_selected(own, plan.sent, back, dim)
        return [own for own, _ in pairs]


def gathering_of(
    group: Group, name: str, plan: GatherPlan, tensors: int, dim: int, records: bool, note: str, fill: float
) -> Gathering:
    """Return what gathers pieces of so many tensors, whose exchange the group remembers."""

    def make() -> Exchange:
        return Exchange(name, group, (plan.args(dim, group.world),) * tensors, records=records, note=note)

    return Gathering(group.remember((name, note, plan, tensors, dim, records), make), plan, dim, fill)


class SparGathering(torch.autograd.Function):
    """The derivative of gathering pieces is to add them back, whose derivative is to gather them."""

    @staticmethod
    def forward(ctx: Any, gathering: Gathering, transposed: bool, shard: int, *tensors: Tensor) -> Any:
        outputs = gathering.run(tensors, transposed, shard)
        ctx.call = gathering, transposed, shard, gathering.exchange.number()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gathering, transposed, shard, number = ctx.call
        gathering = gathering._replace(fill=0.0)
        exchange = gathering.exchange
        with Call(exchange.group, exchange.name, 1, grads[0].device.type):
            if torch.is_grad_enabled() and must_record(grads):
                outputs = SparGathering.apply(gathering, not transposed, shard, *grads)  # type: ignore[no-untyped-call]
            else:
                outputs = gathering.run(grads, not transposed, shard, number)
            return None, None, None, *outputs


def gather_pieces(
    call: Arguments, plan: GatherPlan, tensors: Sequence[Tensor], dim: int, note: str = "", fill: float = 0
) -> list[Tensor]:
    """Return the wanted pieces of each tensor, of one dtype, one behind the other along dim.

    note: what ranks compare besides the layouts. fill: the value of zeros.
    """
    group = call.group
    if (
        not isinstance(group, Group)
        or is_transformed()
        or forward_ad._current_level >= 0
        or is_any_traced(tensors)
    ):
        # Recorded operation by operation, these have all derivatives.
        inputs = [call.beside(selected(x, plan.sent, dim), call.input_name) for x in tensors]
        inputs[0].note = note
        received = apply_together(inputs, (plan.args(dim, call.world),) * len(tensors))
        return [ordered(plan, x, other, dim, fill) for x, other in zip(tensors, received, strict=True)]
    records = must_record(tensors)
    gathering = gathering_of(group, call.name, plan, len(tensors), dim, records, note, fill)
    if records:
        return list(SparGathering.apply(gathering, False, tensors[0].size(dim), *tensors))  # type: ignore[no-untyped-call]
    return gathering.run(tensors, False, tensors[0].size(dim))
