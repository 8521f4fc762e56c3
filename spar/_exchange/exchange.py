# SPDX-License-Identifier: Apache-2.0
"""An exchange: everything that a call decided from its arguments, once; and how it runs.

Every operation is linear: one exchange of tensors (or, for a split, one selection) and a factor. Its
derivative is another exchange: `Exchange.transposed`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.compiler import is_dynamo_compiling

from .. import _C
from .._control.state import Place
from .._group.group import Group, is_faking
from .._group.registry import group_at
from .._transports.dtypes import (
    ITEM_TYPES,
    ITEMS,
    PLAIN_TYPES,
    SCALE_TYPES,
    add_rows,
    apply_scale,
    copy_items,
    resolved,
)
from .dispatch import (
    call_of,
    chained_exchange,
    flattened,
    implement,
    layouts_of,
    number_of_call,
    number_of_newest,
)
from .layouts import LISTED, ZIGZAG, Args, listed_index, moved_back, out_shape, select, shards_pair, swapped
from .observers import _dispatch_modes, _functorch_transforms

Tensors = Sequence[torch.Tensor]
Scale = tuple[float, bool]  # the factor, and whether it divides
# The number of a call; a tensor in a graph, where it is not known.
Number = int | torch.Tensor
ONE: Scale = (1.0, False)
# Indexes of dim 0, of which the core reads the rows that it sends.
Listed = tuple[torch.Tensor | None, ...] | None
SCALABLE = frozenset({*SCALE_TYPES, torch.complex32})
# dtypes that torch can copy between strides and add; others (int1, float4_e2m1fn_x2, ...) move as plain items
ARITHMETIC = SCALABLE | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}

# What an exchange does, which decides its transpose.
MOVE = 0  # from one layout to another; the transpose moves back
GATHER = 1  # shards to the whole on each rank; the transpose sums
SUM = 2  # adds the ranks' parts of each shard; the transpose gathers
# What ranks compare of a gradient, in words.
_GRADIENTS = {MOVE: "recorded", GATHER: "summed", SUM: "gathered"}


def backward_of(name: str) -> str:
    """Return the name of the exchange that moves gradients."""
    return name if name.startswith("backward of ") else f"backward of {name}"


# torch makes a new string each time, which takes 3 times as long
_type_of = functools.cache(operator.attrgetter("type"))


def scaled(part: torch.Tensor, factor: float, divide: bool) -> torch.Tensor:
    """Multiply or divide by the factor; return a view if the factor is 1 and the part is contiguous."""
    if factor != 1.0:
        return part / factor if divide else part * factor
    if part.dtype in ARITHMETIC or part.is_contiguous():
        return part.contiguous()
    return part.view(ITEMS[part.dtype.itemsize]).contiguous().view(part.dtype)


class Unlike(Exception):
    """The tensors are not like those for which a group remembers an exchange: see `_C.again`."""


class Exchange:
    """One exchange of tensors on a group, or one selection. Immutable.

    Attributes:
        name: the operation's, for messages.
        group: the Group; under torch.compile, and in its graphs, this rank's Place in it.
        args: for each tensor its two layouts, as `layouts.pair` returns them. Of a SUM, a dim in front of the
            tensor's own counts the ranks: shards of it become shards of the scattered dim, and this rank then
            adds the rows that it received.
        kind: MOVE, GATHER or SUM.
        is_local: whether nothing is communicated: every rank holds the whole input, and selects its shard.
        scale: what the outputs are multiplied or divided by.
        grad_scale: the same for the gradients.
        gradient: what backward will do, in words; empty if no gradient is recorded.
        note: other arguments of the operation that must be equal on all ranks, in words.
        then: handles of the groups whose next exchange depends on this one.
        prepared: what the C core knows of it for tensors of a dtype on a device; these two; the core's code
            of the dtype, by which it scales; `ItemType.lazy`; the listed rows. Of the newest; None
            before it runs.
        selections: the same of a selection, by a tensor's layouts and dtype.
    """

    __slots__ = (
        *("args", "grad_scale", "gradient", "group", "is_local", "kind", "name", "note", "prepared"),
        *("scale", "selections", "then", "_recorded", "_transposed"),
    )

    def __init__(
        self,
        name: str,
        group: Group | Place,
        args: tuple[Args, ...],
        scale: Scale = ONE,
        grad_scale: Scale = ONE,
        kind: int = MOVE,
        records: bool = False,
        note: str = "",
        gradient: str = "",
    ) -> None:
        self.name, self.group, self.args, self.kind = name, group, args, kind
        self.is_local = args[0][1] == -1
        self.scale, self.grad_scale, self.note = scale, grad_scale, note
        self.gradient = _GRADIENTS[kind] if records else gradient
        self.prepared: tuple[_C.Exchange, torch.dtype, str, int, tuple[str, ...], Listed] | None = None
        self.selections: dict[tuple[Args, torch.dtype], _C.Exchange] = {}
        self.then: tuple[int, ...] = ()
        self._transposed: Exchange | None = None
        self._recorded: Exchange | None = None

    @property
    def transposed(self) -> Exchange:
        """The exchange that carries the gradients back."""
        if self._transposed is None:
            self._transposed = self.transpose()
        return self._transposed

    def transpose(self) -> Exchange:
        name = backward_of(self.name)
        if self.kind == MOVE:
            args = tuple([swapped(a) for a in self.args])
            return Exchange(name, self.group, args, self.grad_scale, self.scale)
        sums = self.kind == SUM
        shards = [moved_back(a[1 + a[0] :]) if sums else a[1 : 1 + a[0]] for a in self.args]
        args = tuple([shards_pair(shard, self.group.world, not sums) for shard in shards])
        return Exchange(name, self.group, args, kind=GATHER if sums else SUM)

    def recorded(self, name: str = "") -> Exchange:
        """Return the same exchange as autograd records it, the newest of which is kept; name: another one."""
        made, name = self._recorded, name or self.name
        if made is None or made.name != name:
            made = self._recorded = self._recorded_as(name)
        return made

    def _recorded_as(self, name: str) -> Exchange:
        scales = self.scale, self.grad_scale
        return Exchange(name, self.group, self.args, *scales, self.kind, True, self.note)

    def alone(self, inputs: Tensors) -> Tensors:
        """Return what it makes of the tensors in a group of one rank: they are the outputs."""
        return inputs

    @property
    def reads(self) -> Tensors:
        """The tensors that it reads besides its inputs."""
        return ()

    def begin(self) -> int:
        """Return how many calls there were before it; 0 under torch.compile, where nothing is reported."""
        group = self.group
        if not isinstance(group, Group):
            return 0
        return group.calls if group.queue is None else group.count()

    def report(self, before: int, inputs: Tensors, error: BaseException) -> None:
        """Report an error to the peers that wait for the exchange, unless it has been made."""
        device = inputs[0].device.type
        if isinstance(self.group, Group) and not (self.is_local or device == "meta" or is_faking()):
            self.group.report(self.name, device, error, before + 1)

    def number(self) -> Number:
        """Return the number of the call that it has just made; 0: it made none, or it is not known."""
        group = self.group
        if group.world == 1 or self.is_local or is_dynamo_compiling():
            return 0
        if _dispatch_modes() > 0:
            return number_of_newest()
        return group.calls if isinstance(group, Group) else 0

    def shapes(self, inputs: Tensors) -> list[list[int]]:
        """Return the shape of each output."""
        world, rank, sums = self.group.world, self.group.rank, self.kind == SUM
        shapes = [[1, *x.shape] if sums else x.shape for x in inputs]
        return [out_shape(shape, a, world, rank)[sums:] for shape, a in zip(shapes, self.args, strict=True)]

    # ---- running it ----

    def run(
        self,
        inputs: Tensors,
        forward: Number = 0,
        outs: Tensors | None = None,
        traced: bool | None = None,
        queued: bool = False,
        listed: Listed = None,
    ) -> Tensors:
        """Exchange the tensors; nothing is recorded.

        Args:
            inputs: tensors of one dtype and device.
            forward: the number of the call whose gradient this one moves, which ranks that know it compare;
                0: not known. In a graph its tensor.
            outs: plain contiguous tensors to write the outputs to.
            traced: the result of `is_any_traced`, if the caller has it.
            queued: it is the turn of a call in flight.
            listed: for each tensor the rows of it that are exchanged, or None: all; for channels that list.

        Returns:
            `outs`, or new tensors; views of the inputs where a selection is one.
        """
        group = self.group
        if group.world == 1:
            return [scaled(x.view_as(x), *self.scale) for x in inputs]
        if traced is None:
            traced = is_dynamo_compiling() or _dispatch_modes() > 0 or _functorch_transforms()
            for x in inputs:
                traced = traced or type(x) not in PLAIN_TYPES
        if traced:
            return self._run_traced(inputs, forward)
        if self.is_local:
            if len(inputs) == 1:  # most: map and list take 5% of a split's time
                return (self._select(inputs[0], self.args[0]),)
            return list(map(self._select, inputs, self.args))
        if self.kind == SUM:
            inputs = [x.unsqueeze(0) for x in inputs]
        first = inputs[0]
        group = group if isinstance(group, Group) else group_at(group.handle)
        dtype, device = first.dtype, "cpu" if first.is_cpu else _type_of(first.device)
        if device == "meta":  # shape inference exchanges nothing, but counts as a call, as on the peers
            group.calls += 1
            made = _empty_outputs(inputs, group, self.args)
            return [x[0] for x in made] if self.kind == SUM else made
        prepared = self.prepared
        if prepared is None or prepared[1] is not dtype or prepared[2] != device or prepared[5] is not listed:
            size, kind, sums, lazy = ITEM_TYPES[dtype]
            factor, divide = self.scale
            text = f" of {dtype} on {device}"
            text += f" {'/' if divide else '*'} {factor:.17g}" if factor != 1.0 else ""
            text += f", gradient {self.gradient}" if self.gradient else ""
            text += f", {self.note}" if self.note else ""
            codes = kind, divide, factor, sums if self.kind == SUM else 0
            core = _C.Exchange(self.name, text, group.world, group.rank, size, self.args, *codes, listed)
            self.prepared = prepared = core, dtype, device, kind, lazy, listed
        core, _, _, kind, lazy, _ = prepared
        # Torch is asked only where it matters, because it releases the GIL.
        is_any_lazy = False
        for x in inputs if lazy else ():
            for name in lazy:
                is_any_lazy = is_any_lazy or getattr(x, name)()
        if is_any_lazy:
            inputs = [resolved(x) for x in inputs]
        outputs: list[Any] = group.exchange(self.name, device, core, inputs, outs, forward, False, queued)
        return outputs if outs is None and kind else self._finish(outputs, outs, dtype)

    def _select(self, x: torch.Tensor, args: Args) -> torch.Tensor:
        """Select this rank's shard of a whole tensor, as a view if it is contiguous and unscaled."""
        group, (factor, divide), kind, is_cpu = self.group, self.scale, args[3], x.is_cpu
        if kind not in LISTED and not (is_cpu and (kind == ZIGZAG or factor != 1.0)):
            part = cast(torch.Tensor, select(x, args[2:], group.world, group.rank))
            if factor == 1.0 and part.is_contiguous():
                return part
            if not is_cpu:
                return scaled(part, factor, divide)
        size, code, _, lazy = ITEM_TYPES[x.dtype]
        # Torch is asked only where it matters, because it releases the GIL.
        if lazy:
            x = resolved(x)
        if not is_cpu:
            index = listed_index(args[2:], group.world, group.rank).to(x.device)
            return scaled(x.index_select(args[2], index), factor, divide)
        core = self.selections.get((args, x.dtype))
        if core is None:
            place = group.world, group.rank
            core = _C.Exchange(self.name, "", *place, size, (args,), code, divide, factor, 0)
            self.selections[args, x.dtype] = core
        output = None
        if isinstance(group, Group) and not group.own_output:
            # reused memory: the page faults of a new tensor take longer than the copy
            output = core.select((x,))
        if output is None:
            plan, addresses = core.plan((x,), 0)
            output = torch.empty(plan.out_shapes[0], dtype=x.dtype, device="cpu")
            plan.copy_own(addresses, (output.data_ptr(),), code, divide, factor)
        elif output.dtype != x.dtype:
            output = output.view(x.dtype)
        if code == 0:
            apply_scale(output, factor, divide)
        return output

    def _finish(self, outputs: list[Any], outs: Tensors | None, dtype: torch.dtype) -> list[torch.Tensor]:
        """Copy outputs that could not be written to `outs`; scale those of dtypes that the core cannot."""
        if outs is None:
            outs = [output if output.dtype == dtype else output.view(dtype) for output in outputs]
        else:
            for out, output in zip(outs, outputs, strict=True):
                if output is not None:
                    copy_items(out, output)
        for out in outs if dtype not in SCALE_TYPES else ():
            apply_scale(out, *self.scale)
        return list(outs)

    def _run_traced(self, inputs: Tensors, forward: Number) -> Tensors:
        """Run it in dispatched ops."""
        group, (factor, divide) = self.group, self.scale
        if self.is_local:
            parts = [
                select(x, a[2:], group.world, group.rank) for x, a in zip(inputs, self.args, strict=True)
            ]
            if all(part is not None for part in parts):
                return [scaled(cast(torch.Tensor, part), factor, divide) for part in parts]
        if self.kind == SUM:
            inputs = [x.unsqueeze(0) for x in inputs]
        place = group.handle, group.world, group.rank
        layouts = flattened(self.args)
        arguments = (inputs, *place, self.name, layouts, factor, divide, self.gradient, self.note, self.then)
        if is_dynamo_compiling():
            outputs: list[torch.Tensor] = torch.ops.spar.chained_exchange(*arguments)
        else:
            number = forward if isinstance(forward, torch.Tensor) else None
            outputs = chained_exchange(*arguments, forward=number)
        return [add_rows(rows) for rows in outputs] if self.kind == SUM else outputs


