# SPDX-License-Identifier: Apache-2.0
"""The C core's structs and functions for ctypes, compared with its headers when it is built."""

from __future__ import annotations

import ctypes
import enum
import functools
import subprocess
from collections.abc import Collection, Sequence
from ctypes import POINTER, c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

from helpers import workers
from helpers.prebuild import once

TESTS = Path(__file__).resolve().parent.parent
CSRC = TESTS.parent / "csrc"
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-DSPAR_LOCAL", '-DSPAR_VERSION="test"', f"-I{CSRC}"]
FLAGS += ["-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread"]
MAX_WORLD = 64  # ranks that run as threads
SIDE_PULL = 1
PUSH_RANKS, PUSH_WORDS = 64, 8192  # over push: ranks at most, bytes of a slot's words


def _sources() -> list[Path]:
    found = [path for path in sorted(CSRC.rglob("*.c")) if path.parent.name not in ("python", "not_linux")]
    return [*found, TESTS / "c" / "local.c"]


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def compile_core(
    output: Path,
    *options: str | Path,
    compiler: Sequence[str] = ("cc",),
    without: Collection[Path] = (),
    from_objects: bool = False,
) -> None:
    """Compile csrc without its Python binding; `options` are flags and further source files.

    `without`: files of csrc that the further source files include. `from_objects`: csrc is compiled once for
    all that link it, by -O1.
    """
    sources = [path for path in _sources() if path not in without]
    if from_objects:
        sources = [_objects() / f"{path.stem}.o" for path in sources]
    command = [*compiler, *FLAGS, *map(str, options), *map(str, sources), "-o", str(output), "-lm"]
    _run(command, output.parent)


def _objects() -> Path:
    """Return the folder of csrc's objects, which a library and a program can have."""
    command = ["cc", *FLAGS, "-O1", "-fPIC", "-c", *map(str, _sources())]
    return workers.built("core-objects", lambda folder: _run(command, folder))


class Status(enum.IntEnum):
    OK, INVALID, NO_MEMORY, MISMATCH, TIMEOUT, PEER_LOST, BROKEN, INTERRUPTED, TRANSPORT, INTERNAL = range(10)


class ScaleType(enum.IntEnum):
    UNSCALED, F16, BF16, F32, F64, C64, C128 = range(7)


class CoreError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{Status(status).name}: {text}")
        self.status, self.text = Status(status), text


# The library's structs, field by field. library() compares them with the headers.


class Tensor(ctypes.Structure):
    _fields_ = (
        ("item_size", c_int64),
        ("ndim", c_int),
        ("extents", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("nargs", c_int),
        ("args", POINTER(c_int64)),
    )


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
        ("in_order", c_uint32),
        ("out_order", c_uint32),
        ("in_words", c_char * 64),
        ("out_words", c_char * 64),
        ("in_sizes", POINTER(c_int64)),
        ("out_sizes", POINTER(c_int64)),
        ("rank_bytes", POINTER(c_int64)),
    )


class PlanStruct(ctypes.Structure):
    _fields_ = (
        ("world", c_int),
        ("rank", c_int),
        ("ntensors", c_int),
        ("tensors", POINTER(PlanTensor)),
        ("push", POINTER(Range)),
        ("pull", POINTER(Range)),
        ("blocks", POINTER(Block)),
        ("dims", POINTER(Dim)),
        ("signature", c_uint64),
        ("sent", c_uint64),
        ("footprint", c_int64),
        ("refs", c_int),
    )


