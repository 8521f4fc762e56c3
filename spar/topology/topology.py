# SPDX-License-Identifier: Apache-2.0
"""Topologies: the process groups of this process, and which set of them is current.

A topology stores each group once. Three APIs in `spar.parallel_state` read and write it: MindSpeed-MM's
parallel state, vLLM-Omni's coordinators and LightRFT's single sequence group.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import torch.distributed as dist

from .._deprecated import outside_level
from . import checkpoint
from .groups_by_name import ParallelState

P = ParamSpec("P")
R = TypeVar("R")

in_use = False  # whether any topology ever had a sequence group; until then group=None means WORLD
_warned = False
_all: weakref.WeakSet[Topology] = weakref.WeakSet()


class Coordinator(Protocol):
    """The part of spar.parallel_state.GroupCoordinator that a topology uses."""

    @property
    def group(self) -> dist.ProcessGroup: ...

    def destroy(self) -> None: ...


class Topology:
    """A set of process groups by role. `with topology:` makes it current in this thread.

    Each process starts with a default topology, current in every thread that has not entered another. The
    functions of `spar.parallel_state` read and write the current topology. `with` blocks nest, and several
    threads may enter the same topology at once.

    An operation resolves its group in forward and keeps it for backward. torch.utils.checkpoint recomputes in
    the topology of the original forward, in both of its modes, wherever backward is called.

    Attributes:
        coordinators: vLLM-Omni's coordinators by name: world, dp, cfg, pp, sp, tp, fs, ep.
        dit: the group of all ranks of the model.
        given: the group passed to `set_sequence_parallel_group`.
        mesh_state: the state made by `init_parallel_state` or `take_over_mesh`.
        sequence: the sequence group: that of the coordinator "sp", else `given`, else cp of `mesh_state`.
        sequence_state: the ring and ulysses groups of `sequence`.
        state: what `get_parallel_state` returns: `mesh_state`, else `sequence_state`.
        is_alone: whether `set_sequence_parallel_group(None)` chose a size of 1.
    """

    def __init__(self) -> None:
        self.coordinators: dict[str, Coordinator] = {}
        self.views: dict[str, Coordinator] = {}  # coordinators over groups that another API made
        self.dit: dist.ProcessGroup | None = None
        self.given: dist.ProcessGroup | None = None
        self.mesh_state: ParallelState | None = None
        self.sequence: dist.ProcessGroup | None = None
        self.sequence_state: ParallelState | None = None
        self.state: ParallelState | None = None
        self.is_alone = False
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
        """Recompute the derived attributes after one API wrote to this topology."""
        global in_use
        self.views = {}
        sp = self.coordinators.get("sp")
        if sp is not None:
            self.sequence_state = ParallelState(groups=self._groups_by_name(), cp_neighbours="ulysses")
        elif self.given is not None:
            self.sequence_state = ParallelState(groups={"cp": self.given, "ulysses": self.given})
        else:
            self.sequence_state = self.mesh_state
        self.sequence = None if self.sequence_state is None else self.sequence_state.get_group("cp")
        self.state = self.sequence_state if self.mesh_state is None else self.mesh_state
        in_use = in_use or self.sequence is not None

    def _groups_by_name(self) -> dict[str, dist.ProcessGroup]:
        """Return the coordinators' groups under the parallel state's names."""
        names = {"dp": "dp", "tp": "tp", "ep": "ep", "fs": "dp_shard_cp", "sp": "cp"}
        groups = {new: self.coordinators[old].group for old, new in names.items() if old in self.coordinators}
        sp: Any = self.coordinators["sp"]
        return groups | {"ulysses": sp.ulysses_group, "ring": sp.ring_group}

    def forget(self) -> None:
        """Drop all groups without destroying them; that is up to their creator."""
        self.coordinators = {}
        self.dit = self.given = self.mesh_state = None
        self.is_alone = False
        self.refresh()


class _Entered(threading.local):
    """The topologies that this thread has entered. Not a ContextVar: torch.compile guards thread-locals."""

    def __init__(self) -> None:
        self.topology: Topology | None = None
        self.outer: list[Topology | None] = []


_entered = _Entered()


def current() -> Topology:
    """Return the topology that this thread entered last, else the process's default."""
    topology = _entered.topology
    return _default if topology is None else topology


def process_wide() -> Topology:
    """Return the process's default topology, current in threads that entered none."""
    return _default


def sequence_group() -> dist.ProcessGroup | None:
    """Return the current topology's sequence group, or None if it has none (size 1)."""
    return current().sequence


def warn_if_unsharded(name: str) -> None:
    """Warn once per process that `name` returns its input although there are several ranks.

    Each operation calls this that goes by the current topology, where it finds no group. A topology with a
    group of size 1, or one in which the caller set none, is not the caller's oversight.
    """
    global _warned
    topology = current()
    if _warned or topology.state is not None or topology.is_alone:
        return
    if dist.is_initialized():
        ranks, where = dist.get_world_size(), "torch.distributed has {} ranks"
    else:  # started by torchrun, as a script that forgets init_process_group is
        ranks = int(size) if (size := os.environ.get("WORLD_SIZE", "")).isdecimal() else 1
        where = "WORLD_SIZE is {} and torch.distributed is not initialized"
    if ranks < 2:
        return
    _warned = True
    warnings.warn(
        f"{name} returns its input unsharded: {where.format(ranks)}, but the current topology has no "
        "sequence group, so its size is 1; call init_parallel_state, take_over_mesh or "
        "set_sequence_parallel_group of spar.parallel_state first",
        stacklevel=outside_level(),
    )


def forget_all() -> None:
    """Drop the groups of every topology, after torch.distributed destroyed them."""
    for topology in list(_all):
        topology.forget()


def bind(function: Callable[P, R]) -> Callable[P, R]:
    """Bind a function to the current topology: it runs in this topology whenever and in whichever thread.

    Use it for code that runs later: a thread's target, a hook, or a checkpoint that is not torch's.

    Raises:
        TypeError: `function` is not callable.
    """
    if not callable(function):
        raise TypeError(f"bind: function is {function!r:.200}; expected a callable")
    topology = current()

    @functools.wraps(function, updated=())  # a Module's __dict__ is not to be copied
    def bound(*args: P.args, **kwargs: P.kwargs) -> R:
        with topology:
            return function(*args, **kwargs)

    return bound


_default = Topology()
