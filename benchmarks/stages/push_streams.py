# SPDX-License-Identifier: Apache-2.0
"""The ranks of a group over push as streams of one process, over the core library.

On one GPU the kernels of several processes take turns of milliseconds; those of several streams of one
process run at the same time, as ranks on several GPUs do. Slots are torch's memory, of one piece: a process
cannot pass memory to itself as the transport does. What is above it is push's own: first exchanges, rounds,
direct calls, growth. No watchdog ends a call, but the limit of its kernels. All uses of the core's push are
here.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, byref, c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import partial
from typing import Any, NamedTuple

import gpu_core
import torch
from dlpack import from_memory
from gpu_core import MIB
from helpers import core  # type: ignore[import-not-found]
from helpers.core_abi import (  # type: ignore[import-not-found]
    PUSH_WORDS,
    Call,
    CoreError,
    Deadline,
    Entered,
    PlanStruct,
    PushState,
    check,
)
from torch import Tensor

SET_UP_S, CALL_S = 30.0, 20.0  # limits
SALT = 7  # of the first exchanges' words
ALIGNMENT = 4096  # bytes
SHARE = 16  # of a GPU's memory, as a slot of the transport may have
KINDS = {"cpu": 1, "cuda": 2}  # DLPack's numbers of devices
_State, _Plan, _Release = POINTER(PushState), POINTER(PlanStruct), ctypes.CFUNCTYPE(None, c_void_p)
_keep = _Release(lambda slot: None)  # a slot is the group's, which each output keeps
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {  # name: (result, arguments)
    "outputs_enter": (None, [c_void_p]),
    "outputs_allocate": (c_void_p, [c_size_t, c_int, c_void_p]),
    "outputs_free": (None, [c_void_p, c_size_t, c_int, c_void_p]),
    "outputs_have": (c_int, [c_void_p, c_void_p, c_int64]),
    "outputs_serve": (c_int, [c_void_p]),
    "outputs_lacked": (c_int, [c_void_p]),
    "push_first_bytes": (c_int, [c_int, c_int64, POINTER(c_int64)]),
    "push_open": (
        c_int,
        [
            *(c_int, c_int, c_int, POINTER(c_void_p), c_int64, c_int64),
            *(_Release, c_void_p, POINTER(_State)),
        ],
    ),
    "push_check": (c_int, [_State, c_uint32, POINTER(Deadline), c_void_p]),
    "push_is_direct": (c_int, [_State, _Plan]),
    "push_missing": (c_int64, [_State, _Plan]),
    "push_is_due": (c_int, [_State, _Plan]),
    "push_more": (c_int64, [_State, c_int]),
    "push_extend": (c_int, [_State, c_int64, _Plan]),
    "push_run": (c_int, [_State, POINTER(Call), c_int, POINTER(c_uint32), c_uint32]),
    "push_close": (None, [_State]),
    "watchdog_stopped": (c_int, [c_uint32]),
}


def _library() -> Any:
    library = core.library()
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"spar_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def slot_limit(ranks: int) -> int:
    """Return the bytes that each slot may have if so many lie on this GPU.

    The transport's share of the memory, or less: half of what is free is for tensors.
    """
    free, total = torch.cuda.mem_get_info()
    return min(total // SHARE, free // 2 // ranks) // MIB * MIB


def _new_slot(limit: int) -> Tensor:
    """Return memory that begins with words, which are 0, at an address as the driver's: aligned."""
    room, device = PUSH_WORDS + limit + ALIGNMENT, gpu_core.machine.device
    memory = torch.empty(room, dtype=torch.uint8, device=device)
    slot = memory[-memory.data_ptr() % ALIGNMENT :]
    slot[:PUSH_WORDS].zero_()
    return slot


def _deadline(seconds: float) -> Deadline:
    return Deadline(time.monotonic_ns() + int(seconds * 1e9))


class PushCall(NamedTuple):
    """A rank's call, which may be made again.

    Attributes:
        struct: the core's.
        output: [tokens, heads, row bytes].
        is_direct: whether the output lies where peers write to it.
        kept: what the struct has the addresses of.
    """

    struct: Call
    output: Tensor
    is_direct: bool
    kept: tuple[Any, ...]


