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
from .._control.state import Place
from .._group.group import Group
from .._transports.dtypes import ITEMS
from .autograd import apply
from .exchange import ARITHMETIC, Exchange, Number, Tensors, backward_of
from .graph_ops import in_graph
from .layouts import swapped
from .observers import is_any_traced, must_record
from .row_plan import RowPlan

# Returns a new tensor of a shape, of another one's dtype and device.
Allocate = Callable[[Sequence[int], Tensor], Tensor]


def resized(x: Tensor, dim: int, size: int, replaced: int = 1) -> list[int]:
    """Return a tensor's shape with a size in the place of so many dims."""
    return [*x.shape[:dim], size, *x.shape[dim + replaced :]]


def allocate(shape: Sequence[int], like: Tensor) -> Tensor:
    return like.new_empty(shape)


class RowMaps:
    """What a rank does with the rows of its tensors before and behind their exchange; and the transpose.

    Attributes:
        plan: of the rows.
        dims: the sharded dim of each tensor.
        selects: whether the index is selected from the table, else the table is the output.
    """

    def __init__(self, plan: RowPlan, dims: Sequence[int], selects: bool) -> None:
        self.plan, self.dims, self.selects = plan, tuple(dims), selects

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

    def per_tensor(self, parts: Tensors) -> list[Tensors]:
        """Divide the tensors of an exchange by those that the caller has."""
        count = len(self.plan.parts)
        return [parts[i : i + count] for i in range(0, len(parts), count)]

    # ---- gathering ----

    def sent(self, inputs: Tensors, allocate: Allocate | None = None) -> list[Tensor]:
        """Return what the rank sends of its shards."""
        send, found = self.plan.send, []
        for x, dim in zip(inputs, self.dims, strict=True):
            if send is None:
                found += [x] * len(self.plan.parts)
            elif allocate is None:
                found.append(x.index_select(dim, send))
            else:
                packed = allocate(resized(x, dim, len(send)), x)
                found.append(torch.index_select(x, dim, send, out=packed))
        return found

    def joined(self, x: Tensor, received: Tensors, dim: int) -> Tensor:
        """Return an output, by operations of which each has a derivative."""
        plan = self.plan
        zeros = [x.new_zeros(resized(x, dim, plan.zeros))] if plan.zeros else []
        table = torch.cat([x, *received, *zeros], dim)
        if not self.selects:
            return table
        return table.index_select(dim, plan.local.reshape(-1)).reshape(self._gathered_shape(x, dim))

    def write(self, out: Tensor, x: Tensor, received: Tensor, dim: int) -> None:
        """Write an output; of a table the received rows are there already."""
        plan, own = self.plan, self.plan.own
        if not self.selects:
            out.narrow(dim, 0, own).copy_(x)
            out.narrow(dim, plan.rows - plan.zeros, plan.zeros).zero_()
            return
        chosen, y = plan.selection, out.flatten(dim, dim + plan.local.dim() - 1)
        one, other = (x, received) if chosen.from_own else (received, x)
        if one.size(dim):
            torch.index_select(one, dim, chosen.first, out=y)
        if len(chosen.at):
            y.index_copy_(dim, chosen.at, other.index_select(dim, chosen.second))
        if len(chosen.zeros):
            y.index_fill_(dim, chosen.zeros, 0)

    # ---- adding ----

    def tables(self, inputs: Tensors, allocate: Allocate) -> list[Tensor]:
        """Return, for each tensor, the sums of all rows that this rank adds, in the places of a table."""
        if not self.selects:
            return list(inputs)
        plan, found = self.plan, []
        for y, dim in zip(inputs, self.dims, strict=True):
            count = plan.local.dim()
            sums = allocate(resized(y, dim, plan.rows, count), y).zero_()
            found.append(sums.index_add_(dim, plan.local.reshape(-1), y.flatten(dim, dim + count - 1)))
        return found

    def returned(self, tables: Tensors) -> list[Tensor]:
        """Return the parts of tables that go to their owners."""
        plan = self.plan
        return [
            part
            for table, dim in zip(tables, self.dims, strict=True)
            for part in table.narrow(dim, plan.own, plan.received).split(plan.parts, dim)
        ]

    def add(self, out: Tensor, table: Tensor, back: Tensors, dim: int) -> Tensor:
        """Write to `out` what this rank adds to its own rows, and add what the others do."""
        out.copy_(table.narrow(dim, 0, self.plan.own))
        if self.plan.send is not None:
            return out.index_add_(dim, self.plan.send, *back)
        for part in back:
            out.add_(part)
        return out


