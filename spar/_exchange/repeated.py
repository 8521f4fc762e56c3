"""Repeat a call whose arguments were checked before: the checks take as long as a small exchange."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .. import _C
from .._group.hints import add_advice
from .._group.registry import known
from ..topology.resolve import Group, process_group
from .exchange import is_watched, report_failure

Key = tuple[object, ...] | None  # None: the call is not kept


def key_of(input_: Any, dim: object, arguments: Key, grad_scale: Key = ()) -> Key:
    """Return the key of a gather, or of a sum, of a tensor or a list.

    It has the dtype, because not every one can be summed or scaled.
    """
    if arguments is None or grad_scale is None or type(dim) is not int:  # True is not a dim, and equals 1
        return None
    first = input_[0] if isinstance(input_, (list, tuple)) and input_ else input_
    return (dim, first.dtype, arguments, grad_scale) if isinstance(first, torch.Tensor) else None


def kept_scale(grad_scale: object) -> Key:
    """Return a grad_scale for a key; None for types whose values equal those of others."""
    kept = grad_scale is None or isinstance(grad_scale, enum.Enum) or type(grad_scale) in (str, float)
    return (grad_scale,) if kept else None


def repeat(name: str, input_: Any, group: Group, key: Key) -> Any:
    """Exchange a tensor or a list of them as a call did that `remember` kept by an equal key.

    Returns None if there was none, or if a tracer must see this call: its arguments are to be checked then.
    """
    if key is None or is_dynamo_compiling():
        return None
    one = not isinstance(input_, (list, tuple))
    inputs: Sequence[torch.Tensor] = (input_,) if one else input_
    comm = known(group) or known(process_group(group, name))
    if comm is None or not comm.operations or forward_ad._current_level >= 0:
        return None
    shapes = _C.shapes_key(inputs)
    found = None if shapes is None else comm.operations.get((name, shapes, key))
    if found is None or is_watched():
        return None
    operation, record = found
    before = comm.count()
    try:
        for x in inputs:
            if x.requires_grad and torch.is_grad_enabled():
                if record is None:
                    return None
                recorded = record(inputs)
                return recorded[0] if one else list(recorded)
        if operation.sums:
            inputs = [x.unsqueeze(0) for x in inputs]
        outputs = comm.exchange(operation, inputs)
        return outputs[0] if one else outputs
    except BaseException as error:
        report_failure([(comm.place, before + 1)], name, inputs[0].device.type, error)
        add_advice(error, 0 if one else len(inputs))
        raise
