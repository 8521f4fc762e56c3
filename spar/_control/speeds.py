# SPDX-License-Identifier: Apache-2.0
"""How fast exchanges and attention are here: a file in the cache folder, of `spar plan --measure`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from pathlib import Path
from typing import NamedTuple

_ROW = struct.Struct("=6d")
BYTES = _ROW.size  # of what a rank sends


class Speeds(NamedTuple):
    """What an attention takes on one rank.

    Attributes:
        work: products of queries and keys, times their width, in a second of forward and backward.
        latency: seconds that an exchange takes whatever its bytes.
        bandwidth: bytes that a rank sends in a second besides.
    """

    work: float
    latency: float
    bandwidth: float

    def step(self, work: float, sent: float, exchanges: int, slices: int = 1, own: float = 0.0) -> float:
        """Return the seconds of forward and backward.

        Args:
            work: of this rank.
            sent: bytes, in so many exchanges.
            slices: into which the heads are cut: all but one are exchanged while the kernel runs.
            own: the part of the work beside which the exchanges are in flight, without slices.
        """
        kernel, moving = work / self.work, sent / self.bandwidth
        hidden = max(min(kernel, moving) * (1 - 1 / slices), min(kernel * own, moving))
        return kernel + moving - hidden + exchanges * slices * self.latency


class Measured(NamedTuple):
    """The speeds of groups on one host, and of those that span hosts; None: not measured."""

    near: Speeds | None = None
    far: Speeds | None = None

    def pack(self) -> bytes:
        """Return what ranks send each other."""
        none = Speeds(0.0, 0.0, 0.0)
        return _ROW.pack(*(self.near or none), *(self.far or none))


def unpack(row: bytes) -> Measured:
    return _of_numbers(_ROW.unpack(row)[:3], _ROW.unpack(row)[3:])


def _of_numbers(*rows: object) -> Measured:
    """Return speeds of three positive numbers each; None for others, as of another version's file."""
    found: list[Speeds | None] = []
    for row in rows:
        numbers = row if isinstance(row, (list, tuple)) else ()
        valid = len(numbers) == 3 and all(isinstance(x, float) and 0 < x < math.inf for x in numbers)
        found.append(Speeds(*numbers) if valid else None)
    return Measured(*found)


def read(device: str) -> Measured:
    """Return what was measured for a device type."""
    found = _contents().get(device)
    return _of_numbers(found.get("near"), found.get("far")) if isinstance(found, dict) else Measured()


def write(device: str, measured: Measured) -> Path:
    """Add what was measured to the file; return its path.

    Raises:
        OSError: it cannot be written, or this user has no cache folder.
    """
    path = _path()
    if path is None:
        raise OSError("neither XDG_CACHE_HOME nor HOME is an absolute path")
    contents = _contents()
    new = {name: list(speeds) for name, speeds in measured._asdict().items() if speeds is not None}
    old = contents.get(device)
    contents[device] = {**(old if isinstance(old, dict) else {}), **new}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(contents, indent=1) + "\n")
    written.replace(path)
    return path


def _path() -> Path | None:
    """As csrc/devices/cuda/cubin_cache.c finds the folder."""
    cache, home = os.environ.get("XDG_CACHE_HOME", ""), os.environ.get("HOME", "")
    if cache.startswith("/"):
        return Path(cache, "spar", "speeds.json")
    return Path(home, ".cache", "spar", "speeds.json") if home.startswith("/") else None


def _contents() -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        path = _path()
        contents = json.loads(path.read_text()) if path is not None else {}
        return contents if isinstance(contents, dict) else {}
    return {}
