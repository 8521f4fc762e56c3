# SPDX-License-Identifier: Apache-2.0
"""The C core without the Python binding: built with the local transport, wrapped with ctypes.

The local transport runs all ranks of a group as threads of one process, so that a test can inspect every
rank. A *tensor of items* is a uint8 tensor; its last dim holds the bytes of one item. Any item size works,
also 3.
"""

from __future__ import annotations

import ctypes
import functools
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, byref, c_int64, c_void_p
from typing import NamedTuple

import torch

from helpers.core_abi import (  # tests import some of these names from here
    MAX_WORLD,
    SIDE_PULL as SIDE_PULL,
    Call,
    Choice as Choice,
    Comm,
    CoreError,
    Deadline,
    Endpoint as Endpoint,
    EnvRow,
    EnvValue as EnvValue,
    PeerInfo,
    PlanStats as PlanStats,
    PlanStruct,
    PlanTensor,
    Refusal as Refusal,
    Request,
    Rows,
    Scale,
    ScaleType,
    SetupResult,
    Status,
    Tensor,
    Transport,
    check,
    compile_core as compile_core,
    last_error,
    library,
)
from helpers.tables import numbers


def _table(name: str, row: type) -> list:
    """Return the rows of a NULL-terminated array of pointers."""
    pointers = ctypes.cast(getattr(library(), name), POINTER(POINTER(row)))
    rows: list = []
    while pointers[len(rows)]:
        rows.append(pointers[len(rows)].contents)
    return rows


def transports() -> list[str]:
    return [row.name.decode() for row in _table("spar_transports", Transport)]


def env_rows() -> list[EnvRow]:
    pointer = ctypes.cast(library().spar_env_rows, POINTER(EnvRow))
    rows: list[EnvRow] = []
    while pointer[len(rows)].field:
        rows.append(pointer[len(rows)])
    return rows


# Plans.


