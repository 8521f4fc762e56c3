# SPDX-License-Identifier: Apache-2.0
"""Which random numbers a forward drew: ranks that draw from other states train another model silently.

A generator is seen to draw by its state alone, whatever function drew.
"""

from __future__ import annotations

import ctypes
import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .._transports.cuda import is_capturing

CODE, TORCH, _RANDOM, _NUMPY = range(4)  # the fields of csrc/plan/place.h
# Python's generator has its state behind what each object has: `getstate` takes 20 times as long.
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
_HEAD = object.__basicsize__
_PYTHON_BYTES = random.Random.__base__.__basicsize__ - _HEAD  # type: ignore[union-attr]


class States(NamedTuple):
    """What generators held at a time: equal while nothing draws."""

    cpu: bytes
    device: bytes
    python: bytes
    numpy: bytes


def states(device: torch.device) -> States:
    """Return the states of this process's default generators."""
    cpu = torch.default_generator.get_state()
    python = ctypes.string_at(id(_PYTHON) + _HEAD, _PYTHON_BYTES)
    return States(_bytes(cpu), _on_device(device), python, _of_numpy())


def draws_since(before: States, device: torch.device) -> list[tuple[int, int]]:
    """Return the fields of a place, and hashes, of those generators that have drawn since.

    Equal states that drew as many numbers are equal, and others are not.
    """
    now = states(device)
    found = [(TORCH, now.cpu + now.device)] if now[:2] != before[:2] else []
    if now.python != before.python:
        found.append((_RANDOM, now.python))
    if now.numpy != before.numpy and before.numpy:  # NumPy was imported before.
        found.append((_NUMPY, now.numpy))
    return [(field, zlib.crc32(state)) for field, state in found]


@contextmanager
def restored(device: torch.device) -> Iterator[None]:
    """Set the default generators back at the end."""
    kind = None if device.type in ("cpu", "meta") else device.type
    with torch.random.fork_rng([device] if kind else [], device_type=kind or "cuda"), others_restored():
        yield


@contextmanager
def others_restored() -> Iterator[None]:
    """Set the generators of Python and NumPy back at the end."""
    numpy: Any = sys.modules.get("numpy.random")
    of_python, of_numpy = random.getstate(), numpy and numpy.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        if numpy:
            numpy.set_state(of_numpy)


def states_of(kwargs: dict[str, Any]) -> list[int]:
    """Return hashes of the states of generators that a call gets."""
    found = [x for x in kwargs.values() if isinstance(x, torch.Generator) and not is_capturing(x.device)]
    return [zlib.crc32(_bytes(x.get_state())) for x in found]


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _on_device(device: torch.device) -> bytes:
    if device.type in ("cpu", "meta") or is_capturing(device):  # a graph cannot read its generator
        return b""
    return _bytes(torch.get_device_module(device).get_rng_state(device))


def _of_numpy() -> bytes:
    """Return the memory of numpy's global generator, where it is of the usual kind."""
    numpy: Any = sys.modules.get("numpy.random")
    source = numpy and numpy.mtrand._rand._bit_generator
    if type(source).__name__ != "MT19937":
        return b""
    return ctypes.string_at(source.ctypes.state_address, 4 * 624 + 4)
