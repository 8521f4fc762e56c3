"""A rank's part in one process group: rendezvous, the choice of transport, the group's calls in order.

State hangs on the ProcessGroup object, weakly; names are reused after destroy and init.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from . import _C, fallback, wire
from .errors import GroupBrokenError, SparError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Group = dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str] | str | None

_F = TypeVar("_F", bound=Callable[..., int])
_log = logging.getLogger("spar")
_BUILD_SETTINGS = {"SPAR_WERROR", "SPAR_DEBUG", "SPAR_SANITIZE"}
_handles = itertools.count(1)
_create = threading.Lock()
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

    def set_up(self, op: str, device: torch.device, deadline: float) -> Transport:
        """Meets the other ranks, once per group, and chooses the transport; collective the first time."""
        known = self._transports.get(device.type)
        if known is not None:
            return known
        if self._facts is None:
            own = torch.frombuffer(bytearray(_C.facts()), dtype=torch.uint8)
            rows = wire.all_gather(self, own, op, deadline)
            facts = b"".join(bytes(row.tolist()) for row in rows)
            _C.choose(facts, device.type)  # raises, on all ranks, where they disagree
            self.check = _C.env("check") != "0"
            self._facts = facts
            _C.plan_limit(int(_C.env("plan_cache")))
            _read_log_setting(self.rank)
        name, reason, rejected = _C.choose(self._facts, device.type)
        chosen = Transport(name, reason, device.type, self.world, rejected)
        _log.info("group %s: transport %s: %s", self.name, name, reason)
        self._transports[device.type] = chosen
        return chosen

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
            tensor = (input_.element_size(), tuple(input_.shape), input_.stride(), args)
            plan = _C.plan(op, self.world, self.rank, _C.SIDE_PULL, (tensor,))
            self.set_up(op, input_.device, deadline)
            self.calls += 1
            output = torch.empty(plan.out_shapes[0], dtype=input_.dtype, device=input_.device)
            fallback.run(self, fallback.Call(op, plan, input_, output, scale, records, deadline))
            return output

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


def communicator(group: dist.ProcessGroup) -> Communicator:
    """The group's communicator, made at its first use."""
    group = getattr(group, "real_obj", group)  # under torch.compile the group is a wrapper around it
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
