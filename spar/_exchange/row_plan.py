# SPDX-License-Identifier: Apache-2.0
"""Plan which rows of a sharded dim travel, where each rank wants rows by their index in the whole.

No rank knows what the others want. So owners learn in two exchanges what to send: how many rows each rank
wants of each, and which. Each row travels once to a rank, however often its index has it.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _C
from .._group.group import Call
from .arguments import Arguments
from .exchange import Exchange
from .gather_plan import placed
from .layouts import WHOLE, Args, Layout, by_receiver, by_sizes, even, pair, rotated, shards, swapped
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

    @functools.cached_property
    def is_table(self) -> bool:
        """Whether the index lists the whole table behind unused rows: nothing is to be selected."""
        if self.local.shape != (self.rows - self.unused,):
            return False
        return torch.equal(self.entries, torch.arange(len(self.entries), device=self.local.device))

    def args(self, dim: int, world: int) -> tuple[Args, ...]:
        """Return the layouts of each tensor that is received."""
        if self.send is not None:
            return (by_receiver(dim, world, self.sizes),)
        turns = [rotated(dim, self.held, world - k) for k in range(1, world)]
        return tuple([pair(by_sizes(dim, self.held), turn) for turn in turns])

    def own_args(self, dim: int) -> Args:
        """Return the layouts of own rows, which stay."""
        return pair(by_sizes(dim, self.held), by_sizes(dim, self.held))


def plan_rows(call: Arguments, layout: Layout, padding: bool) -> RowPlan:
    """Return a rank's plan for the index that is the call's input: two exchanges at most.

    layout: of the dim that is sharded. padding: whether the index may have PADDING.
    """
    index, world, rank = call.input, call.world, call.rank
    ends, runs = _rank_order(layout, world)
    flat = _checked(call, ends[-1], padding)
    is_zero = flat < 0
    numbers = _numbered(flat.clamp(min=0) if padding else flat, runs)
    held = tuple([end - begin for begin, end in itertools.pairwise(ends)])
    begin, own = ends[rank], held[rank]
    is_other = ((numbers < begin) | (numbers >= begin + own)) & ~is_zero
    wanted, places = _distinct(numbers[is_other], ends[-1])
    local = numbers - begin
    bounds = torch.tensor(ends, dtype=torch.int64, device=flat.device)
    counts = torch.searchsorted(wanted, bounds).diff()
    table = _exchanged(call, counts[None], pair(even(0, world), WHOLE), "counts").reshape(-1).tolist()
    send: Tensor | None = None
    if _are_most(sum(table), ends[-1], world):
        table = [0 if r == owner else held[owner] for r in range(world) for owner in range(world)]
        parts = held[rank + 1 :] + held[:rank]
        local = local % max(ends[-1], 1)
    else:
        local[is_other] = places + own
        asked = wanted - bounds[:-1].repeat_interleave(counts)
        asked = asked.to(torch.int32) if ends[-1] < 2**31 else asked
        send = _exchanged(call, asked, swapped(by_receiver(0, world, table)), "places").to(torch.int64)
        parts = (len(wanted),)
    if padding:
        local[is_zero] = own + sum(parts)
    return RowPlan(
        local.reshape(index.shape),
        send,
        tuple(table),
        held,
        own=own,
        zeros=int(padding),
        unused=own if is_other.all() else 0,
        parts=parts,
        note=f"plan of call {getattr(call.group, 'calls', 0)}",
    )


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


def _rank_order(layout: Layout, world: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Number the rows rank by rank: where each rank's end, and by how much each run of the whole moves."""
    ends, runs = [0], []
    for listed in shards(layout, world):
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
