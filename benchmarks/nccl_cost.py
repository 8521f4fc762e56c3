# SPDX-License-Identifier: Apache-2.0
"""Compute what an exchange costs over nccl, from its plan and its schedule, for benchmarks/cost.py --nccl.

The C core is built without its Python binding. It computes rank 0's schedule; nothing is launched.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from ctypes import POINTER, byref, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from helpers import core, core_abi  # type: ignore[import-not-found]

MIB = 1 << 20
CAP = 2 << 30  # SPAR_STAGING_MAX, by default
WORLDS = (2, 4, 8, 16, 64)
SIZES = (25_000_000, 200_000_000, 1 << 30)
HEADS, DIM = 64, 128  # bf16
BESIDE = MIB  # bytes of a rank's own part from which it is copied beside the wire
ADDRESS = 1 << 40  # of tensors, which are not touched
LAUNCH = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, ctypes.c_uint64)


class Message(ctypes.Structure):
    _fields_ = (("peer", c_int), ("at", c_void_p), ("bytes", c_int64))


class Schedule(ctypes.Structure):
    _fields_ = (
        *(("plan", c_void_p), ("pulls", c_int), ("all", c_int), ("size", c_int64), ("tensors", c_void_p)),
        *(("staging", c_void_p), ("messages", POINTER(Message)), ("spans", POINTER(core_abi.Span))),
        *(("streams", c_void_p), ("nmessages", c_int64), ("nspans", c_int64)),
        *(("message_room", c_int64), ("span_room", c_int64), ("stream_room", c_int64)),
    )


class Launches(ctypes.Structure):
    _fields_ = (
        *(("launch", LAUNCH), ("context", c_void_p), ("loops", c_int), ("bits", ctypes.c_uint64)),
        ("copy", ctypes.c_uint64 * 512),
    )


class Cost(NamedTuple):
    """Of one call on rank 0.

    Attributes:
        groups: of sends and receives, one in each step.
        kernels: launches of copies.
        messages: sends of all steps.
        staged: bytes that are packed or unpacked.
        staging: bytes of staging memory.
    """

    groups: int
    kernels: int
    messages: int
    staged: int
    staging: int


def plan_of(op: str, world: int, size: int) -> core.Plan:
    """Plan a call of rank 0 whose output has about `size` bytes on each rank.

    op: "heads out" and "heads in" are the all_to_all before attention, and its inverse.
    """
    tokens = size * (1 if op == "gather" else world) // (HEADS * DIM * 2) // world * world
    exchange, extents, args = {
        "heads out": ("all_to_all", (1, tokens // world, HEADS, DIM), (2, 1, tokens)),
        "heads in": ("all_to_all", (1, tokens, HEADS // world, DIM), (1, 2, HEADS)),
        "gather": ("gather", (tokens // world, HEADS * DIM), (0, tokens)),
    }[op]
    spec = core.contiguous(extents, args, 2)
    return core.Plan(core.request(exchange, world, 0, [spec], core.SIDE_PULL))


def count_launches(plan: Any, spans: Any, count: int, tensors: Any) -> int:
    """Return the number of launches that copy the spans."""
    found = []
    launch = LAUNCH(lambda context, copy, bits: found.append(bits) or 0)  # type: ignore[func-returns-value]
    launches, library = Launches(), core.library()
    library.spar_launches_begin(byref(launches), launch, None)
    core_abi.check(library.spar_launches_add(byref(launches), plan, spans, c_int(count), tensors, tensors))
    core_abi.check(library.spar_launches_end(byref(launches)))
    return len(found)


def cost(op: str, world: int, size: int, cap: int = CAP) -> Cost:
    library = core.library()
    library.spar_schedule_steps.restype = c_int64
    made = plan_of(op, world, size)
    plan = made.handle
    tensors = (c_void_p * 1)(ADDRESS)
    steps = library.spar_schedule_steps(plan, 0, c_int64(cap))
    push, pull = Schedule(), Schedule()
    for side, pulls in ((push, 0), (pull, 1)):
        core_abi.check(library.spar_schedule_begin(byref(side), plan, pulls, 0, c_int64(steps), tensors))
    packs_own = steps == 1 and made.push_bytes[0] < BESIDE
    kernels, groups, messages, staged = int(not packs_own), 0, 0, 0
    for step in range(steps):
        for side in (push, pull):
            core_abi.check(library.spar_schedule_step(byref(side), c_int64(step), c_void_p(2 * ADDRESS)))
            staged += sum(side.spans[i].high - side.spans[i].low for i in range(side.nspans))
            if side is push:
                messages += side.nmessages
                if packs_own:
                    core_abi.check(library.spar_schedule_add_own(byref(side)))
            kernels += count_launches(plan, side.spans, side.nspans, tensors)
        groups += bool(push.nmessages or pull.nmessages)
    staging = (1 + (steps > 1)) * (push.size + pull.size)
    for side in (push, pull):
        library.spar_schedule_free(byref(side))
    return Cost(groups, kernels, messages, staged, staging)


def rows() -> Iterator[tuple[str, int, int, Cost]]:
    for op in ("heads out", "heads in", "gather"):
        for world in WORLDS:
            for size in SIZES:
                yield op, world, size, cost(op, world, size)


def table() -> None:
    print("| op | ranks | MiB | NCCL groups | kernels | messages | MiB staged | MiB of staging memory |")
    print("|---|---|---|---|---|---|---|---|")
    for op, world, size, c in rows():
        shown = (c.groups, c.kernels, c.messages, f"{c.staged / MIB:.0f}", f"{c.staging / MIB:.0f}")
        print(f"| {op} | {world} | {size / MIB:.0f} | {' | '.join(map(str, shown))} |")
