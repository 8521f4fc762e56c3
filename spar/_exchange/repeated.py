# SPDX-License-Identifier: Apache-2.0
"""Repeat a call whose arguments were checked before: the checks take as long as a small exchange."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

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
    """Exchange a tensor or a list of them as an equal call did before.

    Args:
        arguments: all other arguments of the operation; None: this call is not remembered.

    Returns:
        The output, and None; or None if a tracer must see this call, or it is new: its arguments are to be
        checked, and its exchange is to be remembered by the key that is returned.
    """
    if arguments is None or is_dynamo_compiling():
        return None, None
    state = by_process_group.get(id(group))
    if state is None:
        state = by_process_group.get(id(process_group(group, name)))
    if state is None or forward_ad._current_level >= 0 or _dispatch_modes() > 0 or _functorch_transforms():
        return None, None
    one = not isinstance(input_, (list, tuple))
    inputs = (input_,) if one else input_
    records = False
    for x in inputs:
        if type(x) not in PLAIN_TYPES:
            return None, None
        records = records or x.requires_grad
    if not inputs:
        return None, None
    records = records and torch.is_grad_enabled()
    # the core compares dtypes, devices and shapes; numel keeps apart those that alternate, as of Q and K
    key = name, arguments, records, one, inputs[0].numel()
    exchange = state.exchanges.get(key)
    if exchange is None:
        return None, key
    before = state.calls if state.queue is None else state.count()
    try:
        outputs = apply_plain((exchange, exchange.again), *inputs) if records else exchange.again(inputs)
        return (outputs[0] if one else list(outputs)), None
    except Unlike:
        return None, key
    except BaseException as error:
        state.report(name, inputs[0].device.type, error, before + 1)
        add_advice(error, 0 if one else len(inputs))
        raise