class Spec(NamedTuple):
    """One tensor of a request; extents and strides of the rank's input, in items."""

    item: int
    extents: Sequence[int]
    strides: Sequence[int]
    args: Sequence[int]

    @classmethod
    def of(cls, items: torch.Tensor, args: Sequence[int]) -> Spec:
        *extents, item = items.shape
        return cls(item, extents, [stride // item for stride in items.stride()[:-1]], args)


def contiguous(extents: Sequence[int], args: Sequence[int], item: int = 1) -> Spec:
    strides = [1] * len(extents)
    for i in range(len(extents) - 2, -1, -1):
        strides[i] = strides[i + 1] * extents[i + 1]
    return Spec(item, extents, strides, args)


def _ints(values: Sequence[int]) -> ctypes.Array[c_int64]:
    return (c_int64 * len(values))(*values)


def request(
    op: str, world: int, rank: int, specs: Sequence[Spec], sides: int = 0, **overrides: int
) -> Request:
    """Build a request of an exchange of the table.

    overrides: values of ndim, nargs or ntensors that contradict the specs.
    """
    tensors = (Tensor * len(specs))()
    for tensor, spec in zip(tensors, specs, strict=True):
        tensor.item_size = spec.item
        tensor.ndim = overrides.get("ndim", len(spec.extents))
        tensor.extents, tensor.strides = _ints(spec.extents), _ints(spec.strides)
        layouts = numbers(op, spec.args, spec.extents, world)
        tensor.nargs, tensor.args = overrides.get("nargs", len(layouts)), _ints(layouts)
    return Request(world, rank, sides, overrides.get("ntensors", len(specs)), tensors)


class BlockRow(NamedTuple):
    tensor: int
    src: int
    dst: int
    run: int
    loops: list[tuple[int, int, int]]  # (extent, src stride, dst stride), outer first


class Plan:
    """A plan, released when it is garbage-collected."""

    def __init__(self, request: Request, cached: bool = False) -> None:
        self.handle = POINTER(PlanStruct)()
        make = library().spar_plan_get if cached else library().spar_plan_build
        check(make(byref(request), byref(self.handle)))
        weakref.finalize(self, library().spar_plan_release, self.handle)
        self.struct: PlanStruct = self.handle.contents
        self.world, self.rank = self.struct.world, self.struct.rank
        self.tensors: list[PlanTensor] = self.struct.tensors[: self.struct.ntensors]
        self.out_shapes = [tuple(tensor.out[: tensor.ndim]) for tensor in self.tensors]

    @property
    def push_bytes(self) -> list[int]:
        return [self.struct.push[peer].bytes for peer in range(self.world)]

    @property
    def pull_bytes(self) -> list[int]:
        return [self.struct.pull[peer].bytes for peer in range(self.world)]

    def blocks(self, peer: int, pull: bool = False) -> Iterator[BlockRow]:
        part = (self.struct.pull if pull else self.struct.push)[peer]
        for i in range(part.first, part.first + part.count):
            block = self.struct.blocks[i]
            loops = self.struct.dims[block.dims : block.dims + block.ndim] if block.ndim else []
            rows = [(loop.extent, loop.src, loop.dst) for loop in loops]
            yield BlockRow(block.tensor, block.src, block.dst, block.run, rows)

    def signature(self, text: str = "") -> int:
        return library().spar_plan_signature(self.handle, text.encode())

    def describe(self, size: int = 1024) -> str:
        text = ctypes.create_string_buffer(b"?", max(size, 2))
        library().spar_plan_describe(self.handle, text, size)
        return text.value.decode()

    def outputs(self) -> list[Output]:
        return [
            Output((*shape, tensor.item_size))
            for shape, tensor in zip(self.out_shapes, self.tensors, strict=True)
        ]


Inputs = Sequence[torch.Tensor]  # of one rank, as tensors of items


def build_plans(
    op: str, inputs: Sequence[Inputs], args: Sequence[Sequence[int]], sides: int = 0
) -> list[Plan]:
    """Build the plans of all ranks; `args` has an entry for each tensor of a rank."""
    world = len(inputs)
    return [
        Plan(request(op, world, rank, [Spec.of(x, a) for x, a in zip(own, args, strict=True)], sides))
        for rank, own in enumerate(inputs)
    ]


class Output:
    """Memory for a tensor of items, between two guards, filled with a pattern that marks unwritten bytes."""

    GUARD, PATTERN = 1024, 0xEE

    def __init__(self, shape: Sequence[int]) -> None:
        bytes_ = torch.Size(shape).numel()
        self.memory = torch.full((bytes_ + 2 * self.GUARD,), self.PATTERN, dtype=torch.uint8)
        self.items = self.memory[self.GUARD : self.GUARD + bytes_].view(tuple(shape))

    def guards_are_intact(self) -> bool:
        guards = torch.cat([self.memory[: self.GUARD], self.memory[-self.GUARD :]])
        return bool((guards == self.PATTERN).all())

    def is_untouched(self) -> bool:
        return bool((self.memory == self.PATTERN).all())


def addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


def unscaled() -> Scale:
    return Scale(ScaleType.UNSCALED, 0, 1.0)


# All ranks.


class Outcome(NamedTuple):
    status: Status
    text: str
    outputs: list[Output]
    seconds: float


def local() -> ctypes._Pointer[Transport]:
    """Return the local transport's row."""
    return ctypes.pointer(Transport.in_dll(library(), "spar_transport_local"))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_WORLD, "rank")


class World:
    """All ranks of one group, each with its comm."""

    def __init__(self, size: int) -> None:
        core = library()
        self.size = size
        self.newest: deque[object] = deque(maxlen=2)  # reading an ended call must fail the test, not crash it
        self.shared = core.spar_local_world_new(size)
        info = (PeerInfo * size)()
        results, last = (SetupResult * size)(), SetupResult()
        for own in info:
            core.spar_peer_info_read(byref(own))
            own.local_world, own.transport = self.shared, b"local"
        self.comms = [POINTER(Comm)() for _ in range(size)]
        for rank, comm in enumerate(self.comms):
            check(
                core.spar_comm_open(local(), info, size, rank, size, None, byref(comm), byref(results[rank]))
            )
        for comm in self.comms:
            check(core.spar_comm_connect(comm, results, byref(Deadline()), byref(last)))
            assert not last.failed, last.reason

    def close(self) -> None:
        for comm in self.comms:
            library().spar_comm_close(comm)
        library().spar_local_world_free(self.shared)

    def call(
        self,
        plans: Sequence[Plan | None],
        inputs: Sequence[Inputs],
        *,
        scale: Scale | None = None,
        rows: Sequence[Rows] | None = None,
        seconds: float = 30,
    ) -> list[Outcome | None]:
        """Make one call on every rank that has a plan, each on its own thread; rows: of each rank's input."""
        calls: list[tuple[int, Call, list[Output]]] = []
        deadline = time.monotonic_ns() + int(seconds * 1e9)
        for rank, (plan, own) in enumerate(zip(plans, inputs, strict=True)):
            if plan is None:
                continue
            room = plan.outputs()
            targets = addresses([output.items for output in room])
            call = Call(
                plan=plan.handle,
                inputs=addresses(own),
                outputs=targets,
                scale=scale or unscaled(),
                rows=None if rows is None else ctypes.pointer(rows[rank]),
                deadline=Deadline(deadline),
            )
            calls.append((rank, call, room))
        self.newest.append(calls)

        begin = time.monotonic()  # shared by all ranks, because a thread may start late

        def finish(entry: tuple[int, Call, list[Output]]) -> Outcome:
            rank, call, room = entry
            comm = self.comms[rank]
            status = Status(library().spar_comm_run(comm, byref(call)))
            return Outcome(status, last_error() if status else "", room, time.monotonic() - begin)

        outcomes: list[Outcome | None] = [None] * self.size
        done = _threads().map(finish, calls) if self.size > 1 else map(finish, calls)
        for (rank, *_), outcome in zip(calls, done, strict=True):
            outcomes[rank] = outcome
        return outcomes

    def exchange(
        self, plans: Sequence[Plan], inputs: Sequence[Inputs], **options: object
    ) -> list[list[torch.Tensor]]:
        """Make a call that must succeed; return the outputs of each rank."""
        results: list[list[torch.Tensor]] = []
        for outcome in self.call(plans, inputs, **options):  # type: ignore[arg-type]
            assert outcome is not None
            if outcome.status:
                raise CoreError(outcome.status, outcome.text)
            assert all(output.guards_are_intact() for output in outcome.outputs)
            results.append([output.items for output in outcome.outputs])
        return results


@functools.cache
def world(size: int) -> World:
    """Return a world that tests share. A test that breaks a world creates its own World(size)."""
    return World(size)


def exchange_packed(
    plans: Sequence[Plan], inputs: Sequence[Inputs], scale: Scale | None = None
) -> list[list[torch.Tensor]]:
    """Make the same exchange by packing, copying the bytes between all pairs of ranks, and unpacking."""
    core, outputs = library(), [plan.outputs() for plan in plans]
    scale, sizes = scale or unscaled(), [plan.push_bytes for plan in plans]
    sources = [addresses(own) for own in inputs]
    targets = [addresses([output.items for output in room]) for room in outputs]
    for plan, source, target in zip(plans, sources, targets, strict=True):
        core.spar_copy_own(plan.handle, source, target, byref(scale))
    for a, sender in enumerate(plans):
        for b, receiver in enumerate(plans):
            if a == b or sizes[a][b] == 0:
                continue
            wire = Output((sizes[a][b],))
            core.spar_pack(sender.handle, b, sources[a], None, wire.items.data_ptr())
            assert wire.guards_are_intact()
            core.spar_unpack(receiver.handle, a, wire.items.data_ptr(), targets[b], byref(scale))
    assert all(output.guards_are_intact() for room in outputs for output in room)
    return [[output.items for output in room] for room in outputs]
