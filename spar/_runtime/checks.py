"""Check arguments that are not tensors: each error names the argument, its value and what is expected."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from ..sizes import as_int


def check_int(where: str, name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Return an int, or what has `__index__` (as numpy's integers), as an int; reject bools.

    Raises:
        TypeError: another type.
        ValueError: less than low, or more than high.
    """
    expected = "" if low is None else f"at least {low}" if high is None else f"{low} to {high}"
    try:
        whole = as_int(value)
    except TypeError:
        wanted = f"an int, {expected}" if expected else "an int"
        raise TypeError(f"{where}: {name} is {value!r:.200}; expected {wanted}") from None
    if (low is not None and whole < low) or (high is not None and whole > high):
        raise ValueError(f"{where}: {name} is {whole!r:.200}; expected {expected}")
    return whole


def check_rank(where: str, rank: Any, world_size: Any) -> tuple[int, int]:
    """Return a rank and its world size as ints."""
    size = check_int(where, "world_size", world_size, 1)
    return check_int(f"{where} with world_size {size}", "rank", rank, 0, size - 1), size


def check_type(where: str, name: str, value: Any, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise TypeError for a value of another type."""
    if not isinstance(value, kind):
        raise TypeError(f"{where}: {name} is {value!r:.200}; expected {expected}")


def check_flag(where: str, name: str, value: Any) -> None:
    """Raise TypeError for anything but True and False: the string "false" would count as true."""
    check_type(where, name, value, bool, "True or False")


def check_text(where: str, name: str, value: Any) -> None:
    """Raise TypeError for anything but a str."""
    check_type(where, name, value, str, "a str")


def check_backend(where: str, value: Any, name: str = "backend") -> None:
    """Raise TypeError for a backend that is neither a str nor None."""
    check_type(where, name, value, (str, type(None)), "a str or None")


def check_number(where: str, name: str, value: Any, low: float | None = None) -> None:
    """Raise for anything but a real number (numpy's, too), or for one below `low`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{where}: {name} is {value!r:.200}; expected a number")
    if low is not None and not float(value) >= low:
        raise ValueError(f"{where}: {name} is {value}; expected at least {low:g}")


def check_ints(where: str, name: str, values: Any, low: int) -> list[int]:
    """Return a list or tuple of ints, each at least `low`, as a list."""
    if isinstance(values, Sequence) and not isinstance(values, (str, bytes)):
        return [check_int(where, f"{name}[{i}]", value, low) for i, value in enumerate(values)]
    raise TypeError(f"{where}: {name} is {values!r:.200}; expected a list of ints")


def check_rank_groups(where: str, name: str, groups: Any) -> list[list[int]]:
    """Return a list of lists of ranks; which ranks form a layout is not checked."""
    if isinstance(groups, Sequence) and not isinstance(groups, (str, bytes)):
        return [check_ints(where, f"{name}[{i}]", ranks, 0) for i, ranks in enumerate(groups)]
    raise TypeError(f"{where}: {name} is {groups!r:.200}; expected a list of lists of ranks")
