# SPDX-License-Identifier: Apache-2.0
"""Helpers for groups without global state: free ports, groups of threads, concurrent calls."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spar.utils import StatelessProcessGroup


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port below the ephemeral range, from which any process may get the next one."""
    if not is_free(host, 0):
        pytest.skip(f"this machine has no {host}")
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = (random.SystemRandom().randrange(first // 2, first) for _ in range(1000))
    return next(port for port in ports if is_free(host, port))


@contextlib.contextmanager
def reserved(host: str, port: int) -> Iterator[None]:
    """Reserve a port of that host, without listening, for the duration of the block."""
    with socket.socket(family_of(host)) as held:
        held.bind((host, port))
        yield


def is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port), family=family_of(host)).close()
    except OSError:
        return False
    return True


def answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2):
        return True
    return False


def groups(world: int = 2, **settings: Any) -> list[StatelessProcessGroup]:
    """Create a group whose ranks are threads of this process; return one object per rank."""
    port = free_port()
    with ThreadPoolExecutor(world) as threads:
        made = [
            threads.submit(StatelessProcessGroup.create, "127.0.0.1", port, rank, world, **settings)
            for rank in range(world)
        ]
        return [future.result() for future in made]


def concurrently(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run calls that wait for each other; return what each returns or raises."""

    def caught(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(caught, calls))
