"""The torch transport: packs by the plan, and lets any ProcessGroup move the packed bytes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from .. import _C
from .._group import pg_wait, status as peer_status
from .._group.agreement import announce_failure
from .._group.member import OVER, SHARED, Member
from .._group.pg_info import wire_device
from .channel import Operation
from .cuda import refuse_capture
from .dtypes import ITEMS, apply_scale
from .planned import PlannedExchange


class Packer(Protocol):
    """Fills `sent` from a call's input, and a call's output from `received`: flat uint8 tensors."""

    def pack(self, call: PlannedExchange, sent: torch.Tensor) -> None: ...
    def unpack(self, call: PlannedExchange, received: torch.Tensor) -> None: ...


class HostPacker:
    """The C core's copies, with the factor fused where C knows the dtype."""

    def pack(self, call: PlannedExchange, sent: torch.Tensor) -> None:
        call.plan.pack(call.addresses, sent.data_ptr())

    def unpack(self, call: PlannedExchange, received: torch.Tensor) -> None:
        outputs = call.output_addresses
        call.plan.copy_own(call.addresses, outputs, *call.scale)
        call.plan.unpack(received.data_ptr(), outputs, *call.scale)
        call.finish()


class TorchPacker:
    """torch's own strided copies, for any device that torch knows."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def pack(self, call: PlannedExchange, sent: torch.Tensor) -> None:
        starts = _starts(call.plan.push_bytes)
        for peer, t, src, dst, run, loops in call.plan.blocks("pack"):
            if peer != self.rank:
                _move(call.inputs[t], src, sent, starts[peer] + dst, run, loops, call.dtype.itemsize)

    def unpack(self, call: PlannedExchange, received: torch.Tensor) -> None:
        starts = _starts(call.plan.pull_bytes)
        size = call.dtype.itemsize
        for peer, t, src, dst, run, loops in call.plan.blocks("push"):
            if peer == self.rank:
                _move(call.inputs[t], src, call.outputs[t], dst, run, loops, size)
        for peer, t, src, dst, run, loops in call.plan.blocks("pull"):
            if peer != self.rank:
                _move(received, starts[peer] + src, call.outputs[t], dst, run, loops, size)
        _, divide, factor = call.scale
        for output in call.outputs:
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


class TorchChannel:
    """Any ProcessGroup moves the packed bytes; ranks compare their calls before, unless SPAR_CHECK is 0."""

    name = "torch"
    core = None
    enqueues = False
    overlaps = True

    def __init__(self, member: Member, device: torch.device, op: str, deadline: float) -> None:
        pass

    def watch(self, member: Member) -> None:
        """Notice the end of the peers' processes."""
        peer_status.watch(member)

    def exchange(
        self,
        member: Member,
        operation: Operation,
        inputs: Sequence[torch.Tensor],
        deadline: float,
        outs: list[torch.Tensor] | None = None,
        forward: int = 0,
    ) -> list[torch.Tensor]:
        kind = inputs[0].device.type
        call = PlannedExchange.of(member, operation, inputs, kind, deadline, outs, forward)
        refuse_capture(call.op, call.device, "the torch transport waits for the device")
        begin = time.monotonic_ns()
        self._run(member, call)
        _C.count_traffic("torch", sum(call.plan.push_bytes), time.monotonic_ns() - begin)
        return call.results()

    def _run(self, member: Member, call: PlannedExchange) -> None:
        """Whatever can fail on one rank alone comes first; then ranks compare; then bytes move."""
        device = call.device
        via = wire_device(member.group, device)
        sent_sizes, received_sizes = call.plan.push_bytes, call.plan.pull_bytes
        sent = torch.empty(sum(sent_sizes), dtype=torch.uint8, device=device)
        received = torch.empty(sum(received_sizes), dtype=torch.uint8, device=via)
        copies = packer(device, member.rank)
        copies.pack(call, sent)
        sent = sent.to(via)
        if member.check:
            call.compare(member)
        member.progress = SHARED
        pg_wait.all_to_all(
            member, call.op, received, sent, list(received_sizes), list(sent_sizes), call.deadline
        )
        member.progress = OVER
        copies.unpack(call, received.to(device))

    def allocate(self, member: Member, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def report(self, member: Member, op: str, why: str, memory: bool, deadline: float) -> None:
        announce_failure(member, op, why, memory, deadline)

    def can_report(self, member: Member) -> bool:
        return member.check

    def give_up(self, op: str, why: str) -> None:
        """The peers reach their limit: there is no way to reach them."""

    def abort(self) -> None:
        """A wait on the ProcessGroup polls the member."""

    def close(self) -> None:
        pass
