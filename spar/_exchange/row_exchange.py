# SPDX-License-Identifier: Apache-2.0
"""An exchange of rows, with the selections before and behind it, as one linear operation.

So it is recorded, started and transposed as any exchange. Recorded apart, each selection would fill a whole
gradient with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import _C
from .._control.agreement import is_reported
from .._control.state import Place
from .._group.group import Group
from .._transports.dtypes import copy_items
from .autograd import apply
from .exchange import Exchange, Listed, Number, Tensors, backward_of
from .graph_ops import in_graph
from .layouts import Args, swapped
from .observers import is_any_traced, must_record
from .row_plan import RowPlan

# Returns a new tensor of a shape, of another one's dtype and device.
Allocate = Callable[[Sequence[int], Tensor], Tensor]


def resized(x: Tensor, dim: int, size: int, replaced: int = 1) -> list[int]:
    """Return a tensor's shape with a size in the place of so many dims."""
    return [*x.shape[:dim], size, *x.shape[dim + replaced :]]


def new(shape: Sequence[int], like: Tensor) -> Tensor:
    return like.new_empty(shape)


class RowMaps:
    """What a rank does with the rows of its tensors before and behind their exchange; and the transpose.

    Own rows of a table go through the exchange, which copies them as fast as all others.

    Attributes:
        plan: of the rows.
        dims: the sharded dim of each tensor.
        selects: whether the index is selected from the table, else the table is the output.
        unused: how many own rows the table lacks.
        listed: the rows that are sent, as an exchange lists them; None: they are not rows of dim 0.
    """

    def __init__(self, plan: RowPlan, dims: Sequence[int], selects: bool) -> None:
        self.plan, self.dims, self.selects = plan, tuple(dims), selects
        self.unused = plan.unused if selects else 0
        self.listed: Listed = None
        if plan.send is not None and not any(self.dims):
            self.listed = (*([] if selects else [None]), plan.send) * len(self.dims)

    @property
    def are_tables(self) -> bool:
        """Whether each tensor that is received is a table: it has the rows of one part alone."""
        plan = self.plan
        return self.selects and len(plan.parts) == 1 and plan.rows - self.unused == plan.received

    def args(self, world: int) -> list[Args]:
        """Return the layouts of all tensors of the exchange."""
        plan, found = self.plan, []
        for dim in self.dims:
            found += [*([] if self.selects else [plan.own_args(dim)]), *plan.args(dim, world)]
        return found

    def shapes(self, inputs: Tensors, adds: bool) -> list[list[int]]:
        """Return the shape of each output; adds: of the transpose."""
        plan, count = self.plan, self.plan.local.dim() if self.selects else 1
        pairs = list(zip(inputs, self.dims, strict=True))
        if adds:
            return [resized(y, dim, plan.own, count) for y, dim in pairs]
        if self.selects:
            return [self._gathered_shape(x, dim) for x, dim in pairs]
        return [resized(x, dim, plan.rows) for x, dim in pairs]

    def _gathered_shape(self, x: Tensor, dim: int) -> list[int]:
        return [*x.shape[:dim], *self.plan.local.shape, *x.shape[dim + 1 :]]

    def sections(self, table: Tensor, dim: int) -> list[Tensor]:
        """Return the parts of a table that are in the exchange."""
        plan = self.plan
        if self.are_tables:
            return [table]
        sizes = plan.parts if self.selects else (plan.own, *plan.parts)
        first = plan.own - self.unused if self.selects else 0
        return list(table.narrow(dim, first, sum(sizes)).split(sizes, dim))

    def per_tensor(self, parts: Tensors) -> list[Tensors]:
        """Divide the tensors of an exchange by those that the caller has."""
        count = len(parts) // len(self.dims)
        return [parts[i : i + count] for i in range(0, len(parts), count)]

    def sent(self, inputs: Tensors, allocate: Allocate | None = None) -> list[Tensor]:
        """Return what the rank sends of its shards; allocate: memory for copies, which are not recorded."""
        send, found = self.plan.send, []
        for x, dim in zip(inputs, self.dims, strict=True):
            found += [] if self.selects else [x]
            if send is None:
                found += [x] * len(self.plan.parts)
                continue
            out = None if allocate is None else allocate(resized(x, dim, len(send)), x)
            found.append(torch.index_select(x, dim, send, out=out))
        return found

    def joined(self, x: Tensor, received: Tensors, dim: int) -> Tensor:
        """Return an output, by operations of which each has a derivative."""
        plan, own = self.plan, [x] if self.selects else []
        zeros = [x.new_zeros(resized(x, dim, plan.zeros))] if plan.zeros else []
        table = torch.cat([*own, *received, *zeros], dim)
        if not self.selects:
            return table
        return table.index_select(dim, plan.local.reshape(-1)).reshape(self._gathered_shape(x, dim))

    def tables(self, inputs: Tensors, allocate: Allocate) -> list[Tensor]:
        """Return, for each tensor, the sums of all rows that this rank adds, in the places of a table."""
        if not self.selects:
            return list(inputs)
        plan, count, found = self.plan, self.plan.local.dim(), []
        for y, dim in zip(inputs, self.dims, strict=True):
            sums = allocate(resized(y, dim, plan.rows - self.unused, count), y).zero_()
            found.append(sums.index_add_(dim, plan.entries, y.flatten(dim, dim + count - 1)))
        return found

    def parts(self, tables: Tensors) -> list[Tensor]:
        """Return the sections of all tables."""
        return [
            part for table, dim in zip(tables, self.dims, strict=True) for part in self.sections(table, dim)
        ]

    def added(self, table: Tensor, back: Tensors, dim: int, allocate: Allocate) -> Tensor:
        """Return what this rank adds to its own rows, and what the others add."""
        size = self.plan.own
        if self.selects:
            own = allocate(resized(table, dim, size), table)
            own = own.zero_() if self.unused else own.copy_(table.narrow(dim, 0, size))
        else:
            own, *back = back
        if self.plan.send is not None:
            return own.index_add_(dim, self.plan.send, *back)
        for part in back:
            own.add_(part)
        return own


