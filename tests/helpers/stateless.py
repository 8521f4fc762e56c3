"""What the tests of groups without global state share: ports, groups of threads, calls at once."""

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
    """A port below those that the kernel hands out, which would go to the next socket of any process."""
    if not is_free(host, 0):
        pytest.skip(f"this machine has no {host}")
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = (random.SystemRandom().randrange(first // 2, first) for _ in range(1000))
    return next(port for port in ports if is_free(host, port))


@contextlib.contextmanager
def taken(host: str, port: int) -> Iterator[None]:
    """The port of that host is nobody else's meanwhile, and nobody listens there."""
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
    """A group whose ranks are all here, made by threads: for what needs no second process."""
    port = free_port()
    with ThreadPoolExecutor(world) as threads:
        made = [
            threads.submit(StatelessProcessGroup.create, "127.0.0.1", port, rank, world, **settings)
            for rank in range(world)
        ]
        return [future.result() for future in made]


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each call returns or raises, where they wait for one another."""

    def caught(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(caught, calls))
