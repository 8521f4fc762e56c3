"""Set a group's transport up: the ranks exchange their facts, choose alike, and connect. Collective.

A rank that fails in it is reported to its peers, who raise too; the next call begins anew.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from . import _C, cuda, forks, whereabouts, wire
from .agreement import LOCAL, OVER, SHARED, agree, mark_reported
from .errors import SparError

if TYPE_CHECKING:
    from .communicator import Communicator

_log = logging.getLogger("spar")
_BUILD_SETTINGS = {"SPAR_WERROR", "SPAR_DEBUG", "SPAR_SANITIZE"}


@dataclass(frozen=True)
class Transport:
    """Which transport moves a group's bytes, and why.

    Attributes:
        name: its name; None before the group's first exchange.
        reason: why this one.
        device: the device type it was chosen for.
        world_size: ranks of the group.
        rejected: (name, reason) of each transport that was looked at before it.
    """

    name: str | None
    reason: str
    device: str
    world_size: int
    rejected: tuple[tuple[str, str], ...] = ()


def set_up(comm: Communicator, op: str, device: torch.device, deadline: float) -> None:
    """Set a transport for the device type up, with all ranks of the group."""
    try:
        _set_up(comm, op, device, deadline)
    except BaseException:
        if not comm.transports:
            comm.facts = None
        raise
    comm.progress = LOCAL


def _set_up(comm: Communicator, op: str, device: torch.device, deadline: float) -> None:
    cuda.refuse_capture(op, device, "the group is not set up yet; call spar.init(group, device) before")
    cuda.find_libraries()
    if comm.facts is None:
        facts = _all_gather(comm, _C.facts(), "facts", op, device, deadline)
        _choose(comm, facts, device, ())
        comm.check = _C.env("check") != "0"
        comm.synchronous = _C.env("check") == "1"
        comm.own_output = _C.env("output") == "torch"
        comm.facts = facts
        comm.local_ranks = _C.env("local_ranks") or comm.world
        _C.plan_limit(_C.env("plan_cache"))
        _C.threads(torch.get_num_threads(), comm.local_ranks)
        _read_log_setting(comm.rank)
    core: _C.Comm | None = None
    refused: tuple[tuple[str, str], ...] = ()
    while True:
        name, reason, rejected = _choose(comm, comm.facts, device, refused)
        if name == "torch":
            whereabouts.watch(comm)
            break
        core, failure = _connect(comm, name, device, op, deadline)
        if core is not None:
            break
        refused += ((name, failure),)
    _log.info("group %s: transport %s: %s", comm.name, name, reason)
    chosen = Transport(name, reason, device.type, comm.world, rejected)
    comm.transports[device.type] = chosen  # and nothing between that a signal's handler could interrupt
    if core is not None:
        comm.comms[device.type] = core
    if name == "nccl":
        cuda.watch(comm, comm.device)
    elif name == "shm":
        forks.watch()


def _choose(
    comm: Communicator, facts: bytes, device: torch.device, refused: tuple[tuple[str, str], ...]
) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """The transport, by what all ranks know: where none can serve, every rank raises the same error."""
    try:
        return _C.choose(facts, device.type, refused)
    except (ValueError, SparError) as error:
        mark_reported(error)
        comm.progress = OVER
        raise


def _connect(
    comm: Communicator, name: str, device: torch.device, op: str, deadline: float
) -> tuple[_C.Comm | None, str]:
    """A transport of the C core, set up on all ranks; or None on all ranks, and why."""
    assert comm.facts is not None
    place = comm.facts, comm.rank, comm.local_ranks, comm.name
    if device.type == "cuda":
        comm.progress = SHARED  # torch's first collective on the device
        comm.device = cuda.Device(comm, device, op, deadline)
        comm.progress = LOCAL
        core = _C.comm(name, *place, comm.device.index, comm.device.native())
    else:
        core = _C.comm(name, *place)
    comm.connecting = core
    failure = "it raised"
    try:
        verdicts = _all_gather(comm, core.verdict, "opened", op, device, deadline)
        failure = _failure(verdicts, comm.world)
        if not failure:
            comm.progress = SHARED
            core.connect(verdicts, deadline)
            comm.progress = LOCAL
            verdicts = _all_gather(comm, core.verdict, "connected", op, device, deadline)
            failure = _failure(verdicts, comm.world)
    finally:
        comm.connecting = None
        if failure:
            core.close()
    return (None, failure) if failure else (core, "")


def _failure(verdicts: bytes, world: int) -> str:
    """The reason of the first rank that failed in a stage of the set-up; empty: none did."""
    size = len(verdicts) // world
    for rank in range(world):
        failed, reason = struct.unpack_from("=i92s", verdicts, rank * size)
        if failed:
            text: str = reason.rstrip(bytes(1)).decode(errors="replace")
            return text if text.startswith("rank ") else f"rank {rank}: {text}"
    return ""


def _all_gather(
    comm: Communicator, own: bytes, stage: str, op: str, device: torch.device, deadline: float
) -> bytes:
    """Everybody's bytes in one stage of the set-up, to which all ranks must have come."""
    row = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    step = zlib.crc32(f"{stage} {device.type}".encode())
    agree(comm, op, step, lambda: f"sets up its {device.type} transport ({stage})", deadline)
    rows = wire.all_gather(comm, row, op, deadline)
    comm.progress = LOCAL
    return b"".join(bytes(r.tolist()) for r in rows)


def _read_log_setting(rank: int) -> None:
    """SPAR_LOG, and a word about variables that look like a setting and are none."""
    level = _C.env("log")
    _log.setLevel(logging.CRITICAL + 1 if level == "off" else level.upper())
    if not _log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"spar rank {rank} %(levelname)s: %(message)s"))
        _log.addHandler(handler)
        _log.propagate = False
        known = {variable for _, variable, *_ in _C.env_rows()}
        for name in sorted(set(os.environ) - known - _BUILD_SETTINGS):
            if name.startswith("SPAR_"):
                _log.warning("%s is no setting of spar; known: %s", name, ", ".join(sorted(known)))
