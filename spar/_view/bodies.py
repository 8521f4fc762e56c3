# SPDX-License-Identifier: Apache-2.0
"""Functions of torch that are written in Python: they run by the rules of what they call."""

from __future__ import annotations

import types
from typing import Any

_bodies: dict[Any, Any] = {}


def has_body(func: Any) -> bool:
    """Whether `body_of` returns one."""
    return isinstance(func, types.FunctionType) and func.__globals__.get("__name__") == "torch.nn.functional"


def body_of(func: Any) -> Any:
    """Return a function of torch that is written in Python, such that it runs by the rules of what it calls.

    Such a function asks first whether a mode is active, and would come here again; the copy does not ask.
    """
    if func in _bodies:
        return _bodies[func]
    body = None
    if has_body(func):
        scope = func.__globals__
        asks = {name: _never for name in scope if name.startswith("has_torch_function")}
        body = types.FunctionType(
            func.__code__, {**scope, **asks}, func.__name__, func.__defaults__, func.__closure__
        )
        body.__kwdefaults__ = func.__kwdefaults__
    _bodies[func] = body
    return body


def _never(*_: Any) -> bool:
    return False
