"""The C core without Python's binding: built with the local transport, wrapped with ctypes.

The local transport runs all ranks of a group as threads of one process: a test sees the whole world at once.
A *tensor of items* is a uint8 tensor whose last dim is one item's bytes: so every item size works, also 3.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import re
import subprocess
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, byref, c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch

CSRC = Path(__file__).resolve().parent.parent / "csrc"
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-DSPAR_LOCAL", '-DSPAR_VERSION="test"', f"-I{CSRC}"]
FLAGS += ["-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread"]
MAX_WORLD = 64  # ranks that run as threads
SIDE_PULL = 1


def compile_core(output: Path, *options: str | Path, compiler: str = "cc") -> None:
    """Compiles all of csrc that knows no Python; `options` are flags and further source files."""
    sources = [path for path in sorted(CSRC.rglob("*.c")) if not _knows_python(path)]
    command = [compiler, *FLAGS, *map(str, options), *map(str, sources), "-o", str(output), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def _knows_python(source: Path) -> bool:
    return re.search(r'#include [<"](Python|binding)\.h', source.read_text()) is not None


class Status(enum.IntEnum):
    OK, INVALID, TYPE, NO_MEMORY, MISMATCH, TIMEOUT, PEER_LOST, BROKEN, INTERRUPTED, TRANSPORT, INTERNAL = (
        range(11)
    )


class ScaleType(enum.IntEnum):
    UNSCALED, F16, BF16, F32, F64, C64, C128 = range(7)


class CoreError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{Status(status).name}: {text}")
        self.status, self.text = Status(status), text


# The library's structs, field by field. library() holds them against the headers.


class Tensor(ctypes.Structure):
    _fields_ = (
        ("item_size", c_int64),
        ("ndim", c_int),
        ("extents", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("nargs", c_int),
        ("args", POINTER(c_int64)),
    )


class Op(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("inverse", c_char_p), ("args", c_char_p), ("layouts", c_void_p))


class Dim(ctypes.Structure):
    _fields_ = (("extent", c_int64), ("src", c_int64), ("dst", c_int64))


class Block(ctypes.Structure):
    _fields_ = (
        ("src", c_int64),
        ("dst", c_int64),
        ("run", c_int64),
        ("dims", c_int64),
        ("tensor", c_int32),
        ("ndim", c_int32),
    )


class Range(ctypes.Structure):
    _fields_ = (("first", c_int64), ("count", c_int64), ("bytes", c_int64))


class PlanTensor(ctypes.Structure):
    _fields_ = (
        ("item_size", c_int64),
        ("ndim", c_int),
        ("global", c_int64 * 64),
        ("out", c_int64 * 64),
        ("out_bytes", c_int64),
        ("in_dim", c_int),
        ("out_dim", c_int),
        ("in_sizes", POINTER(c_int64)),
        ("out_sizes", POINTER(c_int64)),
        ("rank_bytes", POINTER(c_int64)),
    )


class PlanStruct(ctypes.Structure):
    _fields_ = (
        ("op", POINTER(Op)),
        ("world", c_int),
        ("rank", c_int),
        ("ntensors", c_int),
        ("tensors", POINTER(PlanTensor)),
        ("push", POINTER(Range)),
        ("pull", POINTER(Range)),
        ("blocks", POINTER(Block)),
        ("dims", POINTER(Dim)),
        ("signature", c_uint64),
        ("refs", c_int),
    )


class Request(ctypes.Structure):
    _fields_ = (
        ("op", POINTER(Op)),
        ("world", c_int),
        ("rank", c_int),
        ("sides", c_int),
        ("ntensors", c_int),
        ("tensors", POINTER(Tensor)),
    )


class PlanStats(ctypes.Structure):
    _fields_ = (("cached", c_int64), ("hits", c_int64), ("misses", c_int64))


class Scale(ctypes.Structure):
    _fields_ = (("dtype", c_int), ("divide", c_int), ("factor", c_double))


class Endpoint(ctypes.Structure):
    _fields_ = (("pid", c_int64), ("nonce", c_uint64))


class Patience(ctypes.Structure):
    _fields_ = (("deadline_ns", c_int64), ("interrupted", c_void_p), ("context", c_void_p))


class Facts(ctypes.Structure):
    _fields_ = (
        ("version", c_char * 24),
        ("error", c_char * 160),
        ("transport", c_char * 40),
        ("check", c_char * 8),
        ("local_world", c_uint64),
        ("endpoint", Endpoint),
        ("no_shm", c_char * 64),
    )


class Verdict(ctypes.Structure):
    _fields_ = (("failed", c_int32), ("reason", c_char * 92), ("offset", c_int64), ("reserved", c_char * 24))


class Call(ctypes.Structure):
    _fields_ = (
        ("plan", POINTER(PlanStruct)),
        ("inputs", POINTER(c_void_p)),
        ("outputs", POINTER(c_void_p)),
        ("blocks", c_void_p),
        ("device", c_void_p),
        ("scale", Scale),
        ("text", c_char_p),
        ("stream", c_void_p),
        ("patience", Patience),
        ("failed", c_int),
        ("why", c_char_p),
    )


class Comm(ctypes.Structure):
    pass


_CallFunction = ctypes.CFUNCTYPE(c_int, POINTER(Comm), POINTER(Call))


class Transport(ctypes.Structure):
    _fields_ = (
        ("name", c_char_p),
        ("serves", c_void_p),
        ("setup", c_void_p),
        ("connect", c_void_p),
        ("run", _CallFunction),
        ("start", _CallFunction),
        ("wait", _CallFunction),
        ("shown", c_void_p),
        ("close", c_void_p),
    )


Comm._fields_ = (
    ("transport", POINTER(Transport)),
    ("world", c_int),
    ("rank", c_int),
    ("local_ranks", c_int),
    ("facts", POINTER(Facts)),
    ("state", c_void_p),
)


class Refusal(ctypes.Structure):
    _fields_ = (("count", c_int), ("names", c_char_p * 16), ("reasons", c_char_p * 16))


class Choice(ctypes.Structure):
    _fields_ = (
        ("transport", POINTER(Transport)),
        ("reason", c_char * 192),
        ("rejected", c_int),
        ("rejected_names", c_char_p * 16),
        ("rejected_reasons", (c_char * 192) * 16),
    )


class EnvRow(ctypes.Structure):
    _fields_ = tuple((name, c_char_p) for name in ("field", "variable", "kind", "fallback", "help"))


_STRUCTS = {
    "tensor": Tensor,
    "op": Op,
    "dim": Dim,
    "block": Block,
    "range": Range,
    "plan_tensor": PlanTensor,
    "plan": PlanStruct,
    "request": Request,
    "plan_stats": PlanStats,
    "scale": Scale,
    "endpoint": Endpoint,
    "patience": Patience,
    "facts": Facts,
    "verdict": Verdict,
    "refusal": Refusal,
    "call": Call,
    "comm": Comm,
    "transport": Transport,
    "choice": Choice,
    "env_row": EnvRow,
}

_FUNCTIONS = {  # name: (result, arguments)
    "last_error": (c_char_p, []),
    "op_find": (POINTER(Op), [c_char_p]),
    "share": (c_int64, [c_int64, c_int, c_int]),
    "plan_build": (c_int, [POINTER(Request), POINTER(POINTER(PlanStruct))]),
    "plan_get": (c_int, [POINTER(Request), POINTER(POINTER(PlanStruct))]),
    "plan_release": (None, [POINTER(PlanStruct)]),
    "plan_signature": (c_uint64, [POINTER(PlanStruct), c_char_p]),
    "plan_describe": (None, [POINTER(PlanStruct), c_char_p, ctypes.c_size_t]),
    "plan_cache_stats": (None, [POINTER(PlanStats)]),
    "plan_cache_limit": (None, [c_int64]),
    "pack": (c_int, [POINTER(PlanStruct), c_void_p, c_int, POINTER(c_void_p), c_void_p, c_void_p]),
    "unpack": (
        c_int,
        [POINTER(PlanStruct), c_void_p, c_int, c_void_p, POINTER(c_void_p), POINTER(Scale), c_void_p],
    ),
    "copy_own": (
        c_int,
        [POINTER(PlanStruct), c_void_p, POINTER(c_void_p), POINTER(c_void_p), POINTER(Scale), c_void_p],
    ),
    "facts_read": (None, [POINTER(Facts)]),
    "choose": (c_int, [POINTER(Facts), c_int, c_char_p, POINTER(Refusal), POINTER(Choice)]),
    "env_get": (c_int, [POINTER(EnvRow), POINTER(c_char_p)]),
    "env_field": (c_int, [c_char_p, POINTER(c_char_p)]),
    "comm_open": (
        c_int,
        [POINTER(Transport), POINTER(Facts), c_int, c_int, c_int, POINTER(POINTER(Comm)), POINTER(Verdict)],
    ),
    "comm_connect": (c_int, [POINTER(Comm), POINTER(Verdict), POINTER(Patience), POINTER(Verdict)]),
    "comm_run": (c_int, [POINTER(Comm), POINTER(Call)]),
    "comm_close": (None, [POINTER(Comm)]),
    "local_world_new": (c_void_p, [c_int]),
    "local_world_free": (None, [c_void_p]),
}


def _expected_abi() -> list[tuple[str, int]]:
    """What C calls each size, offset and code, and what it is here."""
    abi = [(f"SPAR_{status.name}", status.value) for status in Status]
    abi += [(f"SPAR_{kind.name}", kind.value) for kind in ScaleType]
    abi += [("SPAR_SIDE_PULL", SIDE_PULL)]
    for name, struct in _STRUCTS.items():
        abi.append((f"sizeof(spar_{name})", ctypes.sizeof(struct)))
        for field, *_ in struct._fields_:
            abi.append((f"offsetof(spar_{name}, {field})", getattr(struct, field).offset))
    return abi


@functools.cache
def library() -> ctypes.CDLL:
    abi = _expected_abi()
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "abi.c")
        table.write_text(
            '#include "env.h"\n#include "spar.h"\n'
            f"extern const long long abi[];\nconst long long abi[] = {{{', '.join(c for c, _ in abi)}}};\n"
        )
        compile_core(Path(folder, "core.so"), "-O2", "-fPIC", "-shared", table)
        core = ctypes.CDLL(str(Path(folder, "core.so")))
    built = (ctypes.c_longlong * len(abi)).in_dll(core, "abi")
    wrong = [
        f"{c} is {value}, here {ours}" for (c, ours), value in zip(abi, built, strict=True) if ours != value
    ]
    if wrong:
        raise RuntimeError(f"core.py and csrc disagree: {'; '.join(wrong)}")
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(core, f"spar_{name}")
        function.restype, function.argtypes = result, arguments
    return core


def check(status: int) -> None:
    if status != Status.OK:
        raise CoreError(status, last_error())


def last_error() -> str:
    return library().spar_last_error().decode()


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
        facts = (Facts * size)()
        verdicts, last = (Verdict * size)(), Verdict()
        for own in facts:
            core.spar_facts_read(byref(own))
            own.local_world, own.transport = self.shared, b"local"
        self.comms = [POINTER(Comm)() for _ in range(size)]
        for rank, comm in enumerate(self.comms):
            check(core.spar_comm_open(local(), facts, size, rank, size, byref(comm), byref(verdicts[rank])))
        for comm in self.comms:
            check(core.spar_comm_connect(comm, verdicts, byref(Patience()), byref(last)))
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
        in_two: bool = False,
        seconds: float = 30,
    ) -> list[Outcome | None]:
        """One call on every rank that has a plan, by run or (in_two) by start and wait."""
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
                patience=Patience(deadline),
            )
            calls.append((rank, call, room))
        self.newest.append(calls)
        if in_two:  # start does not wait for anybody: one thread can do it for all
            for rank, call, _ in calls:
                comm = self.comms[rank]
                check(comm.contents.transport.contents.start(comm, byref(call)))

        def finish(entry: tuple[int, Call, list[Output]]) -> Outcome:
            rank, call, room = entry
            comm, begin = self.comms[rank], time.monotonic()
            step = comm.contents.transport.contents.wait if in_two else library().spar_comm_run
            status = Status(step(comm, byref(call)))
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
