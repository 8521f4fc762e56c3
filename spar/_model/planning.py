# SPDX-License-Identifier: Apache-2.0
"""How a call of a torch function runs on parts, by the rule of the function; and which calls are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import subclasses
from .call import SERVE_UNEVEN, FunctionCall, Plan, rule_of, verify
from .part import Parts, part_of

Error = Callable[[str, str, str], Exception]

AS_WHOLE = "call it in a torch.autograd.Function, which gets whole tensors"
# Functions of which nobody could make the result right: they read or change memory of the part.
_MEMORY_NAMES = """
data_ptr untyped_storage storage storage_offset as_strided set_ resize_ resize_as_ get_grad retain_grad
swap_tensors share_memory_ __dlpack__ _typed_storage unsqueeze_ squeeze_ transpose_ swapaxes_ swapdims_ t_
rename_
"""
MEMORY = frozenset(_MEMORY_NAMES.split())


def planned(
    parts: Parts, error: Error, name: str, func: Any, args: Any, kwargs: dict[str, Any]
) -> Plan | None:
    """Return how a function of torch, by its name, runs on parts; None: it runs whole.

    error: makes that of a function, of what is wrong and what to do.
    """
    if name in MEMORY or (name.startswith("set_") and name != "set_requires_grad"):
        raise error(
            name,
            "reads or replaces the memory or the shape of a tensor that is sharded",
            AS_WHOLE,
        )
    if isinstance(kwargs.get("out"), (Tensor, tuple, list)):
        raise error(name, "has out=, and a sharded tensor", "use its result instead")
    call = FunctionCall(parts, name, func, args, kwargs)
    if any((part := part_of(x)) is not None and part.parts is not parts for x in call.tensors):
        raise error(name, "has a part of another view or layout", "gather it in its own forward")
    if subclasses.computes(call.tensors):
        return None
    found = rule_of(name)
    if found not in SERVE_UNEVEN and call.has_uneven:
        return None
    plan = found(call) if found is not None else None
    if plan is not None and plan.part and not call.is_inplace:
        verify(call, plan)
    return None if plan is not None and subclasses.is_below(plan, call) else plan
