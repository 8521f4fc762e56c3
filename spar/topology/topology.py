"""The groups that a process works with, and which of several such sets is the current one.

Three documents spell them differently (the parallel state of seed 003, the coordinators of seed 002, one
sequence group of seed 001). Here they are kept, once; `spar.parallel_state` has the spellings.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import torch.distributed as dist

from . import checkpoint
from .groups_by_name import ParallelState

P = ParamSpec("P")
R = TypeVar("R")

in_use = False  # whether any topology ever had a sequence group; until then None is WORLD
is_set = False  # whether the caller ever set a topology, one of size 1 included
_warned = False
_all: weakref.WeakSet[Topology] = weakref.WeakSet()


class Coordinator(Protocol):
    """What a topology reads of a coordinator: the class is spar.parallel_state.GroupCoordinator."""

    @property
    def group(self) -> dist.ProcessGroup: ...

    def destroy(self) -> None: ...


class Topology:
    """Which ranks share what. `with topology:` makes it the current one, for this thread.

    Every process has one from the start, which is current in all threads that entered no other. The functions
    of `spar.parallel_state` read and write the current one. Entering nests, and the same topology may be
    entered several times, also by several threads at once.

    An operation resolves its group in forward and keeps it for backward. What torch.utils.checkpoint computes
    again runs in the topology of its first run, wherever backward is called, in both of its modes.

    Attributes:
        coordinators: those of seed 002, by name: world, dp, cfg, pp, sp, tp, fs, ep.
        dit: the group of all ranks of the model.
        given: the group that `set_sequence_parallel_group` was given.
        mesh_state: the state that `init_parallel_state` or `take_over_mesh` made.
        sequence: the sequence group: that of the coordinator "sp", else the given one, else the state's cp.
        sequence_state: its ring and ulysses groups.
        state: what `get_parallel_state` returns: mesh_state, else what the other two amount to.
    """

    def __init__(self) -> None:
        self.coordinators: dict[str, Coordinator] = {}
        self.views: dict[str, Coordinator] = {}  # coordinators over groups that other spellings made
        self.dit: dist.ProcessGroup | None = None
        self.given: dist.ProcessGroup | None = None
        self.mesh_state: ParallelState | None = None
        self.sequence: dist.ProcessGroup | None = None
        self.sequence_state: ParallelState | None = None
        self.state: ParallelState | None = None
        _all.add(self)
        if len(_all) > 1:
            checkpoint.bind_recomputation(bind)

    def __enter__(self) -> Topology:
        _entered.outer.append(_entered.topology)
        _entered.topology = self
        return self

    def __exit__(self, *_: object) -> None:
        _entered.topology = _entered.outer.pop()

    def refresh(self) -> None:
        """After a spelling wrote: what the others read."""
        global in_use, is_set
        is_set = True
        self.views = {}
        sp = self.coordinators.get("sp")
        if sp is not None:
            self.sequence_state = ParallelState(groups=self._named())
        elif self.given is not None:
            self.sequence_state = ParallelState(groups={"cp": self.given, "ulysses": self.given})
        else:
            self.sequence_state = self.mesh_state
        self.sequence = None if self.sequence_state is None else self.sequence_state.get_group("cp")
        self.state = self.sequence_state if self.mesh_state is None else self.mesh_state
        in_use = in_use or self.sequence is not None

    def _named(self) -> dict[str, dist.ProcessGroup]:
        """The coordinators' groups by the names of the parallel state."""
        names = {"dp": "dp", "tp": "tp", "ep": "ep", "fs": "dp_shard_cp", "sp": "cp"}
        found = {new: self.coordinators[old].group for old, new in names.items() if old in self.coordinators}
        sp: Any = self.coordinators["sp"]
        return found | {"ulysses": sp.ulysses_group, "ring": sp.ring_group}

    def forget(self) -> None:
        """Lets go of all groups; who made them destroys them."""
        self.coordinators = {}
        self.dit = self.given = self.mesh_state = None
        self.refresh()


class _Entered(threading.local):
    """Of a thread. No ContextVar: torch.compile guards this one."""

    def __init__(self) -> None:
        self.topology: Topology | None = None
        self.outer: list[Topology | None] = []


_entered = _Entered()


def current() -> Topology:
    """The topology that this thread entered last, else the process's own."""
    topology = _entered.topology
    return _default if topology is None else topology


def process_wide() -> Topology:
    """The one that is current where none was entered."""
    return _default


def sequence_group() -> dist.ProcessGroup | None:
    """The current topology's sequence group; None where it has none (size 1)."""
    return current().sequence


def warn_if_unsharded(name: str) -> None:
    """Warn, once per process, that an operation returns its input because no topology was ever set."""
    global _warned
    if _warned or is_set or not (dist.is_initialized() and dist.get_world_size() > 1):
        return
    _warned = True
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "spar":
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{name} returns its input unsharded: torch.distributed has {dist.get_world_size()} ranks, but no "
        "topology was set, so the sequence group has size 1. First call init_parallel_state, take_over_mesh "
        "or set_sequence_parallel_group of spar.parallel_state",
        stacklevel=level,
    )


def forget_all() -> None:
    """Every group of the process is gone."""
    for topology in list(_all):
        topology.forget()


def bind(function: Callable[P, R]) -> Callable[P, R]:
    """The function, called in the topology that is current now, whenever and in whatever thread it runs.

    For what runs later: a thread's work, a hook, a checkpoint that is not torch's.
    """
    if not callable(function):
        raise TypeError(f"bind: function is {function!r:.200}; expected a callable")
    topology = current()

    @functools.wraps(function, updated=())  # a module has more in its __dict__ than a function
    def bound(*args: P.args, **kwargs: P.kwargs) -> R:
        with topology:
            return function(*args, **kwargs)

    return bound


_default = Topology()