class RowExchange(Exchange):
    """An exchange of the rows of tensors, with what a rank does before and behind it.

    Attributes:
        maps: what is done on each rank.
        adds: whether it is the transpose: rows go to their owners, and are added there.
    """

    __slots__ = ("adds", "maps")

    def __init__(
        self,
        name: str,
        group: Group | Place,
        maps: RowMaps,
        adds: bool,
        records: bool = False,
        note: str = "",
    ) -> None:
        args = maps.args(group.world)
        args = list(map(swapped, args)) if adds else args
        super().__init__(name, group, tuple(args), records=records, note=note)
        self.maps, self.adds = maps, adds

    @property
    def reads(self) -> Tensors:
        plan = self.maps.plan
        return [plan.local, plan.entries, *([] if plan.send is None else [plan.send])]

    def transpose(self) -> RowExchange:
        return RowExchange(backward_of(self.name), self.group, self.maps, not self.adds)

    def _recorded_as(self, name: str) -> RowExchange:
        return RowExchange(name, self.group, self.maps, self.adds, True, self.note)

    def apply(self, inputs: Tensors) -> Tensors:
        """Run it, and record it if a tensor needs a gradient."""
        if is_dynamo_compiling():
            return mapped(self.maps, inputs, self.adds, self._put_in_graph)
        return apply(self.recorded() if must_record(inputs) else self, inputs)

    alone = apply

    def _put_in_graph(self, sent: Tensors) -> Tensors:
        if self.group.world == 1:
            return sent
        records = must_record(sent)
        return in_graph(Exchange(self.name, self.group, self.args, records=records, note=self.note), sent)

    def shapes(self, inputs: Tensors) -> list[list[int]]:
        return self.maps.shapes(inputs, self.adds)

    def run(
        self,
        inputs: Tensors,
        forward: Number = 0,
        outs: Tensors | None = None,
        traced: bool | None = None,
        queued: bool = False,
        listed: Listed = None,  # what it exchanges is listed by its maps
    ) -> Tensors:
        if traced is None:
            traced = is_any_traced(inputs)
        if traced:
            return mapped(self.maps, inputs, self.adds, lambda sent: self._exchange(sent, forward))
        if inputs[0].is_meta:
            if isinstance(self.group, Group) and self.group.world > 1:
                self.group.calls += 1
            return [x.new_empty(shape) for x, shape in zip(inputs, self.shapes(inputs), strict=True)]
        group, made = self.group, getattr(self.group, "calls", 0)
        try:
            if not self.adds:
                return self._gather(inputs, outs, forward, queued)
            sums = self._add(inputs, forward, queued)
            for target, x in zip(outs or (), sums, strict=outs is not None):
                target.copy_(x)
            return sums if outs is None else list(outs)
        except BaseException as error:
            # In flight no caller reports what fails before the exchange.
            if queued and isinstance(group, Group) and group.calls == made and not is_reported(error, group):
                group.fail(self.name, inputs[0].device.type, error, queued=True)
            raise

    def _gather(self, inputs: Tensors, given: Tensors | None, forward: Number, queued: bool) -> list[Tensor]:
        maps, plan = self.maps, self.maps.plan
        selects = maps.selects and not plan.is_table
        tables = None if selects else given
        if maps.are_tables:
            tables = self._exchange_sent(inputs, forward, tables, queued)
        else:
            tables = self._joined(inputs, tables, forward, queued)
        if not selects:
            return list(tables)
        outs = given or [self._allocate(*each) for each in zip(self.shapes(inputs), inputs, strict=True)]
        for table, out, dim in zip(tables, outs, maps.dims, strict=True):
            y = out.flatten(dim, dim + plan.local.dim() - 1)
            torch.index_select(table, dim, plan.entries, out=y)
        return list(outs)

    def _joined(self, inputs: Tensors, given: Tensors | None, forward: Number, queued: bool) -> Tensors:
        """Return tables of own rows, received ones and zeros."""
        maps, plan, tables = self.maps, self.maps.plan, []
        for i, (x, dim) in enumerate(zip(inputs, maps.dims, strict=True)):
            rows = plan.rows - maps.unused
            table = given[i] if given else self._allocate(resized(x, dim, rows), x)
            if maps.selects and not maps.unused:
                copy_items(table.narrow(dim, 0, plan.own), x)
            if plan.zeros:
                table.narrow(dim, rows - plan.zeros, plan.zeros).zero_()
            tables.append(table)
        # Peers write straight to the parts of a table, unless rows are not whole there.
        targets = maps.parts(tables)
        if all(target.is_contiguous() for target in targets):
            self._exchange_sent(inputs, forward, targets, queued)
        else:
            for target, part in zip(targets, self._exchange_sent(inputs, forward, None, queued), strict=True):
                copy_items(target, part)
        return tables

    def _exchange_sent(
        self, inputs: Tensors, forward: Number, targets: Tensors | None, queued: bool
    ) -> Tensors:
        """Exchange what the rank sends of its shards, which the core reads there if it can."""
        maps, group, reads = self.maps, self.group, False
        if maps.listed is not None and isinstance(group, Group) and group.world > 1:
            reads = group.channel(self.name, inputs[0].device).lists
        if not reads or not all(x.is_contiguous() for x in inputs):
            return self._exchange(maps.sent(inputs, self._allocate), forward, targets, queued)
        sent = inputs if maps.selects else [x for x in inputs for _ in range(2)]
        return super().run(sent, forward, targets, False, queued, maps.listed)

    def _add(self, inputs: Tensors, forward: Number, queued: bool) -> list[Tensor]:
        maps = self.maps
        is_table = maps.selects and maps.plan.is_table
        tables = inputs if is_table else maps.tables(inputs, self._allocate)
        back = maps.per_tensor(self._exchange(maps.parts(tables), forward, None, queued))
        triples = zip(tables, back, maps.dims, strict=True)
        return [maps.added(*each, self._allocate) for each in triples]

    def _exchange(
        self, sent: Tensors, forward: Number, targets: Tensors | None = None, queued: bool = False
    ) -> Tensors:
        if self.group.world > 1:
            return super().run(sent, forward, targets, None, queued)
        if targets is None:
            return [x.clone() for x in sent]
        for target, x in zip(targets, sent, strict=True):
            copy_items(target, x)
        return targets

    def _allocate(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return memory that was used before, if there is enough: page faults take longer than copies."""
        group, size = self.group, math.prod(shape) * like.element_size()
        cap, _, allocated, *_ = _C.arena_stats()
        if not isinstance(group, Group) or group.world == 1 or size > cap // 2 - allocated:
            return new(shape, like)
        return group.channel(self.name, like.device).allocate(shape, like)


def mapped(
    maps: RowMaps, inputs: Tensors, adds: bool, exchange: Callable[[Tensors], Tensors]
) -> list[Tensor]:
    """Return what a RowExchange does, by operations of which each has a derivative."""
    if not adds:
        received = maps.per_tensor(exchange(maps.sent(inputs)))
        return [maps.joined(*each) for each in zip(inputs, received, maps.dims, strict=True)]
    tables = maps.tables(inputs, new)
    back = maps.per_tensor(exchange(maps.parts(tables)))
    return [maps.added(*each, new) for each in zip(tables, back, maps.dims, strict=True)]
