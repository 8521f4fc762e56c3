"""The C core without Python's binding: built with the local transport, wrapped with ctypes.

The local transport runs all ranks of a group as threads of one process: a test sees the whole world at once.
A *tensor of items* is a uint8 tensor whose last dim is one item's bytes: so every item size works, also 3.
"""

from __future__ import annotations

import ctypes
import functools
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, byref, c_char, c_int64, c_void_p
from typing import NamedTuple

import torch

from helpers.core_abi import (  # those that only tests use are re-exported
    MAX_WORLD,
    Call,
    Comm,
    CoreError,
    Deadline,
    EnvRow,
    Op,
    PeerInfo,
    PlanStruct,
    PlanTensor,
    Request,
    Scale,
    ScaleType,
    SetupResult,
    Status,
    Tensor,
    Transport,
    check,
    last_error,
    library,
)
from helpers.core_abi import (
    SIDE_PULL as SIDE_PULL,
)
from helpers.core_abi import (
    Choice as Choice,
)
from helpers.core_abi import (
    Endpoint as Endpoint,
)
from helpers.core_abi import (
    EnvValue as EnvValue,
)
from helpers.core_abi import (
    PlanStats as PlanStats,
)
from helpers.core_abi import (
    Refusal as Refusal,
)
from helpers.core_abi import (
    compile_core as compile_core,
)


def _table(name: str, row: type) -> list:
    """The rows of a NULL-terminated array of pointers."""
    pointers = ctypes.cast(getattr(library(), name), POINTER(POINTER(row)))
    rows: list = []
    while pointers[len(rows)]:
        rows.append(pointers[len(rows)].contents)
    return rows


def ops() -> dict[str, str]:
    """The op table: name -> name of the inverse."""
    return {row.name.decode(): row.inverse.decode() for row in _table("spar_ops", Op)}


def transports() -> list[str]:
    return [row.name.decode() for row in _table("spar_transports", Transport)]


def env_rows() -> list[EnvRow]:
    pointer = ctypes.cast(library().spar_env_rows, POINTER(EnvRow))
    rows: list[EnvRow] = []
    while pointer[len(rows)].field:
        rows.append(pointer[len(rows)])
    return rows


def cpu() -> int:
    """The address of the CPU's spar_device."""
    return ctypes.addressof(c_char.in_dll(library(), "spar_device_cpu"))


# Plans.


class Spec(NamedTuple):
    """What is asked of one tensor; extents and strides are those of the rank's input, in items."""

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
    """`overrides`: values of ndim, nargs or ntensors that do not fit the specs."""
    tensors = (Tensor * len(specs))()
    for tensor, spec in zip(tensors, specs, strict=True):
        tensor.item_size = spec.item
        tensor.ndim = overrides.get("ndim", len(spec.extents))
        tensor.extents, tensor.strides = _ints(spec.extents), _ints(spec.strides)
        tensor.nargs, tensor.args = overrides.get("nargs", len(spec.args)), _ints(spec.args)
    found = library().spar_op_find(op.encode())
    assert found, last_error()
    return Request(found, world, rank, sides, overrides.get("ntensors", len(specs)), tensors)


class BlockRow(NamedTuple):
    tensor: int
    src: int
    dst: int
    run: int
    loops: list[tuple[int, int, int]]  # (extent, src stride, dst stride), outer first


class Plan:
    """A plan in Python's hands; released when it is collected."""

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


Inputs = Sequence[torch.Tensor]  # a rank's, as tensors of items


def build_plans(
    op: str, inputs: Sequence[Inputs], args: Sequence[Sequence[int]], sides: int = 0
) -> list[Plan]:
    """All ranks' plans; `args` has an entry for each of a rank's tensors."""
    world = len(inputs)
    return [
        Plan(request(op, world, rank, [Spec.of(x, a) for x, a in zip(own, args, strict=True)], sides))
        for rank, own in enumerate(inputs)
    ]