# ---- what the dispatcher op runs ----


def _empty_outputs(inputs: Tensors, group: Group | Place, args: tuple[Args, ...]) -> list[torch.Tensor]:
    return [
        x.new_empty(out_shape(x.shape, a, group.world, group.rank)) for x, a in zip(inputs, args, strict=True)
    ]


def _run_op(
    inputs: Tensors,
    handle: int,
    text: str,
    sizes: Sequence[int],
    after: torch.Tensor | None = None,
    forward: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """text, sizes: of an `OpCall`."""
    group = group_at(handle)

    def make() -> Exchange:
        call = call_of(text)
        scale, layouts = (call.factor, call.divide), layouts_of(call, sizes)
        made = Exchange(call.op, group, layouts, scale, note=call.note, gradient=call.gradient)
        made.then = tuple(call.then)
        return made

    exchange = group.remember((text, *sizes), make)
    with contextlib.ExitStack() as blocks:
        for dependent in exchange.then:
            blocks.enter_context(group_at(dependent).call(exchange.name, 1, inputs[0].device.type))
        # A selection comes here from packed sequences alone, which are copied: an op returns no views.
        outputs = exchange.run(inputs, 0 if forward is None else int(forward), traced=False)
    return [*outputs, number_of_call(group.count())]


def _fake_op(inputs: Tensors, handle: int, text: str, sizes: Sequence[int], *_: object) -> list[torch.Tensor]:
    call = call_of(text)
    outputs = _empty_outputs(inputs, Place(handle, call.world, call.rank), layouts_of(call, sizes))
    return [*outputs, torch.empty((), dtype=torch.int64, device="cpu")]


implement(
    "exchange", "(Tensor[] inputs, int group, str call, SymInt[] sizes{}) -> Tensor[]", _run_op, _fake_op
)


Steps = Sequence[tuple[Group | Place, tuple[Args, ...]]]


def in_steps(name: str, steps: Steps, scale: Scale, kind: int, records: bool, note: str) -> Exchange | Chain:
    """Return what makes one exchange after another, with one gradient, which is scaled once."""
    exchanges = [
        Exchange(name, group, args, ONE, ONE if i else scale, kind, records, note)
        for i, (group, args) in enumerate(steps)
    ]
    return exchanges[0] if len(exchanges) == 1 else Chain(exchanges)


class Chain:
    """Exchanges in several groups, one after another, as one operation with one gradient.

    The whole factor of the gradient is that of the first exchange, whose gradient is computed last.
    """

    __slots__ = ("_transposed", "exchanges", "gradient", "name")

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self.exchanges, self.name = tuple(exchanges), exchanges[0].name
        self.gradient = exchanges[0].gradient
        for i, exchange in enumerate(self.exchanges):
            exchange.then = tuple([e.group.handle for e in self.exchanges[i + 1 :] if not e.is_local])
        self._transposed: Chain | None = None

    @property
    def transposed(self) -> Chain:
        if self._transposed is None:
            self._transposed = self.transpose()
        return self._transposed

    def transpose(self) -> Chain:
        return Chain([exchange.transpose() for exchange in self.exchanges[::-1]])

    def recorded(self, name: str = "") -> Chain:
        return Chain([exchange.recorded(name) for exchange in self.exchanges])

    def begin(self) -> int:
        """Its blocks report what fails."""
        return 0

    def report(self, before: int, inputs: Tensors, error: BaseException) -> None:
        """It is reported."""

    def number(self) -> tuple[Number, ...]:
        """Return the number of each exchange's call, as `Exchange.number`; in a graph they are not known."""
        if is_dynamo_compiling() or _dispatch_modes() > 0:
            return ()
        return tuple([exchange.number() for exchange in self.exchanges])[::-1]

    def run(self, inputs: Tensors, forward: tuple[Number, ...] = ()) -> Tensors:
        """Run the exchanges; forward: for each, as in `Exchange.run`."""
        with contextlib.ExitStack() as blocks:
            for exchange in self.exchanges:
                if isinstance(exchange.group, Group) and not exchange.is_local:
                    device = inputs[0].device.type
                    blocks.enter_context(exchange.group.call(self.name, 1, device))
            for i, exchange in enumerate(self.exchanges):
                inputs = exchange.run(inputs, forward[i] if forward else 0)
        return inputs
