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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from . import _C, fallback, wire
from .errors import ExchangeTimeoutError, GroupBrokenError, MismatchError, SparError
from .fallback import SCALE_TYPES, apply_scale, call_text, mismatch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Group = dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str] | str | None

_F = TypeVar("_F", bound=Callable[..., int])
_log = logging.getLogger("spar")
_BUILD_SETTINGS = {"SPAR_WERROR", "SPAR_DEBUG", "SPAR_SANITIZE"}
_handles = itertools.count(1)
_create = threading.Lock()
_calls = dict.fromkeys(_C.transports(), 0)
_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = weakref.WeakKeyDictionary()
_by_handle: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


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


@dataclass(frozen=True)
class Scale:
    """x * factor, or x / factor: never merely the product with the reciprocal, which rounds otherwise."""

    factor: float = 1.0
    divide: bool = False


class Communicator:
    """What spar knows of one process group on this rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.handle = next(_handles)  # never used again in this process
        self.world = group.size()
        self.rank = group.rank()
        self.name = wire.group_name(group)
        self.calls = 0
        self.broken: str | None = None
        self.check = True
        self.timeout: float | None = None
        self._facts: bytes | None = None
        self._transports: dict[str, Transport] = {}
        self._comms: dict[str, _C.Comm] = {}  # of the transports that the C core runs
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
        unknown = Transport(None, "the group has not exchanged anything yet", device, self.world)
        return self._transports.get(device, unknown)

    def set_up(self, op: str, device: torch.device, deadline: float) -> None:
        """Meets the other ranks, once per group, and sets a transport up; collective the first time."""
        if device.type in self._transports:
            return
        if self._facts is None:
            facts = self._all_gather(_C.facts(), op, deadline)
            _C.choose(facts, device.type, ())  # raises, on all ranks, where they disagree
            self.check = _C.env("check") != "0"
            self.own_output = _C.env("output") == "torch"
            self._facts = facts
            _C.plan_limit(int(_C.env("plan_cache")))
            _read_log_setting(self.rank)
        refused: tuple[tuple[str, str], ...] = ()
        while True:
            name, reason, rejected = _C.choose(self._facts, device.type, refused)
            if name == "torch":
                break
            comm, failure = self._connect(name, op, deadline)
            if comm is not None:
                self._comms[device.type] = comm
                break
            refused += ((name, failure),)
        _log.info("group %s: transport %s: %s", self.name, name, reason)
        self._transports[device.type] = Transport(name, reason, device.type, self.world, rejected)

    def _connect(self, name: str, op: str, deadline: float) -> tuple[_C.Comm | None, str]:
        """A transport of the C core, set up on all ranks; or None on all ranks, and why."""
        assert self._facts is not None
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        comm = _C.comm(name, self._facts, self.rank, local_ranks)
        for stage in ("opened", "connected"):
            verdicts = self._all_gather(comm.verdict, op, deadline)
            size = len(verdicts) // self.world
            for rank in range(self.world):
                failed, reason = struct.unpack_from("=i92s", verdicts, rank * size)
                if failed:
                    comm.close()
                    return None, f"rank {rank}: " + reason.rstrip(b"\0").decode(errors="replace")
            if stage == "opened":
                comm.connect(verdicts, int(deadline * 1e9))
        return comm, ""

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
        self, op: str, input_: torch.Tensor, args: tuple[int, ...], scale: Scale, records: bool
    ) -> torch.Tensor:
        """One exchange of one tensor: the output is new, contiguous, and this rank's own."""
        deadline = self.deadline()
        with self._turn(op):
            self.set_up(op, input_.device, deadline)
            self.calls += 1
            comm = self._comms.get(input_.device.type)
            if comm is not None:
                return self._run(comm, op, input_, args, scale, records, deadline)
            tensor = (input_.element_size(), tuple(input_.shape), input_.stride(), args)
            plan = _C.plan(op, self.world, self.rank, _C.SIDE_PULL, (tensor,))
            output = torch.empty(plan.out_shapes[0], dtype=input_.dtype, device=input_.device)
            call = fallback.Call(op, plan, input_, output, scale, records, deadline)
            fallback.run(self, call)
            _calls["torch"] += 1
            return output

    def _run(
        self,
        comm: _C.Comm,
        op: str,
        input_: torch.Tensor,
        args: tuple[int, ...],
        scale: Scale,
        records: bool,
        deadline: float,
    ) -> torch.Tensor:
        """One exchange by a transport of the C core, into memory of its own."""
        dtype = input_.dtype
        kind = SCALE_TYPES.get(dtype, 0) if scale.factor != 1.0 else 0
        try:
            capsule = comm.exchange(
                op,
                (input_.element_size(), tuple(input_.shape), input_.stride(), args),
                input_.data_ptr(),
                kind,
                scale.divide,
                scale.factor,
                call_text(input_, scale, records),
                int(deadline * 1e9),
            )
        except SparError as error:
            raise self._explain(comm, op, error) from None
        _calls[self._transports[input_.device.type].name or ""] += 1
        output: torch.Tensor = torch._C._from_dlpack(capsule)
        if output.dtype != dtype:
            output = output.view(dtype)
        if kind == 0:
            apply_scale(output, scale)
        return output.clone() if self.own_output else output

    def _explain(self, comm: _C.Comm, op: str, error: SparError) -> SparError:
        """An error of the C core with what only this side knows."""
        if isinstance(error, MismatchError) and comm.shown(0) is not None:
            texts = [comm.shown(rank) or "" for rank in range(self.world)]
            return mismatch(self, op, texts)
        text = str(error)
        if isinstance(error, ExchangeTimeoutError):
            text += f" (limit {self.timeout:g} s, SPAR_TIMEOUT)"
        ranks = tuple(int(rank) for rank in re.findall(r"^rank (\d+)", text))
        return type(error)(
            f"{op}, call {self.calls} on group {self.name!r}, rank {self.rank} of {self.world}: {text}",
            **self.where(op),
            ranks=ranks,
        )

    def fail(self, op: str, why: str) -> None:
        """This rank cannot make its next call: the others are told, where there is a way to."""
        if not self._comms:
            return
        with self._turn(op):
            self.calls += 1
            next(iter(self._comms.values())).fail(why, int(self.deadline() * 1e9))

    def close(self) -> None:
        with self._lock:
            for comm in self._comms.values():
                comm.close()
            self._comms.clear()
            self.broken = "it was closed"

    @contextlib.contextmanager
    def _turn(self, op: str) -> Iterator[None]:
        """The group's calls run one at a time; an interrupted one breaks the group."""
        me = threading.get_ident()
        if self._owner == me:  # a signal's handler, say: the call around it could never end
            raise SparError(
                f"{op} on rank {self.rank}: called from inside a call on the same group {self.name!r}"
            )
        with self._lock:
            if self.broken is not None:
                raise GroupBrokenError(
                    f"{op} on rank {self.rank}: group {self.name!r} is broken: {self.broken}",
                    **self.where(op),
                )
            self._owner = me
            try:
                yield
            except Exception:
                raise
            except BaseException:
                self.broken = f"call {self.calls} ({op}) was interrupted on rank {self.rank}"
                raise
            finally:
                self._owner = None


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


