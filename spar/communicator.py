"""A rank's part in one process group: rendezvous, the choice of transport, the group's calls in order.

State hangs on the ProcessGroup object, weakly; names are reused after destroy and init.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from . import _C, cuda, fallback, whereabouts, wire
from .errors import ExchangeTimeoutError, GroupBrokenError, MismatchError, SparError
from .fallback import SCALE_TYPES, apply_scale, call_text, mismatch

CALLS = dict.fromkeys(_C.transports(), 0)  # by each transport, in this process
_log = logging.getLogger("spar")
_BUILD_SETTINGS = {"SPAR_WERROR", "SPAR_DEBUG", "SPAR_SANITIZE"}
_handles = itertools.count(1)


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


class Place(NamedTuple):
    """Where a call is made: whole numbers, which a compiled function may keep."""

    handle: int  # the communicator's; never used again in this process
    world: int
    rank: int


ALONE = Place(0, 1, 0)  # without a group


class Communicator:
    """What spar knows of one process group on this rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.when_gone: weakref.finalize[[int, int], dist.ProcessGroup] | None = None  # forgets it
        self.world = group.size()
        self.rank = group.rank()
        self.place = Place(next(_handles), self.world, self.rank)
        self.name = wire.group_name(group)
        self.calls = 0
        self.broken: str | None = None
        self.check = True
        self.synchronous = False  # the nccl transport's comparisons
        self.timeout: float | None = None
        self._facts: bytes | None = None
        self._transports: dict[str, Transport] = {}
        self._comms: dict[str, _C.Comm] = {}  # by device, of the transports that the C core runs
        self._device: cuda.Device  # set up with the nccl transport
        self.own_output = False
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread whose call it is

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise SparError(f"process group {self.name!r} was destroyed", group=self.name, rank=self.rank)
        return group

    def where(self, op: str) -> dict[str, Any]:
        """The details that spar's errors carry."""
        return {"op": op, "group": self.name, "call": self.calls, "rank": self.rank}

    def transport(self, device: str) -> Transport:
        """The transport for a device type, as far as it is known; never communicates."""
        if self.world == 1:
            return Transport(None, "a group of one exchanges nothing", device, 1)
        known = self._transports.get(device)
        if known is not None:
            return known
        reason = "the group has not exchanged anything yet"
        return Transport(None, reason, device, self.world, self._rejected(device))

    def _rejected(self, device: str) -> tuple[tuple[str, str], ...]:
        """What is known not to serve CUDA tensors, before the other ranks are met by this rank alone."""
        if device != "cuda":
            return ()
        cuda.find_libraries()
        own = _C.facts() * self.world if self._facts is None else self._facts
        try:
            rejected = _C.choose(own, device, ())[2]
        except (ValueError, SparError):  # settings that the first exchange will tell of
            return ()
        if self._facts is None:
            return tuple((name, re.sub(r"^rank 0\b", f"rank {self.rank}", why)) for name, why in rejected)
        return rejected

    def set_up(self, op: str, device: torch.device, deadline: float) -> None:
        """Meets the other ranks, once per group, and sets a transport up; collective the first time."""
        if device.type in self._transports:
            return
        cuda.refuse_capture(op, device, "the group is not set up yet; call spar.init(group, device) before")
        cuda.find_libraries()
        if self._facts is None:
            facts = self._all_gather(_C.facts(), op, deadline)
            _C.choose(facts, device.type, ())  # raises, on all ranks, where they disagree
            self.check = _C.env("check") != "0"
            self.synchronous = _C.env("check") == "1"
            self.own_output = _C.env("output") == "torch"
            self._facts = facts
            _C.plan_limit(int(_C.env("plan_cache")))
            _C.threads(torch.get_num_threads(), self._local_ranks())
            _read_log_setting(self.rank)
        refused: tuple[tuple[str, str], ...] = ()
        while True:
            name, reason, rejected = _C.choose(self._facts, device.type, refused)
            if name == "torch":
                whereabouts.watch(self)
                break
            comm, failure = self._connect(name, device, op, deadline)
            if comm is not None:
                self._comms[device.type] = comm
                if device.type == "cuda":
                    cuda.watch(self, self._device)
                break
            refused += ((name, failure),)
        _log.info("group %s: transport %s: %s", self.name, name, reason)
        self._transports[device.type] = Transport(name, reason, device.type, self.world, rejected)

    def _connect(
        self, name: str, device: torch.device, op: str, deadline: float
    ) -> tuple[_C.Comm | None, str]:
        """A transport of the C core, set up on all ranks; or None on all ranks, and why."""
        assert self._facts is not None
        place = (self._facts, self.rank, self._local_ranks(), self.name)
        if device.type == "cuda":
            self._device = cuda.Device(self, device, op, deadline)
            comm = _C.comm(name, *place, self._device.index, self._device.native())
        else:
            comm = _C.comm(name, *place)
        for stage in ("opened", "connected"):
            verdicts = self._all_gather(comm.verdict, op, deadline)
            size = len(verdicts) // self.world
            for rank in range(self.world):
                failed, reason = struct.unpack_from("=i92s", verdicts, rank * size)
                if failed:
                    comm.close()
                    return None, f"rank {rank}: " + reason.rstrip(b"\0").decode(errors="replace")
            if stage == "opened":
                comm.connect(verdicts, deadline)
        return comm, ""

    def processes(self) -> list[tuple[int, int]]:
        """(id, nonce) of each rank's process; empty before the set-up, or where some are not known."""
        found = _C.processes(self._facts) if self._facts is not None else []
        return found if all(process for process, _ in found) else []

    def _local_ranks(self) -> int:
        """Ranks of all groups on this host, as far as the launcher says."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world))

    def _all_gather(self, own: bytes, op: str, deadline: float) -> bytes:
        row = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        return b"".join(bytes(r.tolist()) for r in wire.all_gather(self, row, op, deadline))

    def deadline(self) -> float:
        """When a call that is entered now must have ended (time.monotonic)."""
        if self.timeout is None:
            seconds = ""
            with contextlib.suppress(ValueError):  # a wrong value is told at the set-up, to all ranks
                seconds = _C.env("timeout")
            self.timeout = float(seconds) if seconds else wire.group_timeout(self.group)
        return time.monotonic() + self.timeout

    def exchange(
        self,
        op: str,
        input_: torch.Tensor,
        args: tuple[int, ...],
        scale: tuple[float, bool],
        records: bool,
    ) -> torch.Tensor:
        """One exchange of one tensor: the output is new, contiguous, and this rank's own."""
        deadline = self.deadline()
        thread = self._enter(op)
        with self._lock:  # Python looks for signals after it, and not before its release is sure
            try:
                self._owner = thread
                if self.broken is not None:
                    self._refuse(op)
                return self._exchange(op, input_, args, scale, records, deadline)
            except BaseException as error:
                self._note(op, error)
                raise
            finally:
                self._owner = None

    def _exchange(
        self,
        op: str,
        input_: torch.Tensor,
        args: tuple[int, ...],
        scale: tuple[float, bool],
        records: bool,
        deadline: float,
    ) -> torch.Tensor:
        factor, divide = scale
        device = "cpu" if input_.is_cpu else input_.device.type
        comm = self._comms.get(device)
        if comm is None and device not in self._transports:
            self.set_up(op, input_.device, deadline)
            comm = self._comms.get(device)
        self.calls += 1
        text = call_text(input_.dtype, device, factor, divide, records)
        tensor = (input_.element_size(), input_.shape, input_.stride(), args)
        if comm is None or device == "cuda":
            try:
                if comm is not None:
                    cuda.check_place(self, self._device, input_, op)
                plan = _C.plan(op, self.world, self.rank, _C.SIDE_PULL, (tensor,))
                output = torch.empty(plan.out_shapes[0], dtype=input_.dtype, device=input_.device)
            except Exception as error:
                if comm is not None:  # the others, if this one's is the only failure, shall not wait
                    with contextlib.suppress(SparError):
                        comm.fail(op, f"{type(error).__name__}: {error}", False, deadline)
                raise
            self._run(comm, fallback.Call(op, plan, input_, output, factor, divide, text, deadline))
            return output
        kind = SCALE_TYPES.get(input_.dtype, 0)
        try:
            capsule = comm.exchange(op, tensor, input_.data_ptr(), kind, divide, factor, text, deadline)
        except SparError as error:
            raise self._explain(comm, op, error) from None
        CALLS[comm.transport] += 1
        output = torch._C._from_dlpack(capsule)
        if kind == 0:  # the core knows its size alone
            if output.dtype != input_.dtype:
                output = output.view(input_.dtype)
            apply_scale(output, factor, divide)
        return output.clone() if self.own_output else output

    def _run(self, comm: _C.Comm | None, call: fallback.Call) -> None:
        """A call whose output is torch's."""
        if comm is None:
            cuda.refuse_capture(call.op, call.input.device, "the torch transport waits for the device")
            fallback.run(self, call)
            CALLS["torch"] += 1
            return
        try:
            cuda.exchange(self, comm, self._device, call)
        except SparError as error:
            raise error if error.op is not None else self._explain(comm, call.op, error) from None
        CALLS[comm.transport] += 1

    def _explain(self, comm: _C.Comm, op: str, error: SparError) -> SparError:
        """An error of the C core with what only this side knows."""
        if isinstance(error, MismatchError) and comm.shown(0) is not None:
            texts = [comm.shown(rank) or "" for rank in range(self.world)]
            return mismatch(self, op, texts)
        text, rows = str(error), ""
        if isinstance(error, ExchangeTimeoutError):
            text += f" (limit {self.timeout:g} s, SPAR_TIMEOUT)"
            places = [comm.where(rank) or "" for rank in range(self.world)]
            rows = whereabouts.listing(places) if all(places) else ""
        ranks = re.findall(r"^rank (\d+)|rank (\d+) \(process", text)
        return type(error)(
            f"{op}, call {self.calls} on group {self.name!r}, rank {self.rank} of {self.world}: {text}{rows}",
            **self.where(op),
            ranks=tuple(int(first or other) for first, other in ranks),
        )

    def fail(self, op: str, device: str, why: str) -> None:
        """This rank cannot make its next call: the others are told, where there is a way to."""
        if device not in self._comms:
            return
        with self.turn(op):
            self.calls += 1
            self._comms[device].fail(op, why, False, self.deadline())

    def abort_if_broken(self) -> bool:
        """Ends what hangs in torch's communicator; whether there is nothing to look at any more."""
        comm = self._comms.get("cuda")
        if comm is not None and comm.broken is None:
            return False
        if comm is not None:
            self._device.abort()
        return True

    def close(self) -> None:
        with self._lock:
            for comm in self._comms.values():
                comm.close()
            self._comms.clear()
            self.broken = "it was closed"

    def _enter(self, op: str) -> int:
        """The thread that asks for a turn. A call from inside a call on the same group, by a signal handler,
        say, is refused: the one around it could never end."""
        thread = threading.get_ident()
        if self._owner == thread:
            raise SparError(
                f"{op} on rank {self.rank}: called from inside a call on the same group {self.name!r}"
            )
        return thread

    def _refuse(self, op: str) -> NoReturn:
        raise GroupBrokenError(
            f"{op} on rank {self.rank}: group {self.name!r} is broken: {self.broken}",
            **self.where(op),
        )

    @contextlib.contextmanager
    def turn(self, op: str) -> Iterator[None]:
        """Around what is no exchange, but has a place in the group's order: its calls run one at a time."""
        thread = self._enter(op)
        with self._lock:
            try:
                self._owner = thread
                if self.broken is not None:
                    self._refuse(op)
                yield
            except BaseException as error:
                self._note(op, error)
                raise
            finally:
                self._owner = None

    def _note(self, op: str, error: BaseException) -> None:
        """An interrupted call breaks the group, on all ranks that can be told."""
        if isinstance(error, Exception):
            return
        self.broken = f"call {self.calls} ({op}) was interrupted on rank {self.rank}"
        for comm in self._comms.values():
            comm.fail(op, self.broken, True, time.monotonic())


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
