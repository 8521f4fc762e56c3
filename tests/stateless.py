"""What the tests of groups without global state share: ports, groups of threads, calls at once."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spar.utils import StatelessProcessGroup


def free_port(host: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0), family=family) as server:
            return int(server.getsockname()[1])
    except OSError as error:
        pytest.skip(f"this host has no {host}: {error}")


def is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
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
