# SPDX-License-Identifier: Apache-2.0
"""Operators that code calls by `torch.ops`: torch's have the rules of its functions, others run whole."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from .gradients import average_gradients, gathered
from .part import Parts, changed, part_of, tensors_in


def name_of(func: Any) -> str:
    """Return the name by which rules are found: get_x for the attribute x."""
    if is_operator(func):
        return str(_packet(func))
    if isinstance(func, OpOverload):  # of torch: mean.dim is mean
        func = func.overloadpacket
    name: str = getattr(func, "__name__", str(func))
    if isinstance(func, FunctionType) and not _is_of_torch(func):
        return f"{func.__module__}.{name}"
    return f"{name[2:5]}_{func.__self__.__name__}" if name in ("__get__", "__set__") else name


def _is_of_torch(func: FunctionType) -> bool:
    """Whether torch has the function, or one that somebody put in the place of its own.

    Functions of other libraries that ask whether a mode is active come to it as torch's do.
    """
    owners = torch, Tensor, torch.nn.functional
    is_in_place = any(getattr(owner, func.__name__, None) is func for owner in owners)
    return is_in_place or str(func.__module__).partition(".")[0] == "torch"


def is_operator(func: Any) -> bool:
    """Whether a function is an operator of another library, whose name says nothing of what it computes."""
    is_any = isinstance(func, (OpOverload, OpOverloadPacket))
    return is_any and not _packet(func)._qualified_op_name.startswith("aten::")


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator changes in place, as its schemas say."""
    tensors: list[Tensor] = []
    for schema in _schemas(func):
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[i] if i < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
                tensors += [x for x in tensors_in(given) if not any(x is known for known in tensors)]
    return tensors


def shares_memory(func: Any) -> bool:
    """Whether an operator's results may be views of its arguments."""
    return any(result.alias_info is not None for schema in _schemas(func) for result in schema.returns)


def run_whole(parts: Parts, func: Any, changes: list[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on whole tensors, and let each rank keep its parts of those that it changes."""
    wholes = {id(x): parts.gather(x).clone() for x in changes if part_of(x) is not None}
    args, kwargs = gathered(changed(lambda x: wholes.get(id(x), x), (args, kwargs)))
    out = func(*args, **kwargs)
    changed_parts = {}
    for x in changes:
        if (part := part_of(x)) is not None:
            x.copy_(parts.shard(wholes[id(x)], part))
            changed_parts[id(wholes[id(x)])] = x
    return average_gradients(parts, changed(lambda x: changed_parts.get(id(x), x), out))


def _schemas(func: Any) -> list[Any]:
    packet = _packet(func)
    return [getattr(packet, overload)._schema for overload in packet.overloads()]


def _packet(func: Any) -> OpOverloadPacket:
    packet: OpOverloadPacket = func.overloadpacket if isinstance(func, OpOverload) else func
    return packet
