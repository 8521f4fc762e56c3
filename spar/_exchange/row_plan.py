# SPDX-License-Identifier: Apache-2.0
"""Plan which rows of a sharded dim travel, where each rank wants rows by their index in the whole.

A rank that does not know what the others want learns in two exchanges what to send: how many rows each rank
wants of each, and which. Each row travels once to a rank, however often its index has it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._group.group import Call
from .arguments import Arguments
from .exchange import Exchange
from .gather_plan import placed
from .layouts import WHOLE, Args, Layout, Piece, by_receiver, by_sizes, even, pair, rotated, shards, swapped
from .observers import is_fake

# An index has it where it wants zeros.
PADDING = -1
# Times as many rows in the whole as are wanted, up to which marks find them faster than a sort.
_MARKED = 8
# From this share of all rows on, shards travel whole, which saves the copy of the rows that are sent.
_WHOLE = 3, 4


@dataclass(frozen=True, eq=False)
class RowPlan:
    """What one rank sends and receives, so that it has the rows that it wants.

    A table has the rank's own rows, and behind them those that it receives, owner by owner, then a row of
    zeros if the index may have PADDING.

    Attributes:
        local: the place in the table of each entry of the index, in its shape.
        send: the places in the shard of what the rank sends, receiver by receiver. None: shards travel whole,
            and those of the next ranks, counted round, are received.
        sizes: how many rows each receiver gets from each owner, receiver by receiver.
        held: how many rows each rank has.
        own, zeros: how many rows the table has of these.
        unused: how many own rows there are, if no entry is one of them, nor zeros; else 0.
        parts: the rows of each tensor that is received.
        is_table: whether the index lists the whole table behind unused rows: nothing is to be selected.
        note: which plan it is, in words, as others may have rows of the same sizes.
    """

    local: Tensor
    send: Tensor | None
    sizes: tuple[int, ...]
    held: tuple[int, ...]
    own: int
    zeros: int
    unused: int
    parts: tuple[int, ...]
    is_table: bool = False
    note: str = ""

    @property
    def received(self) -> int:
        return sum(self.parts)

    @property
    def rows(self) -> int:
        """How many a table has."""
        return self.own + self.received + self.zeros

    @functools.cached_property
    def entries(self) -> Tensor:
        """The places of all entries behind unused rows, in one dim."""
        entries = self.local.reshape(-1)
        return entries - self.unused if self.unused else entries

    def args(self, dim: int, world: int) -> tuple[Args, ...]:
        """Return the layouts of each tensor that is received."""
        if self.send is not None:
            return (by_receiver(dim, world, self.sizes),)
        turns = [rotated(dim, self.held, world - k) for k in range(1, world)]
        return tuple([pair(by_sizes(dim, self.held), turn) for turn in turns])

    def own_args(self, dim: int) -> Args:
        """Return the layouts of own rows, which stay."""
        return pair(by_sizes(dim, self.held), by_sizes(dim, self.held))


class _Wanted(NamedTuple):
    """The rows that one rank wants, by their numbers among the rows of all ranks."""

    numbers: Tensor  # of each entry of its index, in one dim, or PADDING
    is_other: Tensor  # whether it is another rank's
    rows: Tensor  # those of others, sorted, and so owner by owner, each once
    places: Tensor  # the place among these of each entry that is another rank's
    counts: Tensor  # how many of them each rank has


def plan_rows(call: Arguments, layout: Layout, padding: bool) -> RowPlan:
    """Return a rank's plan for the index that is the call's input: two exchanges at most.

    layout: of the dim that is sharded. padding: whether the index may have PADDING.
    """
    index, world = call.input, call.world
    ends, runs = _rank_order(shards(layout, world))
    flat = _checked(call, ends[-1], padding)
    numbers = _numbered(flat.clamp(min=0) if padding else flat, runs)
    if padding:
        numbers[flat < 0] = PADDING
    wanted = _wanted(numbers, ends, call.rank)
    sizes = _exchanged(call, wanted.counts[None], pair(even(0, world), WHOLE), "counts").flatten().tolist()
    send: Tensor | None = None
    if not _are_most(sum(sizes), ends[-1], world):
        begins = torch.tensor(ends[:-1], dtype=torch.int64, device=index.device)
        asked = wanted.rows - begins.repeat_interleave(wanted.counts)
        asked = asked.to(torch.int32) if ends[-1] < 2**31 else asked
        send = _exchanged(call, asked, swapped(by_receiver(0, world, sizes)), "places").to(torch.int64)
    plan = _planned(wanted, ends, call.rank, sizes, send, index.shape, int(padding))
    return replace(plan, note=f"plan of call {getattr(call.group, 'calls', 0)}")


def plan_known(held: Sequence[Sequence[Piece]], indexes: Sequence[Tensor], rank: int) -> RowPlan:
    """Return a rank's plan where it knows the indexes of all ranks, without an exchange.

    held: the runs of the whole that each rank has.
    """
    ends, runs = _rank_order(held)
    wanted = [_wanted(_numbered(x.flatten().long(), runs), ends, r) for r, x in enumerate(indexes)]
    sizes = torch.cat([each.counts for each in wanted]).tolist()
    own = [each.rows[(each.rows >= ends[rank]) & (each.rows < ends[rank + 1])] for each in wanted]
    return _planned(wanted[rank], ends, rank, sizes, torch.cat(own) - ends[rank], indexes[rank].shape)


def _wanted(numbers: Tensor, ends: list[int], rank: int) -> _Wanted:
    is_other = (numbers >= 0) & ((numbers < ends[rank]) | (numbers >= ends[rank + 1]))
    rows, places = _distinct(numbers[is_other], ends[-1])
    bounds = torch.tensor(ends, dtype=torch.int64, device=numbers.device)
    return _Wanted(numbers, is_other, rows, places, torch.searchsorted(rows, bounds).diff())


def _planned(
    wanted: _Wanted,
    ends: list[int],
    rank: int,
    sizes: list[int],
    send: Tensor | None,
    shape: torch.Size,
    zeros: int = 0,
) -> RowPlan:
    """Return the plan of a rank that knows what it sends, of an index of a shape."""
    held = tuple([end - begin for begin, end in itertools.pairwise(ends)])
    own, local = held[rank], wanted.numbers - ends[rank]
    if send is None:
        parts, ranks = held[rank + 1 :] + held[:rank], range(len(held))
        sizes = [0 if r == owner else held[owner] for r in ranks for owner in ranks]
        local = local % max(ends[-1], 1)
    else:
        parts = (len(wanted.rows),)
        local[wanted.is_other] = wanted.places + own
    if zeros:
        local[wanted.numbers < 0] = own + sum(parts)
    unused, end = own if wanted.is_other.all() else 0, own + sum(parts) + zeros
    is_table = shape == (end - unused,) and torch.equal(local, torch.arange(unused, end, device=local.device))
    return RowPlan(local.reshape(shape), send, tuple(sizes), held, own, zeros, unused, parts, is_table)


def _checked(call: Arguments, total: int, padding: bool) -> Tensor:
    """Check the index; return it in one dim."""
    index, least = call.input, PADDING if padding else 0
    if is_fake(index):
        # This block does not know the device, as that of a meta tensor is none on which peers wait.
        with Call(call.group, call.name, call.exchanges):
            value = f"a tensor on {index.device} without values"
            raise call.error("index", value, "one with values, outside of compiled code")
    if index.dtype not in (torch.int32, torch.int64):
        raise call.type_error("index", f"a tensor of {index.dtype}", "torch.int64 or torch.int32")
    flat = index.detach().reshape(-1).to(torch.int64).contiguous()
    if flat.numel():
        low, high = [int(end) for end in flat.aminmax()]
        if low < least or high >= total:
            hint = ". padding=True lets it have -1, for zeros" if low == PADDING and high < total else ""
            expected = f"rows from {least} to {total - 1}{hint}"
            raise call.error("index", f"a tensor with values from {low} to {high}", expected)
    return flat


def _rank_order(held: Sequence[Sequence[Piece]]) -> tuple[list[int], list[tuple[int, int]]]:
    """Number the rows rank by rank: where each rank's end, and by how much each run of the whole moves."""
    ends, runs = [0], []
    for listed in held:
        begin = ends[-1]
        runs += [(run.start, begin + at - run.start) for at, run in placed(listed)]
        ends.append(begin + sum([run.size for run in listed]))
    return ends, sorted(runs)


