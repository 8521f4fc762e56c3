# SPDX-License-Identifier: Apache-2.0
"""A halo or a shift as one op of torch.compile's graphs.

Which tokens travel follows from comparisons of sizes: traced, each would be a guard. So the op makes the plan
when it runs, and does what eager code does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._group.group import Call
from .._group.registry import group_at
from .arguments import Arguments
from .dispatch import chained, define, implement, number_of_call, number_of_newest
from .gather_plan import AROUND, remembered_plan
from .gathering import gather_pieces, gathering_of
from .graph_ops import code
from .layouts import Layout, pieces
from .observers import must_record


class GatherRequest(NamedTuple):
    """What a rank wants, as the arguments of the op's schema.

    Attributes:
        group, world, rank: a Place.
        layout, documents, offset, more: as of `plan_runs`.
        name, note: of the exchange.
        dim, fill: as of `gather_pieces`.
        shard, size: of dim, of what the rank holds and of the result.
    """

    group: int
    world: int
    rank: int
    layout: Sequence[int]
    documents: bool
    offset: int
    more: int
    name: str
    note: str
    dim: int
    fill: float
    shard: int
    size: int


_SCHEMA = (
    "(Tensor x, int group, int world, int rank, SymInt[] layout, bool documents, SymInt offset,"
    " SymInt more, str name, str note, int dim, float fill, SymInt shard, SymInt size, bool transposed,"
    " bool records{}) -> {}"
)


def _run_op(x: Tensor, *arguments: Any) -> list[Tensor]:
    count = len(GatherRequest._fields)
    request, (transposed, records) = GatherRequest(*arguments[:count]), arguments[count : count + 2]
    _after, forward = (*arguments[count + 2 :], None, None)[:2]
    group, name, dim = group_at(request.group), request.name, request.dim
    with Call(group, name, 1, x.device.type):
        place = request.world, request.rank, request.offset, request.more
        plan = remembered_plan(tuple(request.layout), request.documents, *place)
        gathering = gathering_of(group, name, plan, 1, dim, records, request.note, request.fill)
        output = gathering.run([x], transposed, request.shard, 0 if forward is None else int(forward))[0]
    return [output, number_of_call(group.count())]


def _fake_op(x: Tensor, *arguments: Any) -> list[Tensor]:
    count = len(GatherRequest._fields)
    request, transposed = GatherRequest(*arguments[:count]), arguments[count]
    shape = list(x.shape)
    shape[request.dim] = request.shard if transposed else request.size
    return [x.new_empty(shape), torch.empty((), dtype=torch.int64, device="cpu")]


implement("pieces", _SCHEMA.replace("-> {}", "-> Tensor[]"), _run_op, _fake_op)


class SparPieces(torch.autograd.Function):
    """The op, whose derivative is its transpose, of which it is the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, request: GatherRequest, transposed: bool, forward: Any) -> Tensor:
        output = chained(torch.ops.spar.pieces, x, *request, transposed, True, forward=forward)[0]
        number = number_of_newest()
        ctx.call = request, transposed, number if isinstance(number, Tensor) else None
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        request, transposed, number = ctx.call
        # Zeros that were filled have no gradient, and the gradient of others no other fill.
        request = request._replace(fill=0.0)
        return _apply(grad, request, not transposed, number), None, None, None


def _apply(x: Tensor, request: GatherRequest, transposed: bool, forward: Tensor | None) -> Tensor:
    if torch.is_grad_enabled() and must_record((x,)):
        return cast(Tensor, SparPieces.apply(x, request, transposed, forward))  # type: ignore[no-untyped-call]
    return chained(torch.ops.spar.pieces, x, *request, transposed, True, forward=forward)[0]


def _run(x: Tensor, *arguments: Any) -> Tensor:
    request = GatherRequest(*arguments[: len(GatherRequest._fields)])
    if must_record((x,)):
        return cast(Tensor, SparPieces.apply(x, request, False, None))  # type: ignore[no-untyped-call]
    return chained(torch.ops.spar.pieces, x, *request, False, False)[0]


define("gather_pieces" + _SCHEMA.format(", str code", "Tensor"), _run)


def gather_runs(
    call: Arguments, layout: Layout, documents: bool, offset: int, more: int, fill: float = 0
) -> Tensor:
    """Gather each run of this rank, moved by an offset and longer by `more`, along the layout's dim.

    documents, more: as of `plan_runs`.
    """
    x, dim, numbers, world, rank = call.input, layout[0], (0, *layout[1:]), call.world, call.rank
    note = f"offset {offset}, {'around' if more == AROUND else f'{more} more'}"
    if not is_dynamo_compiling():
        plan = remembered_plan(numbers, documents, world, rank, offset, more)
        return gather_pieces(call, plan, [x], dim, note, fill)[0]
    runs = [run for run in pieces(numbers, world, rank) if run.size > 0]
    shard = x.size(dim)
    size = shard if more == AROUND else shard + more * len(runs)
    place = call.group.handle, world, rank
    request = GatherRequest(
        *place,
        numbers,
        documents,
        offset,
        more,
        call.name,
        note,
        dim,
        float(fill),
        shard,
        size,
    )
    output: Tensor = torch.ops.spar.gather_pieces(x, *request, False, False, code())
    return output
