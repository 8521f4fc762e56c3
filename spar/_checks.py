# SPDX-License-Identifier: Apache-2.0
"""Check arguments that are not tensors. Each error names the argument, its value and the requirement."""

from __future__ import annotations

import ctypes
import hashlib
import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from .sizes import as_int


def check_int(caller: str, name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Return `value` as an int. Accepts any type with `__index__`, such as numpy ints; rejects bools.

    Raises:
        TypeError: `value` is not an int.
        ValueError: `value` is below `low` or above `high`.
    """
    expected = "" if low is None else f"at least {low}" if high is None else f"{low} to {high}"
    try:
        number = as_int(value)
    except TypeError:
        required = f"an int, {expected}" if expected else "an int"
        raise TypeError(f"{caller}: {name} is {value!r:.200}; expected {required}") from None
    if (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(f"{caller}: {name} is {number!r:.200}; expected {expected}")
    return number


def check_rank(caller: str, rank: Any, world_size: Any) -> tuple[int, int]:
    """Return `(rank, world_size)` as ints; 0 <= rank < world_size."""
    size = check_int(caller, "world_size", world_size, 1)
    return check_int(f"{caller} with world_size {size}", "rank", rank, 0, size - 1), size


def check_type(caller: str, name: str, value: Any, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise TypeError unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{caller}: {name} is {value!r:.200}; expected {expected}")


def check_bool(caller: str, name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a bool: the string "false" would be truthy."""
    check_type(caller, name, value, bool, "a bool")


def check_str(caller: str, name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a str."""
    check_type(caller, name, value, str, "a str")


def check_backend(caller: str, value: Any, name: str = "backend") -> None:
    """Raise TypeError unless `value` is a str or None."""
    check_type(caller, name, value, (str, type(None)), "a str or None")


def check_number(caller: str, name: str, value: Any, low: float | None = None) -> None:
    """Check that `value` is a finite real number (numpy's included) of at least `low`.

    Raises:
        TypeError: `value` is not a real number.
        ValueError: `value` is below `low`, NaN, infinite, or an int beyond a float's range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{caller}: {name} is {value!r:.200}; expected a number")
    expected = "a finite number" if low is None else f"at least {low:g}, and finite"
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{caller}: {name} is an int beyond a float's range; expected {expected}") from None
    if not (-math.inf if low is None else low) <= number < math.inf:
        raise ValueError(f"{caller}: {name} is {value}; expected {expected}")


def check_ints(caller: str, name: str, values: Any, low: int) -> list[int]:
    """Return a sequence of ints, each at least `low`, as a list."""
    if isinstance(values, Sequence) and not isinstance(values, (str, bytes)):
        return [check_int(caller, f"{name}[{i}]", value, low) for i, value in enumerate(values)]
    raise TypeError(f"{caller}: {name} is {values!r:.200}; expected a list of ints")


def check_lengths(caller: str, name: str, values: Any) -> list[int]:
    """Return lengths, also those of a tensor, as a list; each is at least 0, and their sum below 2^63."""
    lengths = check_ints(caller, name, values.tolist() if isinstance(values, torch.Tensor) else values, 0)
    check_sum(caller, name, lengths)
    return lengths


def check_sum(caller: str, name: str, values: Sequence[int]) -> None:
    """Raise ValueError unless ints sum to less than 2^63. In compiled code sums are not known."""
    if not torch.compiler.is_compiling() and sum(values) >= 2**63:
        raise ValueError(f"{caller}: {name} sum to {sum(values)}; expected a sum below 2^63")


def check_rank_groups(caller: str, name: str, groups: Any) -> list[list[int]]:
    """Return a sequence of sequences of ranks as lists. Does not check that they form a valid layout."""
    if isinstance(groups, Sequence) and not isinstance(groups, (str, bytes)):
        return [check_ints(caller, f"{name}[{i}]", ranks, 0) for i, ranks in enumerate(groups)]
    raise TypeError(f"{caller}: {name} is {groups!r:.200}; expected a list of lists of ranks")


def digest(value: Any) -> int:
    """Return 63 bits of a tensor's dtype, shape and bytes, or of another value's text."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        hasher = hashlib.blake2b(f"{data.dtype}{list(data.shape)}".encode(), digest_size=8)
        if data.numel():  # its memory, as torch needs NumPy for a view of it
            hasher.update((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))
    else:
        hasher = hashlib.blake2b(repr(value).encode(), digest_size=8)
    return int.from_bytes(hasher.digest(), "little") >> 1