class RowExchange(Exchange):
    """See above.

    Attributes:
        maps: what is done on each rank.
        adds: whether it is the transpose: rows go to their owners, and are added there.
    """

    __slots__ = ("adds", "maps")

    def __init__(
        self, name: str, group: Group | Place, maps: RowMaps, adds: bool, records: bool = False
    ) -> None:
        args = [args for dim in maps.dims for args in maps.plan.args(dim, group.world)]
        super().__init__(name, group, tuple(map(swapped, args) if adds else args), records=records)
        self.maps, self.adds = maps, adds

    @property
    def reads(self) -> Tensors:
        plan = self.maps.plan
        return [plan.local] if plan.send is None else [plan.local, plan.send]

    def transpose(self) -> RowExchange:
        return RowExchange(backward_of(self.name), self.group, self.maps, not self.adds)

    def _recorded_as(self, name: str) -> RowExchange:
        return RowExchange(name, self.group, self.maps, self.adds, True)

    def apply(self, inputs: Tensors) -> Tensors:
        """Run it, and record it if a tensor needs a gradient."""
        if is_dynamo_compiling():
            return mapped(self.maps, inputs, self.adds, self._put_in_graph)
        return apply(self.recorded() if must_record(inputs) else self, inputs)

    alone = apply

    def _put_in_graph(self, sent: Tensors) -> Tensors:
        if self.group.world == 1:
            return sent
        return in_graph(Exchange(self.name, self.group, self.args, records=must_record(sent)), sent)

    def shapes(self, inputs: Tensors) -> list[list[int]]:
        return self.maps.shapes(inputs, self.adds)

    def run(
        self,
        inputs: Tensors,
        forward: Number = 0,
        outs: Tensors | None = None,
        traced: bool | None = None,
        queued: bool = False,
    ) -> Tensors:
        if traced is None:
            traced = is_any_traced(inputs)
        if traced:
            return mapped(self.maps, inputs, self.adds, lambda sent: self._exchange(sent, forward))
        if inputs[0].is_meta:
            if isinstance(self.group, Group) and self.group.world > 1:
                self.group.calls += 1
            return [x.new_empty(shape) for x, shape in zip(inputs, self.shapes(inputs), strict=True)]
        # The group's own thread records, unless it is told not to.
        inference = outs is not None and outs[0].is_inference()
        with torch.inference_mode() if inference else torch.no_grad():
            if outs is None:
                shapes = self.shapes(inputs)
                outs = [self._allocate(shape, x) for shape, x in zip(shapes, inputs, strict=True)]
            write = self._add if self.adds else self._gather
            write(inputs, outs, forward, queued)
        return list(outs)

    def _gather(self, inputs: Tensors, outs: Tensors, forward: Number, queued: bool) -> None:
        maps, plan, dtype = self.maps, self.maps.plan, inputs[0].dtype
        if dtype not in ARITHMETIC:  # torch may not copy them by an index
            inputs, outs = ([x.view(ITEMS[dtype.itemsize]) for x in tensors] for tensors in (inputs, outs))
        received: list[Tensor] = []
        for x, out, dim in zip(inputs, outs, maps.dims, strict=True):
            if maps.selects:
                received.append(self._allocate(resized(x, dim, plan.received), x))
            else:
                received.append(out.narrow(dim, plan.own, plan.received))
        # Peers write straight to the parts of a table, unless rows are not whole there.
        targets = [
            part
            for rows, dim in zip(received, maps.dims, strict=True)
            for part in rows.split(plan.parts, dim)
        ]
        sent = maps.sent(inputs, self._allocate)
        if all(target.is_contiguous() for target in targets):
            self._exchange(sent, forward, targets, queued)
        else:
            for target, part in zip(targets, self._exchange(sent, forward, None, queued), strict=True):
                target.copy_(part)
        for i, dim in enumerate(maps.dims):
            maps.write(outs[i], inputs[i], received[i], dim)

    def _add(self, inputs: Tensors, outs: Tensors, forward: Number, queued: bool) -> None:
        maps = self.maps
        tables = maps.tables(inputs, self._allocate)
        back = maps.per_tensor(self._exchange(maps.returned(tables), forward, None, queued))
        for out, table, parts, dim in zip(outs, tables, back, maps.dims, strict=True):
            maps.add(out, table, parts, dim)

    def _exchange(
        self, sent: Tensors, forward: Number, targets: Tensors | None = None, queued: bool = False
    ) -> Tensors:
        if self.group.world == 1:
            return sent
        return super().run(sent, forward, targets, None, queued)

    def _allocate(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return memory that was used before, if there is much: the page faults of new memory take longer."""
        group, size = self.group, math.prod(shape) * like.element_size()
        cap, _, allocated, *_ = _C.arena_stats()
        if not isinstance(group, Group) or group.world == 1 or size > cap // 2 - allocated:
            return allocate(shape, like)
        return group.channel(self.name, like.device).allocate(shape, like)


def mapped(
    maps: RowMaps, inputs: Tensors, adds: bool, exchange: Callable[[Tensors], Tensors]
) -> list[Tensor]:
    """Return what a RowExchange does, by operations of which each has a derivative."""
    if not adds:
        received = maps.per_tensor(exchange(maps.sent(inputs)))
        return [maps.joined(*each) for each in zip(inputs, received, maps.dims, strict=True)]
    tables = maps.tables(inputs, allocate)
    back = maps.per_tensor(exchange(maps.returned(tables)))
    return [
        maps.add(allocate(resized(table, dim, maps.plan.own), table), table, parts, dim)
        for table, parts, dim in zip(tables, back, maps.dims, strict=True)
    ]