class Output:
    """Room for a tensor of items, between two wide guards, filled with a pattern that says `not written`."""

    GUARD, PATTERN = 1024, 0xEE

    def __init__(self, shape: Sequence[int]) -> None:
        bytes_ = torch.Size(shape).numel()
        self.memory = torch.full((bytes_ + 2 * self.GUARD,), self.PATTERN, dtype=torch.uint8)
        self.items = self.memory[self.GUARD : self.GUARD + bytes_].view(tuple(shape))

    def guards_are_whole(self) -> bool:
        guards = torch.cat([self.memory[: self.GUARD], self.memory[-self.GUARD :]])
        return bool((guards == self.PATTERN).all())

    def is_untouched(self) -> bool:
        return bool((self.memory == self.PATTERN).all())


def addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


def unscaled() -> Scale:
    return Scale(ScaleType.UNSCALED, 0, 1.0)


# The whole world.


class Outcome(NamedTuple):
    status: Status
    text: str
    outputs: list[Output]
    seconds: float


def local() -> ctypes._Pointer[Transport]:
    """The local transport's row."""
    return ctypes.pointer(Transport.in_dll(library(), "spar_transport_local"))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_WORLD, "rank")


class World:
    """All ranks of one group, each with its comm."""

    def __init__(self, size: int) -> None:
        core = library()
        self.size = size
        self.newest: deque[object] = deque(maxlen=2)  # a core that reads an ended call shall fail, not crash
        self.shared = core.spar_local_world_new(size)
        facts = (PeerInfo * size)()
        verdicts, last = (SetupResult * size)(), SetupResult()
        for own in facts:
            core.spar_peer_info_read(byref(own))
            own.local_world, own.transport = self.shared, b"local"
        self.comms = [POINTER(Comm)() for _ in range(size)]
        for rank, comm in enumerate(self.comms):
            check(
                core.spar_comm_open(
                    local(), facts, size, rank, size, None, byref(comm), byref(verdicts[rank])
                )
            )
        for comm in self.comms:
            check(core.spar_comm_connect(comm, verdicts, byref(Deadline()), byref(last)))
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
        seconds: float = 30,
    ) -> list[Outcome | None]:
        """One call on every rank that has a plan, on a thread each."""
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
                device=cpu(),
                scale=scale or unscaled(),
                deadline=Deadline(deadline),
            )
            calls.append((rank, call, room))
        self.newest.append(calls)

        begin = time.monotonic()  # of all ranks: a thread may start late

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
        """A call that must succeed; gives the outputs of each rank."""
        results: list[list[torch.Tensor]] = []
        for outcome in self.call(plans, inputs, **options):  # type: ignore[arg-type]
            assert outcome is not None
            if outcome.status:
                raise CoreError(outcome.status, outcome.text)
            assert all(output.guards_are_whole() for output in outcome.outputs)
            results.append([output.items for output in outcome.outputs])
        return results


@functools.cache
def world(size: int) -> World:
    """A world that tests share; one that a test breaks is its own World(size)."""
    return World(size)


def exchange_packed(
    plans: Sequence[Plan], inputs: Sequence[Inputs], scale: Scale | None = None
) -> list[list[torch.Tensor]]:
    """The same exchange by packing, moving one run of bytes from each rank to each other, and unpacking."""
    core, outputs = library(), [plan.outputs() for plan in plans]
    scale, sizes = scale or unscaled(), [plan.push_bytes for plan in plans]
    sources = [addresses(own) for own in inputs]
    targets = [addresses([output.items for output in room]) for room in outputs]
    for plan, source, target in zip(plans, sources, targets, strict=True):
        check(core.spar_copy_own(plan.handle, cpu(), source, target, byref(scale), None))
    for a, sender in enumerate(plans):
        for b, receiver in enumerate(plans):
            if a == b or sizes[a][b] == 0:
                continue
            wire = Output((sizes[a][b],))
            check(core.spar_pack(sender.handle, cpu(), b, sources[a], wire.items.data_ptr(), None))
            assert wire.guards_are_whole()
            check(
                core.spar_unpack(
                    receiver.handle, cpu(), a, wire.items.data_ptr(), targets[b], byref(scale), None
                )
            )
    assert all(output.guards_are_whole() for room in outputs for output in room)
    return [[output.items for output in room] for room in outputs]
