"""The torch transport: packs by the plan, and lets any ProcessGroup move the packed bytes."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from . import wire
from .agreement import OVER, SHARED, TEXT, agree

if TYPE_CHECKING:
    from . import _C
    from .communicator import Communicator

# by the codes of csrc/device.h: what a factor is fused for
SCALE_TYPES = {
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float32: 3,
    torch.float64: 4,
    torch.complex64: 5,
    torch.complex128: 6,
}
# strided copies move items, whatever they mean
ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True)
class Call:
    """One exchange on its way. `input` is read through its strides; `output` is contiguous."""

    op: str
    plan: _C.Plan
    input: torch.Tensor
    output: torch.Tensor
    factor: float
    divide: bool
    text: str  # what must be equal on all ranks beside the plan
    deadline: float


class Packer(Protocol):
    """Fills `sent` from a call's input, and a call's output from `received`: flat uint8 tensors."""

    def pack(self, call: Call, sent: torch.Tensor) -> None: ...
    def unpack(self, call: Call, received: torch.Tensor) -> None: ...


class HostPacker:
    """The C core's copies, with the factor fused where C knows the dtype."""

    def pack(self, call: Call, sent: torch.Tensor) -> None:
        call.plan.pack((call.input.data_ptr(),), sent.data_ptr())

    def unpack(self, call: Call, received: torch.Tensor) -> None:
        scale = (SCALE_TYPES.get(call.output.dtype, 0), call.divide, call.factor)
        outputs = (call.output.data_ptr(),)
        call.plan.copy_own((call.input.data_ptr(),), outputs, *scale)
        call.plan.unpack(received.data_ptr(), outputs, *scale)
        if scale[0] == 0:
            apply_scale(call.output, call.factor, call.divide)


class TorchPacker:
    """torch's own strided copies, for any device that torch knows."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def pack(self, call: Call, sent: torch.Tensor) -> None:
        starts = _starts(call.plan.push_bytes)
        for peer, _, src, dst, run, loops in call.plan.blocks("pack"):
            if peer != self.rank:
                _move(call.input, src, sent, starts[peer] + dst, run, loops, call.input.element_size())

    def unpack(self, call: Call, received: torch.Tensor) -> None:
        starts = _starts(call.plan.pull_bytes)
        size = call.output.element_size()
        for peer, _, src, dst, run, loops in call.plan.blocks("push"):
            if peer == self.rank:
                _move(call.input, src, call.output, dst, run, loops, size)
        for peer, _, src, dst, run, loops in call.plan.blocks("pull"):
            if peer != self.rank:
                _move(received, starts[peer] + src, call.output, dst, run, loops, size)
        apply_scale(call.output, call.factor, call.divide)


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


def apply_scale(output: torch.Tensor, factor: float, divide: bool) -> None:
    """output * factor or output / factor, never the product with the reciprocal: it rounds otherwise."""
    if factor != 1.0:
        output.div_(factor) if divide else output.mul_(factor)


@functools.lru_cache(256)
def call_text(dtype: torch.dtype, device: str, factor: float, divide: bool, records: bool) -> str:
    """What must be equal on all ranks beside the plan."""
    scale = f" {'/' if divide else '*'} {factor:.17g}" if factor != 1 else ""
    return f" of {dtype} on {device}{scale}{', gradient recorded' if records else ''}"


def compare(comm: Communicator, call: Call) -> None:
    """Raise on all ranks where they do not make the same call, or one failed."""

    def describe() -> str:
        return f"{call.plan.describe()[: TEXT - 200]}{call.text} (call {comm.calls})"

    agree(comm, call.op, call.plan.signature(call.text), describe, call.deadline)


def run(comm: Communicator, call: Call) -> None:
    """One exchange. Whatever can fail on one rank alone comes first; then ranks compare; then bytes move."""
    device = call.input.device
    via = wire.wire_device(comm.group, device)
    sent_sizes, received_sizes = call.plan.push_bytes, call.plan.pull_bytes
    sent = torch.empty(sum(sent_sizes), dtype=torch.uint8, device=device)
    received = torch.empty(sum(received_sizes), dtype=torch.uint8, device=via)
    copies = packer(device, comm.rank)
    copies.pack(call, sent)
    sent = sent.to(via)
    if comm.check:
        compare(comm, call)
    comm.progress = SHARED
    wire.all_to_all(comm, call.op, received, sent, list(received_sizes), list(sent_sizes), call.deadline)
    comm.progress = OVER
    copies.unpack(call, received.to(device))