class Request(ctypes.Structure):
    _fields_ = (
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


class Span(ctypes.Structure):
    _fields_ = (("peer", c_int), ("route", c_int), ("low", c_int64), ("high", c_int64), ("wire", c_void_p))


class Entered(ctypes.Structure):
    _fields_ = (("context", c_void_p), ("mode", c_int))


class Route(enum.IntEnum):
    PUSH, PACK, UNPACK = range(3)


class Endpoint(ctypes.Structure):
    _fields_ = (("pid", c_int64), ("nonce", c_uint64))


class Deadline(ctypes.Structure):
    _fields_ = (("at_ns", c_int64), ("interrupted", c_void_p), ("context", c_void_p))


class PeerInfo(ctypes.Structure):
    _fields_ = (
        ("version", c_char * 24),
        ("error", c_char * 160),
        ("transport", c_char * 40),
        ("check", c_char * 8),
        ("local_world", c_uint64),
        ("endpoint", Endpoint),
        ("secret", ctypes.c_ubyte * 16),
        ("no_shm", c_char * 64),
        ("no_tcp", c_char * 64),
        ("no_nccl", c_char * 96),
        ("no_push", c_char * 96),
        ("host", c_uint64 * 2),
        ("cores", c_uint64 * 16),
    )


class SetupResult(ctypes.Structure):
    _fields_ = (
        ("failed", c_int32),
        ("cause", c_int32),
        ("reason", c_char * 88),
        ("offset", c_int64),
        ("token", c_char * 152),
    )


class Rows(ctypes.Structure):
    _fields_ = (("index", c_void_p), ("bytes", c_int64), ("stride", c_int64))


class Call(ctypes.Structure):
    _fields_ = (
        ("plan", POINTER(PlanStruct)),
        ("inputs", POINTER(c_void_p)),
        ("rows", POINTER(Rows)),
        ("outputs", POINTER(c_void_p)),
        ("blocks", c_void_p),
        ("targets", c_void_p),
        ("scale", Scale),
        ("sum", c_int),
        ("text", c_char_p),
        ("number", c_int64),
        ("forward", c_int64),
        ("stream", c_void_p),
        ("native", c_void_p),
        ("staging", c_void_p),
        ("deadline", Deadline),
        ("failed", c_int),
        ("why", c_char_p),
        ("group", c_char_p),
        ("op", c_char_p),
    )


class Native(ctypes.Structure):
    _fields_ = (("ordinal", c_int), ("comm", c_void_p))


class Comm(ctypes.Structure):
    pass


_CallFunction = ctypes.CFUNCTYPE(c_int, POINTER(Comm), POINTER(Call))


class Transport(ctypes.Structure):
    _fields_ = (
        ("name", c_char_p),
        ("device", c_char_p),
        ("probe", c_void_p),
        ("serves", c_void_p),
        ("setup", c_void_p),
        ("connect", c_void_p),
        ("prepare", c_void_p),
        ("outputs", c_void_p),
        ("run", _CallFunction),
        ("wait", c_void_p),
        ("broken", c_void_p),
        ("room", c_void_p),
        ("captured", c_void_p),
        ("close", c_void_p),
    )


Comm._fields_ = (
    ("transport", POINTER(Transport)),
    ("world", c_int),
    ("rank", c_int),
    ("local_ranks", c_int),
    ("native", Native),
    ("info", POINTER(PeerInfo)),
    ("hosts", c_void_p),
    ("far", c_void_p),
    ("nfar", c_int),
    ("tcp", c_void_p),
    ("group", c_void_p),
    ("state", c_void_p),
)


class PushState(ctypes.Structure):
    _fields_ = (
        *((name, c_int) for name in ("world", "rank", "ordinal")),
        *((name, c_int64) for name in ("half", "area", "heap", "bytes", "limit")),
        *((name, c_int64) for name in ("image_at", "room", "least", "traffic", "next")),
        ("outputs", c_void_p),
        ("sync", c_void_p),
        ("stop", POINTER(c_uint32)),
        ("captured", c_int),
        ("unreached", c_int),
        ("unended", c_void_p),
        ("bases", c_void_p * PUSH_RANKS),
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
    _fields_ = (
        *((name, c_char_p) for name in ("field", "variable", "kind")),
        *((name, c_int64) for name in ("least", "most")),
        *((name, c_char_p) for name in ("fallback", "help")),
    )


class EnvValue(ctypes.Structure):
    _fields_ = (("holds", c_int), ("text", c_char_p), ("seconds", c_double), ("count", c_int64))


_STRUCTS = {
    "tensor": Tensor,
    "dim": Dim,
    "block": Block,
    "range": Range,
    "plan_tensor": PlanTensor,
    "plan": PlanStruct,
    "request": Request,
    "plan_stats": PlanStats,
    "scale": Scale,
    "rows": Rows,
    "span": Span,
    "entered": Entered,
    "endpoint": Endpoint,
    "deadline": Deadline,
    "peer_info": PeerInfo,
    "setup_result": SetupResult,
    "refusal": Refusal,
    "native": Native,
    "call": Call,
    "comm": Comm,
    "transport": Transport,
    "push_state": PushState,
    "choice": Choice,
    "env_row": EnvRow,
    "env_value": EnvValue,
}

_FUNCTIONS = {  # name: (result, arguments)
    "last_error": (c_char_p, []),
    "dynlib_set_path": (None, [c_char_p, c_char_p]),
    "shard_size": (c_int64, [c_int64, c_int, c_int]),
    "plan_build": (c_int, [POINTER(Request), POINTER(POINTER(PlanStruct))]),
    "plan_get": (c_int, [POINTER(Request), POINTER(POINTER(PlanStruct))]),
    "plan_release": (None, [POINTER(PlanStruct)]),
    "plan_signature": (c_uint64, [POINTER(PlanStruct), c_char_p]),
    "plan_describe": (None, [POINTER(PlanStruct), c_char_p, ctypes.c_size_t]),
    "plan_cache_stats": (None, [POINTER(PlanStats)]),
    "plan_cache_limit": (None, [c_int64]),
    "nontemporal_use_min": (None, [c_int64]),
    "sum": (None, [c_int, c_void_p, POINTER(c_void_p), c_int, c_int64]),
    "pack": (None, [POINTER(PlanStruct), c_int, POINTER(c_void_p), c_void_p, c_void_p]),
    "unpack": (None, [POINTER(PlanStruct), c_int, c_void_p, POINTER(c_void_p), POINTER(Scale)]),
    "copy_own": (None, [POINTER(PlanStruct), POINTER(c_void_p), POINTER(c_void_p), POINTER(Scale)]),
    "cuda_open": (c_int, []),
    "cuda_prepare": (c_int, [c_int]),
    "cuda_enter": (c_int, [c_int, POINTER(Entered)]),
    "cuda_leave": (None, [POINTER(Entered)]),
    "cuda_copy_spans": (
        c_int,
        [
            *(POINTER(PlanStruct), POINTER(Span), c_int, POINTER(c_void_p), POINTER(c_void_p)),
            *(POINTER(Scale), c_void_p),
        ],
    ),
    "peer_info_read": (None, [POINTER(PeerInfo)]),
    "core_share": (c_int, [c_void_p, ctypes.c_size_t, c_int, c_int, c_int]),
    "choose": (c_int, [POINTER(PeerInfo), c_int, c_int, c_char_p, POINTER(Refusal), POINTER(Choice)]),
    "env_get": (c_int, [POINTER(EnvRow), POINTER(EnvValue)]),
    "env_field": (c_int, [c_char_p, POINTER(EnvValue)]),
    "cgroup_memory": (c_int64, [c_char_p]),
    "cgroup_cores": (c_int64, [c_char_p]),
    "comm_open": (
        c_int,
        [
            *(POINTER(Transport), POINTER(PeerInfo), c_int, c_int, c_int, POINTER(Native)),
            *(POINTER(POINTER(Comm)), POINTER(SetupResult)),
        ],
    ),
    "comm_connect": (c_int, [POINTER(Comm), POINTER(SetupResult), POINTER(Deadline), POINTER(SetupResult)]),
    "comm_run": (c_int, [POINTER(Comm), POINTER(Call)]),
    "comm_close": (None, [POINTER(Comm)]),
    "local_world_new": (c_void_p, [c_int]),
    "local_world_free": (None, [c_void_p]),
}


def _expected_abi() -> list[tuple[str, int]]:
    """Return the C expression of each size, offset and code, and its value here."""
    abi = [(f"SPAR_{status.name}", status.value) for status in Status]
    abi += [(f"SPAR_{kind.name}", kind.value) for kind in ScaleType]
    abi += [(f"SPAR_{route.name}", route.value) for route in Route]
    abi += [("SPAR_SIDE_PULL", SIDE_PULL)]
    abi += [("SPAR_KERNEL_RANKS", PUSH_RANKS), ("SPAR_PUSH_WORDS", PUSH_WORDS)]
    for name, struct in _STRUCTS.items():
        abi.append((f"sizeof(spar_{name})", ctypes.sizeof(struct)))
        for field, *_ in struct._fields_:
            abi.append((f"offsetof(spar_{name}, {field})", getattr(struct, field).offset))
    return abi


@functools.cache  # of which a call is quicker
@once
def library() -> ctypes.CDLL:
    abi = _expected_abi()

    def fill(folder: Path) -> None:
        table = folder / "abi.c"
        table.write_text(
            '#include "base/env.h"\n#include "base/dynlib.h"\n'
            '#include "devices/cuda/cuda.h"\n#include "spar.h"\n#include "transports/push/push.h"\n'
            f"extern const long long abi[];\nconst long long abi[] = {{{', '.join(c for c, _ in abi)}}};\n"
        )
        compile_core(folder / "core.so", "-O1", "-fPIC", "-shared", table, from_objects=True)

    core = ctypes.CDLL(str(workers.built("core", fill) / "core.so"))
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