def _numbered(index: Tensor, runs: list[tuple[int, int]]) -> Tensor:
    """Return the numbers of rows of the whole."""
    if all(shift == 0 for _, shift in runs):
        return index
    starts, shifts = torch.tensor(runs, dtype=torch.int64, device=index.device).unbind(1)
    return index + shifts[torch.searchsorted(starts.contiguous(), index, right=True) - 1]


def _distinct(numbers: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the distinct numbers below a total, sorted, and the place of each number among them."""
    if total > _MARKED * numbers.numel():
        found, places = torch.unique(numbers, return_inverse=True)
        return found, places
    is_there = torch.zeros(total, dtype=torch.bool, device=numbers.device)
    is_there[numbers] = True
    counted = is_there.cumsum(0, dtype=torch.int32 if total < 2**31 else torch.int64)
    return is_there.nonzero().squeeze(1), counted[numbers].to(torch.int64) - 1


def _are_most(rows: int, total: int, world: int) -> bool:
    """Whether so many rows, which all ranks receive together, are most of what they lack."""
    share, of = _WHOLE
    return 1 < world <= _C.MOST_TENSORS and of * rows >= share * (world - 1) * total > 0


def _exchanged(call: Arguments, x: Tensor, args: Args, note: str) -> Tensor:
    if call.world == 1:
        return x
    return Exchange(call.name, call.group, (args,), note=note).run([x])[0]
