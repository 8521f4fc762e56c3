# SPDX-License-Identifier: Apache-2.0
"""The rows of a part that a whole index names: each rank has those that its part of the index names.

Every rank has the whole index, and finds what each rank wants: a plan needs no exchange. A row goes once to
each rank that wants it, and what ranks add to a row comes back as one sum from each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .._exchange.arguments import Arguments, apply_together, ranks_of
from .._exchange.layouts import swapped
from .._exchange.row_exchange import RowExchange, RowMaps
from .._exchange.row_plan import RowPlan, plan_known
from .memory import in_order_of, version_of
from .moving import runs_of
from .part import Part, Parts

_NAME = "a sharded model"
_MOST = 64  # of what is known in a forward


class RowTable(NamedTuple):
    """A rank's table: its rows of a part, and behind them those of others that its part of an index names.

    Attributes:
        part: of the rows.
        plan: which of them travel.
        local: this rank's part of the index: places in the table.
        gathers, adds: the exchange of rows to those that want them, and its transpose.
    """

    part: Part
    plan: RowPlan
    local: Tensor
    gathers: RowExchange
    adds: RowExchange

    @property
    def travel(self) -> bool:
        """Whether any rank wants rows of another."""
        return any(self.plan.sizes)

    def table(self, x: Tensor) -> Tensor:
        """Return the table of rows of which x has this rank's."""
        return in_order_of(self._run(self.gathers, x), x) if self.travel else x

    def added(self, table: Tensor) -> Tensor:
        """Return this rank's rows of the sum of all ranks' tables."""
        return self._run(self.adds, table) if self.travel else table

    def extremes(self, table: Tensor, how: str) -> Tensor:
        """Return this rank's rows of what is largest or smallest among all ranks' tables; not recorded."""
        dim, plan = self.part.dim, self.plan
        own, others = table.narrow(dim, 0, plan.own), table.narrow(dim, plan.own, plan.received)
        if not self.travel:
            return own
        assert plan.send is not None
        with torch.no_grad(), Arguments(_NAME, others, self.part.parts.group) as call:
            (args,) = plan.args(dim, call.world)
            (back,) = apply_together((call,), (swapped(args),))
            found: Tensor = own.index_reduce(dim, plan.send, back, how)
        return found

    def _run(self, exchange: RowExchange, x: Tensor) -> Tensor:
        with Arguments(_NAME, x, self.part.parts.group):
            (out,) = exchange.apply([x])
            return out


def part_of_index(part: Part, index: Tensor, dim: int) -> Part:
    """Return which part of an index each rank has.

    Loops behind a graph's edges, one for each node in order, lie on the ranks as the nodes do.
    """
    count, parts = index.size(dim) - part.whole, part.parts

    def has_loops() -> bool:
        return bool((index[count:] == torch.arange(part.whole, device=index.device)).all())

    is_longer = index.dim() == 1 and count >= parts.world and part.is_plain
    if is_longer and _known(parts, index, ("loops", part.whole, *_strides(index)), has_loops):
        return parts.part(dim, (count, *part.lengths))
    return parts.part(dim, (index.size(dim),))


def row_table(part: Part, index: Tensor, of_index: Part, wraps: bool = False) -> RowTable:
    """Return the table of a part's rows that a whole index of ints names, of which each rank has its part.

    wraps: whether ints below 0 count from the last row.

    Raises:
        IndexError: the index names a row that there is not. Every rank raises.
    """
    dims = [dim for dim, size in enumerate(index.shape) if size != 1 or dim == of_index.dim]
    key = part, of_index.at(dims.index(of_index.dim)), wraps, *_strides(index)
    rows: RowTable = _known(part.parts, index, key, lambda: _row_table(part, index, of_index, wraps))
    shape = [*index.shape]
    shape[of_index.dim] = of_index.local
    return rows._replace(local=rows.local.view(shape))


def _known(parts: Parts, index: Tensor, key: tuple[object, ...], find: Callable[[], Any]) -> Any:
    """Return what is found for an index: once in a forward, by the index's memory and version."""
    version, known = version_of(index), parts.indexes
    if version is None:
        return find()
    memory = StorageWeakRef(index.untyped_storage())  # its address is no other's while it is known
    key = *key, memory.cdata, version, index.dtype
    found = known.pop(key, None) or (memory, find())
    if len(known) >= _MOST:
        del known[next(iter(known))]
    known[key] = found
    return found[1]


def _strides(index: Tensor) -> tuple[object, ...]:
    """Return where in its memory an index has its ints."""
    sizes = [each for each in zip(index.shape, index.stride(), strict=True) if each[0] != 1]
    return index.storage_offset(), *sizes


def _row_table(part: Part, index: Tensor, of_index: Part, wraps: bool) -> RowTable:
    index, ranks = _checked(part, index, wraps), range(part.parts.world)
    indexes = [_of_rank(index, of_index, rank) for rank in ranks]
    plan = plan_known([runs_of(part, rank) for rank in ranks], indexes, part.parts.rank)
    group, maps = ranks_of(part.parts.group, _NAME), RowMaps(plan, [part.dim], selects=False)
    gathers, adds = [RowExchange(_NAME, group, maps, adds) for adds in (False, True)]
    return RowTable(part, plan, plan.local, gathers, adds)


def _checked(part: Part, index: Tensor, wraps: bool) -> Tensor:
    """Return an index whose ints are rows, counted from the first."""
    if not index.numel():
        return index
    low, high = torch.stack(index.aminmax()).tolist()
    if low < (-part.whole if wraps else 0) or high >= part.whole:
        raise IndexError(
            f"index {high if high >= part.whole else low} is out of bounds for dim {part.dim} of size "
            f"{part.whole}, on rank {part.parts.rank} of {part.parts.world}"
        )
    return torch.where(index < 0, index + part.whole, index) if low < 0 else index


def _of_rank(index: Tensor, of_index: Part, rank: int) -> Tensor:
    runs = [index.narrow(of_index.dim, run.start, run.size) for run in runs_of(of_index, rank)]
    return torch.cat(runs, of_index.dim) if runs else index.narrow(of_index.dim, 0, 0)
