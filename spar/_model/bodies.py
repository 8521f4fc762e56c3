# SPDX-License-Identifier: Apache-2.0
"""Functions of torch that are written in Python: they run by the rules of what they call, or call others."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

_COLLECTIVES = "torch.distributed.distributed_c10d"
_MODULES = ("torch.nn.functional", _COLLECTIVES)
_bodies: dict[Any, Any] = {}
_copies: dict[Any, Any] = {}


def is_collective(func: Any) -> bool:
    """Whether a function is one of torch.distributed."""
    return getattr(func, "__module__", None) == _COLLECTIVES


def has_body(func: Any) -> bool:
    """Whether `body_of` returns one."""
    own = inspect.unwrap(func) if is_collective(func) else func
    return isinstance(own, types.FunctionType) and own.__globals__.get("__name__") in _MODULES


def body_of(func: Any) -> Any:
    """Return a function of torch that is written in Python, such that it runs by the rules of what it calls.

    Such a function asks first whether a mode is active, and would come here again; the copy does not ask.
    """
    if func in _bodies:
        return _bodies[func]
    body = None
    if has_body(func):
        own = inspect.unwrap(func) if is_collective(func) else func
        scope = own.__globals__
        asks = {name: _never for name in scope if name.startswith("has_torch_function")}
        body = types.FunctionType(
            own.__code__, {**scope, **asks}, own.__name__, own.__defaults__, own.__closure__
        )
        body.__kwdefaults__ = own.__kwdefaults__
    _bodies[func] = body
    return body


def _never(*_: Any) -> bool:
    return False


@contextlib.contextmanager
def redirected(function: Any, make: Callable[[Any], Any]) -> Iterator[None]:
    """Let a function call another one, which `make` returns for a copy of it.

    It is its code that changes: code that imported the function by its name calls the other one, too.
    """
    name = f"_spar_{function.__name__}"
    if function not in _copies:
        copy = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        made: dict[str, Any] = {}
        exec(f"def call(*args, **kwargs): return {name}(*args, **kwargs)", made)
        _copies[function] = copy, made["call"].__code__
    copy, calling = _copies[function]
    own, function.__globals__[name] = function.__code__, make(copy)
    function.__code__ = calling
    try:
        yield
    finally:
        function.__code__ = own  # the name stays: another thread may be in the code that reads it
