# SPDX-License-Identifier: Apache-2.0
"""From one part to another of the same tokens: an exchange of those that another rank is to hold."""

from __future__ import annotations

import torch
from torch import Tensor

from .._exchange.arguments import Arguments
from .._exchange.gather_plan import GatherPlan, plan_pieces
from .._exchange.gathering import gather_pieces
from .._exchange.layouts import Piece
from .dtensors import is_distributed
from .part import Part, in_order_of, mark, part_of


def moved(x: Tensor, part: Part, start: int = 0) -> Tensor:
    """Return another part of the whole of x, or of what begins at `start` in the dim of its part.

    Both parts are of the same dim.
    """
    own = part_of(x)
    assert own is not None
    if own is part:
        return x
    if is_distributed(x):
        return part.parts.shard(part.parts.gather(x).narrow(own.dim, start, part.whole), part)
    plan = _plan(own, part, start)
    if plan is None:
        return mark(x.clone(memory_format=torch.preserve_format), part)
    with Arguments("a sharded model", x, part.parts.group) as call:
        out = gather_pieces(call, plan, [x], own.dim, f"part at {start}")[0]
    return mark(in_order_of(out, x), part)


def _plan(own: Part, wanted: Part, start: int) -> GatherPlan | None:
    """Return how ranks exchange their tokens; None if each holds those that it wants."""
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
