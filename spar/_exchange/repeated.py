# SPDX-License-Identifier: Apache-2.0
"""Repeat a call whose arguments were checked before: the checks take as long as a small exchange."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .. import _C
from .._control.mismatch import add_advice
from .._group.registry import by_process_group
from .._transports.dtypes import PLAIN_TYPES
from ..topology.resolve import Group, process_group
from .arguments import Key
from .autograd import apply_plain
from .exchange import Unlike
from .observers import _dispatch_modes, _functorch_transforms


def scale_key(grad_scale: object) -> Key:
    """Return a grad_scale for a key; None for types whose values equal those of others."""
    is_exact = grad_scale is None or isinstance(grad_scale, enum.Enum) or type(grad_scale) in (str, float)
    return (grad_scale,) if is_exact else None


_LONG = 16  # numbers, which take as long to compare as a call to check
_INT = frozenset({int})  # bools equal ints
_NO_KEY = object()


def layouts_key(inputs: object, *arguments: Any) -> tuple[object, ...] | None:
    """Return by what `repeat` finds calls with these sizes and layouts; None: it must not keep the call.

    A layout's group is not kept, or it would live on; its id is that of the call's group, which lives.

    inputs: of the call: sizes mean something else for a tensor than for a list of one.
    arguments: each is sizes, a layout, None, or, of a call with several tensors, a list of these.
    """
    if is_dynamo_compiling():
        return None
    key: list[object] = [isinstance(inputs, (list, tuple))]
    for entry in arguments:
        part = _key_part(entry)
        if part is _NO_KEY and (type(entry) is list or type(entry) is tuple):
            parts = tuple([_key_part(argument) for argument in entry])
            part = part if _NO_KEY in parts else parts
        if part is _NO_KEY:
            return None
        key.append(part)
    return tuple(key)


def _key_part(argument: Any) -> object:
    """Return what is kept of a layout, or of one tensor's sizes."""
    if argument is None:
        return None
    if type(argument) is tuple or type(argument) is list:
        few = len(argument) <= _LONG and _INT.issuperset(map(type, argument))
        return tuple(argument) if few else _NO_KEY
    numbers = getattr(argument, "numbers", None)
    if type(numbers) is tuple and len(numbers) <= _LONG:  # a layout
        return argument.kind, numbers, id(argument.group)
    return _NO_KEY


def repeat(name: str, input_: Any, group: Group, arguments: Key) -> tuple[Any, Key]:
    """Exchange a tensor or a list of them as an equal call did before: in C, csrc/python/repeated.c.

    Args:
        arguments: all other arguments of the operation; None: this call is not remembered.

    Returns:
        The output, and None; or None if a tracer must see this call, or it is new: its arguments are to be
        checked, and its exchange is to be remembered by the key that is returned.
    """
    if arguments is None or is_dynamo_compiling():
        return None, None
    return _C.repeat(name, input_, group, arguments)


_C.use_repeat(
    by_process_group,
    process_group,
    *PLAIN_TYPES,
    _dispatch_modes,
    _functorch_transforms,
    forward_ad,
    torch.is_grad_enabled,
    apply_plain,
    Unlike,
    add_advice,
)
