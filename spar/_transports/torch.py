# SPDX-License-Identifier: Apache-2.0
"""The torch transport: packs by the plan, and lets any ProcessGroup move the packed bytes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .. import _C
from .._control import collectives
from .._control.agreement import announce_failure, compare
from .._control.process_group import wire_device
from .._control.state import OVER, SHARED, GroupState
from .core import CoreChannel
from .cuda import refuse_capture
from .dtypes import ITEMS, apply_scale, sums_of

Tensors = Sequence[torch.Tensor]


class Packer(Protocol):
    """Fills `sent` from a call's inputs, and a call's outputs from `received`: flat uint8 tensors."""

    def pack(self, plan: _C.Plan, inputs: Tensors, sent: torch.Tensor) -> None: ...
    def unpack(
        self, core: _C.Exchange, plan: _C.Plan, inputs: Tensors, outputs: Tensors, received: torch.Tensor
    ) -> None: ...


def _addresses(tensors: Tensors) -> tuple[int, ...]:
    return tuple([tensor.data_ptr() for tensor in tensors])


class HostPacker:
    """The C core's copies, with the factor fused where C knows the dtype."""

    def pack(self, plan: _C.Plan, inputs: Tensors, sent: torch.Tensor) -> None:
        plan.pack(_addresses(inputs), sent.data_ptr())

    def unpack(
        self, core: _C.Exchange, plan: _C.Plan, inputs: Tensors, outputs: Tensors, received: torch.Tensor
    ) -> None:
        addresses = _addresses(outputs)
        plan.copy_own(_addresses(inputs), addresses, *core.scale)
        plan.unpack(received.data_ptr(), addresses, *core.scale)


class TorchPacker:
    """torch's own strided copies, for any device that torch knows."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def pack(self, plan: _C.Plan, inputs: Tensors, sent: torch.Tensor) -> None:
        starts = _starts(plan.push_bytes)
        for peer, t, src, dst, run, loops in plan.blocks("pack"):
            if peer != self.rank:
                _move(inputs[t], src, sent, starts[peer] + dst, run, loops, inputs[t].dtype.itemsize)

    def unpack(
        self, core: _C.Exchange, plan: _C.Plan, inputs: Tensors, outputs: Tensors, received: torch.Tensor
    ) -> None:
        starts = _starts(plan.pull_bytes)
        size = inputs[0].dtype.itemsize
        for peer, t, src, dst, run, loops in plan.blocks("push"):
            if peer == self.rank:
                _move(inputs[t], src, outputs[t], dst, run, loops, size)
        for peer, t, src, dst, run, loops in plan.blocks("pull"):
            if peer != self.rank:
                _move(received, starts[peer] + src, outputs[t], dst, run, loops, size)
        kind, divide, factor = core.scale
        for output in outputs if kind else ():  # the caller scales the dtypes that the core does not know
            apply_scale(output, factor, divide)


def packer(device: torch.device, rank: int) -> Packer:
    return HostPacker() if device.type == "cpu" else TorchPacker(rank)


def _move(
    source: torch.Tensor,
    src: int,
    target: torch.Tensor,
    dst: int,
    run: int,
    loops: tuple[tuple[int, int, int], ...],
    size: int,
) -> None:
    """Copies one block of a plan; offsets, strides and the run are in bytes, items have `size` of them."""
    extents = [extent for extent, _, _ in loops] + [run // size]
    views = []
    for tensor, start, which in ((source, src, 1), (target, dst, 2)):
        items = tensor.view(ITEMS[size])
        strides = [loop[which] // size for loop in loops] + [1]
        views.append(items.as_strided(extents, strides, items.storage_offset() + start // size))
    views[1].copy_(views[0])


def _starts(sizes: tuple[int, ...]) -> list[int]:
    return [0, *itertools.accumulate(sizes)]


class TorchChannel(CoreChannel):
    """Any ProcessGroup moves the packed bytes, once ranks have compared their calls.

    They compare them in the core's mailboxes, and over its connections between hosts; without a core over the
    ProcessGroup, unless SPAR_CHECK is 0.
    """

    name = "torch"
    sides = _C.SIDE_PULL

    def __init__(self, group: GroupState, device: torch.device, op: str, deadline: float) -> None:
        place = group.peer_info or b"", group.rank, group.local_ranks, group.name
        super().__init__(group, _C.comm(self.name, *place) if group.connects else None)

    def drop_core(self) -> bool:
        self.core = None
        return True

    def exchange(
        self,
        core: _C.Exchange,
        inputs: Tensors,
        outs: Tensors | None,
        forward: int,
        alike: bool,
        number: int,
        deadline: float,
    ) -> list[Any] | None:
        """Whatever can fail on one rank alone comes first; then ranks compare; then bytes move."""
        group, first = self.group, inputs[0]
        device = first.device
        refuse_capture(core.op, device, "the torch transport waits for the device")
        begin = time.monotonic_ns()
        planned = core.plan(inputs, self.sides, alike)
        if planned is None:
            return None
        plan, _ = planned
        rows = core.sums or outs is None
        outputs = [first.new_empty(shape) for shape in plan.out_shapes] if rows else outs
        assert outputs is not None
        via = wire_device(group.process_group, device)
        sent_sizes, received_sizes = plan.push_bytes, plan.pull_bytes
        sent = torch.empty(sum(sent_sizes), dtype=torch.uint8, device=device)
        received = torch.empty(sum(received_sizes), dtype=torch.uint8, device=via)
        copies = packer(device, group.rank)
        copies.pack(plan, inputs, sent)
        sent = sent.to(via)
        mailboxes = self.core
        group.progress = SHARED
        if mailboxes is not None:
            mailboxes.compare(core.op, core.text, plan, forward, number, deadline)
        elif group.compares:
            compare(group, core, plan, forward, number, deadline)
        sizes = list(received_sizes), list(sent_sizes)
        collectives.all_to_all(group, core.op, received, sent, *sizes, deadline, mailboxes)
        if mailboxes is not None:
            mailboxes.end()
        group.progress = OVER
        copies.unpack(core, plan, inputs, outputs, received.to(device))
        _C.count_traffic(self.name, sum(sent_sizes), time.monotonic_ns() - begin)
        if core.sums:
            return sums_of(outputs, outs)
        return list(outputs) if outs is None else [None] * len(outs)

    def report(self, op: str, why: str, memory: bool, deadline: float) -> None:
        if self.core is not None:
            super().report(op, why, memory, deadline)
        else:
            announce_failure(self.group, op, why, memory, deadline)

    def can_report(self) -> bool:
        return self.core is not None or self.group.compares
