# SPDX-License-Identifier: Apache-2.0
"""Layers that mix tokens without attention, in a view: convolutions, linear attention and state spaces.

transformers calls their functions by global names of a model's module. While a view runs, functions of the
same names stand before them, which compute on parts. All names of transformers on which this depends stand in
`served`, as of transformers 5.23: what has other parameters runs as any code.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..._model.leaves import is_traced, leaf
from ..._model.part import has_part
from ..._model.view import View, current_view
from .eager import are_weights_read
from .scans import LIGHTNING_NAMES, lightning
from .served import SERVED, Function

_LIBRARY = "transformers."
# Of layers of parallelized models, by module or class, and name: transformers' function, and what stands
# before it.
_served: dict[tuple[Any, str], tuple[Any, Any]] = {}


def serve(model: torch.nn.Module) -> None:
    """Find the functions that a model's layers call, for views."""
    for kind in {type(module) for module in model.modules()}:
        if not kind.__module__.startswith(_LIBRARY):
            continue
        forward = _forward_of(kind)
        for name in _names_of(forward) & SERVED.keys():
            owner: Any = kind if SERVED[name].is_method else sys.modules.get(forward.__module__)
            own: Any = getattr(owner, name, None)
            known = _served.get((owner, name), (None, None))
            if own not in known and _has_parameters(own, SERVED[name]):
                key = f"{forward.__module__}.{name}"
                _served[owner, name] = own, _standing_for(own, SERVED[name], key)
                _own_of[key] = own, SERVED[name]


def _forward_of(kind: type) -> Any:
    return inspect.unwrap(kind.forward)  # type: ignore[attr-defined]


def _names_of(forward: Any) -> frozenset[str]:
    """Return the global names and attributes that a function has in its code."""
    code = getattr(forward, "__code__", None)
    return frozenset(() if code is None else code.co_names)


def is_lightning(module: torch.nn.Module) -> bool:
    """Whether a module is MiniMax's layer of lightning attention, with its class's forward."""
    kind = type(module)
    if "forward" in vars(module):
        return False
    return kind.__module__.startswith(_LIBRARY) and _names_of(_forward_of(kind)) >= LIGHTNING_NAMES


def run_lightning(
    view: View, module: torch.nn.Module, own: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call the layer with parts, unless somebody reads its state."""
    if are_weights_read(module, kwargs):
        return own(*args, **kwargs)
    out = lightning(view, type(module).forward, module, *args, **kwargs)
    return own(*args, **kwargs) if out is NotImplemented else out


def _has_parameters(own: Any, function: Function) -> bool:
    return callable(own) and _parameters_of(own).issuperset(function.parameters)


@functools.lru_cache(maxsize=256)
def _parameters_of(own: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(own).parameters)


@contextlib.contextmanager
def serving(_: Any) -> Iterator[None]:
    """Let the functions of all known layers receive parts."""
    # One that somebody replaced since stays.
    served = {place: pair for place, pair in _served.items() if getattr(*place) is pair[0]}
    for (owner, name), (_, standing) in served.items():
        setattr(owner, name, standing)
    try:
        yield
    finally:
        for (owner, name), (own, standing) in served.items():
            if getattr(owner, name) is standing:
                setattr(owner, name, own)


def _standing_for(own: Callable[..., Any], function: Function, key: str) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            has_code = function.is_method or function.reads_mask or kwargs.get(function.state)
            if has_code or not is_traced():
                return own(*args, **kwargs)
            return None if function.like is None else _in_graph(key, *args, **kwargs)
        view = current_view()
        if view is None and not function.reads_mask:
            return own(*args, **kwargs)
        return _run(view, own, function, args, kwargs)

    return call


def _run(view: View | None, own: Callable[..., Any], function: Function, args: Any, kwargs: Any) -> Any:
    names = _parameters_of(own)
    # A layer may hand on all that it got, such as rotary embeddings, of which the function names nothing.
    known = {name: x for name, x in kwargs.items() if name in names or not has_part(x)}
    out = function.run(view, own, *args, **known)
    return own(*args, **kwargs) if out is NotImplemented else out


# ---- in a graph ----

_own_of: dict[str, tuple[Callable[..., Any], Function]] = {}  # transformers' functions, by the keys of nodes


def _in_view(view: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    return _run(view, *_own_of[key], args, kwargs)


@leaf(_in_view)
def _in_graph(key: str, *args: Any, **kwargs: Any) -> Any:
    """Stand for a function while Dynamo traces, by the shape of its result."""
    function = _own_of[key][1]
    assert function.like is not None
    y = args[function.like]
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            y = y + x.flatten()[:1].sum().to(y.dtype)  # it has a gradient where any argument has one
    return (y, None) if function.returns_state else y
