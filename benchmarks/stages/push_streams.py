# SPDX-License-Identifier: Apache-2.0
"""The ranks of a group over push as streams of one process, over the core library.

On one GPU the kernels of several processes take turns of milliseconds; those of several streams of one
process run at the same time, as ranks on several GPUs do. Set-up, calls and failures are the transport's own,
without the report between the ranks of a host, which are processes. All uses of the core's push are here.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, byref, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import partial
from typing import Any, NamedTuple

import gpu_core
import torch
from dlpack import from_memory
from helpers import core  # type: ignore[import-not-found]
from helpers.core_abi import (  # type: ignore[import-not-found]
    Call,
    Comm,
    CoreError,
    Deadline,
    EnvValue,
    Native,
    PeerInfo,
    SetupResult,
    Slots,
    Transport,
    check,
)
from torch import Tensor

FLAGS = 4096  # bytes of a rank's flags
SET_UP_S, CALL_S = 30.0, 20.0  # limits
KINDS = {"cpu": 1, "cuda": 2}  # DLPack's numbers of devices
_OUTPUTS = ctypes.CFUNCTYPE(c_void_p, POINTER(Comm), POINTER(Call))
_WAIT = ctypes.CFUNCTYPE(c_int, POINTER(Comm), POINTER(Deadline))


def _library() -> Any:
    library = core.library()
    library.spar_outputs_enter.argtypes = (c_void_p,)
    library.spar_outputs_allocate.restype = c_void_p
    library.spar_outputs_allocate.argtypes = (c_size_t, c_int, c_void_p)
    library.spar_outputs_free.argtypes = (c_void_p, c_size_t, c_int, c_void_p)
    library.spar_outputs_have.argtypes = (c_void_p, c_void_p, c_int64)
    return library


def slot_bytes() -> int:
    """Return the bytes of a rank's slot: SPAR_PUSH_SLOT, or its default."""
    value = EnvValue()
    check(core.library().spar_env_field(b"push_slot", byref(value)))
    return int(value.count)


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
    """Ranks with a slot and a stream each.

    Args:
        world: the number of ranks.
        slot: the bytes of a rank's slot.
        ctas: the most of a launch; 0: as many as the transport chooses. Above what fits the device together,
            those that wait keep the others out.
        streams: one for each rank, instead of new ones.
    """

    def __init__(self, world: int, slot: int, ctas: int = 0, streams: Sequence[Any] | None = None) -> None:
        self.library, self.world, self.ctas = _library(), world, ctas
        self.streams = streams or [gpu_core.machine.new_stream() for _ in range(world)]
        self._transport = ctypes.pointer(Transport.in_dll(self.library, "spar_transport_push"))
        device = gpu_core.machine.device
        self._slots = [torch.zeros(slot, dtype=torch.uint8, device=device) for _ in range(world)]
        self._flags = [torch.zeros(FLAGS, dtype=torch.uint8, device=device) for _ in range(world)]
        gpu_core.machine.synchronize()  # late zeros would overwrite what peers have written
        self._comms = [POINTER(Comm)() for _ in range(world)]
        self._connect(slot)

    def _connect(self, slot: int) -> None:
        """Set all ranks up: each on a thread, since their first exchanges wait for each other."""
        infos, results = (PeerInfo * self.world)(), (SetupResult * self.world)()
        for info in infos:
            self.library.spar_peer_info_read(byref(info))
        native = Native(torch.cuda.current_device() if gpu_core.machine.device == "cuda" else 0)
        for rank, comm in enumerate(self._comms):
            place = self.world, rank, self.world
            check(
                self.library.spar_comm_open(
                    self._transport, infos, *place, byref(native), byref(comm), byref(results[rank])
                )
            )
        bases, flags = (
            (c_uint64 * self.world)(*[x.data_ptr() for x in each]) for each in (self._slots, self._flags)
        )
        slots = Slots(None, slot, ctypes.cast(bases, c_void_p), ctypes.cast(flags, c_void_p))
        limit = _deadline(SET_UP_S)

        def connect(comm: Any) -> None:
            result = SetupResult()
            comm.contents.slots = slots
            check(self.library.spar_comm_connect(comm, results, byref(limit), byref(result)))
            comm.contents.slots = Slots()
            if result.failed:
                raise RuntimeError(result.reason.decode())

        with ThreadPoolExecutor(self.world) as threads:
            list(threads.map(connect, self._comms))

    def call(self, rank: int, plan: core.Plan, x: Tensor, y: Tensor | None = None) -> PushCall:
        """Return a call of one tensor; without y, its output lies where the transport wants it."""
        call = Call(plan=plan.handle, scale=core.unscaled(), stream=self.streams[rank].cuda_stream)
        call.group, call.op, call.text = b"streams", b"all_to_all", b""
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
        find = ctypes.cast(self._transport.contents.outputs, _OUTPUTS)
        outputs, room = find(self._comms[rank], byref(call)), (size + 3) // 4 * 4
        if not outputs:
            return None
        self.library.spar_outputs_enter(outputs)
        address = self.library.spar_outputs_allocate(room, 0, call.stream)
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
        self.library.spar_outputs_free(address, size, 0, None)

    def run(self, rank: int, call: PushCall, seconds: float = CALL_S) -> None:
        """Enqueue a call in the rank's stream."""
        c_int.in_dll(self.library, "spar_kernel_ctas").value = self.ctas
        call.struct.deadline = _deadline(seconds)
        check(self.library.spar_comm_run(self._comms[rank], byref(call.struct)))

    def failures(self) -> dict[int, str]:
        """Wait for all calls; return the ranks whose calls ended early, and why."""
        gpu_core.machine.synchronize()
        wait, found = ctypes.cast(self._transport.contents.wait, _WAIT), {}
        for rank, comm in enumerate(self._comms):
            try:
                check(wait(comm, byref(_deadline(CALL_S))))
            except CoreError as error:
                found[rank] = str(error)
        return found

    def close(self) -> None:
        for comm in self._comms:
            self.library.spar_comm_close(comm)


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
