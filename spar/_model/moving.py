# SPDX-License-Identifier: Apache-2.0
"""From one part of a whole tensor to another: an exchange of what another rank is to hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._exchange.arguments import Arguments
from .._exchange.gather_plan import GatherPlan, plan_pieces
from .._exchange.gathering import gather_pieces
from .._exchange.layouts import Piece
from ..ops.all_to_all import all_to_all
from .dtensors import is_distributed
from .memory import in_order_of
from .nested import changed
from .part import Part, Parts, mark, part_of

# An uneven part's attribute: its even one, and what says that neither was changed since.
_EVEN = "_spar_even"


def moved(x: Tensor, part: Part, start: int = 0) -> Tensor:
    """Return another part of the whole of x, or of what begins at `start` in the dim of both parts."""
    own = part_of(x)
    assert own is not None
    if own is part:
        return x
    if own.dim != part.dim:
        return in_other_dim(x, part)
    if is_distributed(x):
        return part.parts.shard(part.parts.gather(x).narrow(own.dim, start, part.whole), part)
    plan = _plan(own, part, start)
    if plan is None:
        return mark(x.clone(memory_format=torch.preserve_format), part)
    return mark(gathered(x, part, plan, f"part at {start}"), part)


def gathered(x: Tensor, part: Part, plan: GatherPlan, note: str, fill: float = 0.0) -> Tensor:
    """Return the pieces of a plan along a part's dim, laid out as x. note, fill: as of `gather_pieces`."""
    with Arguments("a sharded model", x, part.parts.group) as call:
        return in_order_of(gather_pieces(call, plan, [x], part.dim, note, fill)[0], x)


def in_other_dim(x: Tensor, part: Part) -> Tensor:
    """Return the part of another dim of the whole of x: rows become columns, in one exchange."""
    return mark(in_order_of(turned(x, part), x), part)


def turned(x: Tensor, part: Part) -> Tensor:
    """Return the elements of the part of another dim, contiguous: what only reads them needs no order."""
    own = part_of(x)
    assert own is not None
    before, after = own.layout, part.layout
    if before is None or after is None or is_distributed(x):
        return part.parts.shard(part.parts.gather(x), part)
    return all_to_all(x, part.parts.group, part.dim, own.dim, layout=before, scatter_layout=after)


def _plan(own: Part, wanted: Part, start: int) -> GatherPlan | None:
    """Return how ranks exchange their rows; None if each holds those that it wants."""
    known, key = own.parts.moves, (own, wanted, start)
    if key not in known:
        ranks = range(own.parts.world)
        held = [runs_of(own, rank) for rank in ranks]
        pieces = [[(start + run.start, run.size) for run in runs_of(wanted, rank)] for rank in ranks]
        is_there = pieces == [[(run.start, run.size) for run in each] for each in held]
        known[key] = None if is_there else plan_pieces(held, pieces, own.parts.rank)
    return known[key]


def runs_of(part: Part, rank: int) -> list[Piece]:
    """Return the runs of a whole dim that a rank holds, in order."""
    before, after = part.padding
    found = [Piece(0, before, 0)] if before and rank == 0 else []
    for outer in range(part.outer):
        at = outer * part.tokens
        for length in part.lengths:
            for start, size in part.parts.runs(length, rank):
                found.append(Piece(before + (at + start) * part.inner, size * part.inner, 0))
            at += length
    if after and rank == part.last:
        found.append(Piece(part.whole - after, after, 0))
    return found


def cut(x: Tensor, start: int, stop: int) -> Tensor:
    """Return the part of tokens start to before stop, which lie anywhere in the sequences of x."""
    part = part_of(x)
    assert part is not None
    return moved(x, within(part, start, stop), start)


def within(part: Part, start: int, stop: int) -> Part:
    """Return the part that `cut` makes: of what is left of each sequence."""
    left, at = [], 0
    for length in part.lengths:
        size = min(stop, at + length) - max(start, at)
        if size > 0:
            left.append(size)
        at += length
    return part.of(tuple(left))


def shard_in_place(x: Tensor, part: Part) -> Tensor:
    """Let a whole tensor, which no graph has, become its part in other memory; return the whole."""
    whole = x.detach()
    x.data = part.parts.shard(whole, part).clone()
    mark(x, part)
    return whole


def as_part(x: Tensor, part: Part) -> Tensor:
    """Return a tensor, whole or another part, as this part."""
    return part.parts.shard(x, part) if part_of(x) is None else moved(x, part)


def moved_arguments(parts: Parts, moves: dict[int, Part | None], args: Any, kwargs: Any) -> Any:
    """Return a call's arguments with some tensors as other parts, or whole, by their places."""
    count = -1

    def move(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if count not in moves:
            return x
        part = moves[count]
        if part is None:
            return parts.gather(x)
        return as_part(x, part)

    return changed(move, (args, kwargs))


def even_of(x: Tensor) -> Tensor:
    """Return the even part of an uneven one, which is moved once: a norm and a residual both read it."""
    part = part_of(x)
    if part is None or not part.is_uneven:
        return x
    has_graph, known = torch.is_grad_enabled(), getattr(x, _EVEN, None)
    if known is not None and known[1:] == (has_graph, x._version, known[0]._version):
        even: Tensor = known[0]
        return even
    even = part.parts.gather(x) if part.tokens < part.parts.world else moved(x, part.even)
    if not (x.is_inference() or even.is_inference()):  # such tensors do not count their changes
        setattr(x, _EVEN, (even, has_graph, x._version, even._version))
    return even