def _real(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Under torch.compile a group is a wrapper around it."""
    return getattr(group, "real_obj", group)


def communicator(group: dist.ProcessGroup) -> Communicator:
    """The group's communicator, made at its first use."""
    group = _real(group)
    found = _by_group.get(group)
    if found is None:
        with _create:
            found = _by_group.get(group)
            if found is None:
                found = Communicator(group)
                _by_group[group] = found
                _by_handle[found.handle] = found
    return found


def by_handle(handle: int) -> Communicator:
    """The communicator of a handle; an error where its group is gone."""
    found = _by_handle.get(handle)
    if found is None:
        raise SparError("the process group of this call was destroyed")
    return found


def _constant(function: _F) -> _F:
    """What torch.compiler.assume_constant_result does, without its import of torch._dynamo (1.4 s).

    Under torch.compile the function is evaluated while tracing; its result is a constant of the compiled
    code, which dynamo guards by the identity of the group. A look-up that it traced would not be guarded.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def handle_of(group: dist.ProcessGroup) -> int:
    return communicator(group).handle


@_constant
def world_of(handle: int) -> int:
    return by_handle(handle).world


@_constant
def rank_of(handle: int) -> int:
    return by_handle(handle).rank


def process_group(group: Group) -> dist.ProcessGroup:
    """What a group argument means: a ProcessGroup, a 1-D DeviceMesh, (mesh, dim), a name, or None: WORLD.

    Raises:
        ValueError: torch.distributed is not initialised, the mesh has more dims, the name is not known, or
            this rank is not in the group.
        TypeError: something else was given.
    """
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "process_group is None and torch.distributed is not initialized; "
                "call torch.distributed.init_process_group first, or pass a group"
            )
        return cast(dist.ProcessGroup, dist.group.WORLD)
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, str):
        return _named(group)
    if isinstance(group, tuple):
        mesh, dim = group
        return mesh.get_group(dim)
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"process_group is not a group of this rank: global rank {dist.get_rank()} is not among its ranks"
        )
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(
                f"process_group is a DeviceMesh of {group.ndim} dims {group.mesh_dim_names}; "
                "expected one dim, or (mesh, dim)"
            )
        return group.get_group()
    raise TypeError(
        f"process_group is a {type(group).__name__}; "
        "expected a ProcessGroup, a DeviceMesh, (mesh, dim), a group's name or None"
    )


def _named(name: str) -> dist.ProcessGroup:
    from torch._C._distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(cast(Any, name))
    except (LookupError, RuntimeError) as error:
        raise ValueError(f"process_group names {name!r}, which is no group of this rank") from error


def transport(group: Group = None, device: torch.device | str | None = None) -> Transport:
    """Which transport moves a group's bytes, and why. Never communicates.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, (mesh, dim), a group's name, or None for WORLD.
        device: the tensors' device type; "cpu" by default.

    Returns:
        name (None before the group's first exchange), reason, device, world_size and rejected.
    """
    kind = torch.device(device).type if device is not None else "cpu"
    return communicator(process_group(group)).transport(kind)


def init(group: Group = None, device: torch.device | str | None = None) -> Transport:
    """Meets the other ranks of a group and sets its transport up. Collective.

    Otherwise the group's first exchange does so. Args as of `transport`, whose result it returns.
    """
    comm = communicator(process_group(group))
    kind = torch.device(device if device is not None else "cpu")
    if comm.world > 1:
        with comm._turn("init"):
            comm.set_up("init", kind, comm.deadline())
    return comm.transport(kind.type)


def close(group: Group = None) -> None:
    """Ends spar's use of a group on this rank. Neither waits nor is collective; outputs stay valid.

    Calls of ranks that go on raise GroupBrokenError. When all have closed it, the group can be used anew.
    """
    with _create:
        found = _by_group.pop(_real(process_group(group)), None)
    if found is not None:
        found.close()


def empty_cache() -> None:
    """Gives the shared memory that no output uses back to the system."""
    _C.arena_trim()


def memory_stats() -> dict[str, int]:
    """Counters of this process: arena.*_bytes, staging.*_bytes, plans.* and calls.* (by transport)."""
    arena = ("cap", "reserved", "allocated", "peak", "quarantined", "returned")
    stats = {f"arena.{name}_bytes": n for name, n in zip(arena, _C.arena_stats(), strict=True)}
    stats |= {"staging.cap_bytes": 0, "staging.allocated_bytes": 0}
    stats |= {
        f"plans.{name}": n for name, n in zip(("cached", "hits", "misses"), _C.plan_stats(), strict=True)
    }
    return stats | {f"calls.{name}": _calls.get(name, 0) for name in ("shm", "p2p", "nccl", "torch")}