class Group:
    """Ranks with a slot and a stream each, on the device that gpu_core.Gpu has entered.

    Args:
        world: the number of ranks.
        limit: the bytes that a rank's slot may have. It has fewer at first, and grows as calls need.
        ctas: the most of a launch; 0: as many as the transport chooses. Above what fits the device together,
            ranks' copies take turns.
        streams: one for each rank, instead of new ones.
    """

    def __init__(self, world: int, limit: int, ctas: int = 0, streams: Sequence[Any] | None = None) -> None:
        self.library, self.world, self.limit, self.ctas = _library(), world, limit, ctas
        self.streams = streams or [gpu_core.machine.new_stream() for _ in range(world)]
        self._ordinal = torch.cuda.current_device() if gpu_core.machine.device == "cuda" else 0
        self._slots = [_new_slot(limit) for _ in range(world)]
        gpu_core.machine.synchronize()  # late zeros would overwrite what peers have written
        self._calls = [0] * world
        self._lacks: dict[int, bool] = {}  # by the number of a call: whether an output had lacked room
        self._pushes = self._open()
        self.first_bytes = self.slot_bytes
        with ThreadPoolExecutor(world) as threads:
            list(threads.map(self._check, self._pushes))

    def _open(self) -> list[Any]:
        pushes, first = [_State() for _ in range(self.world)], c_int64()
        slots = (c_void_p * self.world)(*[slot.data_ptr() for slot in self._slots])
        check(self.library.spar_push_first_bytes(self.world, self.limit, byref(first)))
        for rank, push in enumerate(pushes):
            place = self.world, rank, self._ordinal
            check(self.library.spar_push_open(*place, slots, first, self.limit, _keep, None, byref(push)))
        return pushes

    def _check(self, push: Any) -> None:
        """Make a rank's first exchanges, on a thread of its own: ranks wait for each other."""
        before = Entered()
        check(self.library.spar_cuda_enter(self._ordinal, byref(before)))
        try:
            check(self.library.spar_push_check(push, SALT, byref(_deadline(SET_UP_S)), None))
        finally:
            self.library.spar_cuda_leave(byref(before))

    @property
    def slot_bytes(self) -> int:
        """The bytes that each slot has now, without its words."""
        return max(int(push.contents.bytes) for push in self._pushes)

    def call(self, rank: int, plan: core.Plan, x: Tensor, y: Tensor | None = None) -> PushCall:
        """Return a call of one tensor; without y, its output lies where the transport wants it."""
        call = Call(plan=plan.handle, scale=core.unscaled(), stream=self.streams[rank].cuda_stream)
        size = plan.tensors[0].out_bytes
        inputs = core.addresses([x])
        call.inputs = ctypes.cast(inputs, POINTER(c_void_p))
        direct = self._in_outputs(rank, call, size) if y is None else None
        if y is None:
            y = torch.empty(size, dtype=torch.uint8, device=x.device) if direct is None else direct
        outputs = core.addresses([y])
        call.outputs = ctypes.cast(outputs, POINTER(c_void_p))
        rows = y.view(*plan.out_shapes[0][:-1], -1)
        return PushCall(call, rows, direct is not None, (plan, x, inputs, outputs))

    def _in_outputs(self, rank: int, call: Call, size: int) -> Tensor | None:
        """Return memory to which the peers write directly, as torch's pool has it; None: not of this call."""
        push, room = self._pushes[rank], (size + 3) // 4 * 4
        outputs = push.contents.outputs
        if not self.library.spar_push_is_direct(push, call.plan):
            return None
        if not self.library.spar_outputs_serve(outputs):
            return None
        self.library.spar_outputs_enter(outputs)
        address = self.library.spar_outputs_allocate(room, self._ordinal, call.stream)
        self.library.spar_outputs_enter(None)
        if not address:
            return None
        if not self.library.spar_outputs_have(outputs, address, room):
            self._free(address, room)
            return None
        device = gpu_core.machine.device
        # The tensor keeps this group, and so the memory, until it is gone.
        items = from_memory(address, room // 4, KINDS[device], partial(self._free, address, room))
        return items.view(torch.uint8)[:size]

    def _free(self, address: int, size: int) -> None:
        self.library.spar_outputs_free(address, size, self._ordinal, None)

    def _make_room(self, rank: int, plan: Any) -> None:
        """Let the rank's slot grow as the transport would before its newest call."""
        push = self._pushes[rank]
        more = self.library.spar_push_missing(push, plan)
        if not more and self.library.spar_push_is_due(push, plan):
            more = self.library.spar_push_more(push, self._lacked(self._calls[rank]))
        if more:
            check(self.library.spar_push_extend(push, push.contents.bytes + more, plan))

    def _lacked(self, number: int) -> bool:
        """Return what all ranks find in this call: the first one that makes it asks for all."""
        if number not in self._lacks:
            lacks = [self.library.spar_outputs_lacked(push.contents.outputs) for push in self._pushes]
            self._lacks[number] = any(lacks)  # of a list: each is asked, which clears it
        return self._lacks[number]

    def run(self, rank: int, call: PushCall, seconds: float = CALL_S, captured: bool = False) -> None:
        """Enqueue a call in the rank's stream; `captured`: the stream is being captured."""
        c_int.in_dll(self.library, "spar_kernel_ctas").value = self.ctas
        self._calls[rank] += 1
        if not captured:
            self._make_room(rank, call.struct.plan)
        call.struct.deadline = _deadline(seconds)
        arguments = byref(call.struct), captured, None, 0
        check(self.library.spar_push_run(self._pushes[rank], *arguments))

    def failures(self) -> dict[int, str]:
        """Wait for all calls; return the ranks whose calls ended early, and why."""
        gpu_core.machine.synchronize()
        found = {}
        for rank, push in enumerate(self._pushes):
            try:
                check(self.library.spar_watchdog_stopped(push.contents.stop[0]))
            except CoreError as error:
                found[rank] = str(error)
        return found

    def close(self) -> None:
        """Wait for all calls and end the group; its slots are freed with it and its last output."""
        gpu_core.machine.synchronize()
        for push in self._pushes:
            self.library.spar_push_close(push)


class Exchange:
    """An all_to_all of `whole` [tokens, heads, row bytes], of which each rank has tokens before, heads after.

    Parts are uneven where the number of ranks divides neither.
    """

    def __init__(self, whole: Tensor, world: int, item: int = 16) -> None:
        tokens, heads, row = whole.shape
        self.inputs = [x.contiguous() for x in whole.tensor_split(world, 0)]
        self.wanted = [x.contiguous() for x in whole.tensor_split(world, 1)]
        self.plans = []
        for rank, x in enumerate(self.inputs):
            units = row // item
            spec = core.Spec(item, (len(x), heads, units), (heads * units, units, 1), [1, 0, tokens])
            self.plans.append(core.Plan(core.request("all_to_all", world, rank, [spec], core.SIDE_PULL)))
