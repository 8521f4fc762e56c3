# SPDX-License-Identifier: Apache-2.0
"""Ranks on several hosts, which are network namespaces of this machine (benchmarks/namespaces.py)."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks

import spar
from helpers.processes import start as start_processes

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import namespaces
from namespaces import Network

Shape = Sequence[int]  # the number of ranks of each host
SHAPES = {"2 + 2": (2, 2), "3 + 1": (3, 1)}  # most tests run on both
WORLD = 4


@functools.cache
def unavailable() -> str:
    return namespaces.unavailable()


class Hosts(Network):
    """Hosts that have these numbers of ranks, numbered from the first host on; skips where root is needed.

    As `with Hosts((2, 2)) as hosts:`; `cut` and `restore` change the link of a host.
    """

    def __init__(self, ranks: Shape) -> None:
        if reason := unavailable():
            pytest.skip(reason)
        super().__init__(len(ranks))
        self.ranks = tuple(ranks)
        self._port = 29500

    @property
    def world(self) -> int:
        return sum(self.ranks)

    def ranks_of(self, host: int) -> list[int]:
        first = sum(self.ranks[:host])
        return list(range(first, first + self.ranks[host]))

    def host_of(self, rank: int) -> int:
        return next(host for host in range(len(self.ranks)) if rank in self.ranks_of(host))

    def entering(self, rank: int, **environment: str) -> Callable[[], None]:
        """Return what a rank's process does first: enter its host, and set torchrun's variables."""
        host = self.host_of(rank)
        place = {
            "RANK": rank,
            "WORLD_SIZE": self.world,
            "LOCAL_RANK": self.ranks_of(host).index(rank),
            "LOCAL_WORLD_SIZE": self.ranks[host],
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": self._port,
            "GLOO_SOCKET_IFNAME": namespaces.INTERFACE,
        }
        variables = {**{name: str(value) for name, value in place.items()}, **environment}
        return functools.partial(_enter, self.path(host), variables)

    def start(
        self,
        function: Callable[..., Any],
        folder: Path,
        *args: Any,
        set_up: bool = True,
        **environment: str,
    ) -> list[Any]:
        """Run function(rank, folder, *args) on all hosts; `set_up`: after a first exchange on WORLD.

        Returns:
            the processes, for `finish` of test_faults.
        """
        entering = [self.entering(rank, **environment) for rank in range(self.world)]
        self._port += 1  # of the next job, if ranks of this one still hold it
        return start_processes(_run, self.world, folder, entering, set_up, function, args, initialize=False)


def _enter(namespace: str, variables: dict[str, str]) -> None:
    namespaces.enter(namespace)
    os.environ.update(variables)


def _run(
    rank: int,
    folder: Path,
    entering: Sequence[Callable[[], None]],
    set_up: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    entering[rank]()
    dist.init_process_group("gloo")  # by a TCPStore on the first host
    if set_up:
        spar.all_gather(torch.zeros(1))
    function(rank, folder, *args)


def pool_of(shape: str) -> Iterator[Ranks]:
    """Yield four ranks on two hosts, which the tests of a module share. spar chooses their transport."""
    with Hosts(SHAPES[shape]) as hosts:
        pool = Ranks((WORLD,), entering=[hosts.entering(rank) for rank in range(WORLD)])
        pool.transport = ""
        yield pool
        pool.stop()


def group_with(limit: float) -> dist.ProcessGroup:
    """Return a new group of all ranks, after its first call, whose calls time out after `limit` seconds."""
    group = dist.new_group(list(range(WORLD)))
    os.environ["SPAR_TIMEOUT"] = str(limit)
    spar.all_gather(torch.zeros(1), group)
    del os.environ["SPAR_TIMEOUT"]
    dist.barrier()
    return group
