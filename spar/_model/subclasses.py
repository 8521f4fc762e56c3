# SPDX-License-Identifier: Apache-2.0
"""Tensor subclasses in a view: DTensors of parts are parts, and others receive whole tensors alone.

The code of a subclass runs below the view, where it would take a part for a whole tensor. A DTensor over
other ranks than those of the sequence runs torch's operators on the local shards, so that the rules of
torch's functions hold for it: its part is an attribute, and its global shape has this rank's tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _disabled_torch_dispatch_impl, _disabled_torch_function_impl
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import Parameter

from .call import FunctionCall, Plan
from .dtensors import arrived, divides, is_distributed, is_waiting
from .groups import check_same_tokens, is_apart, ranks_of
from .nested import changed, tensors_in
from .part import Part, mark, part_of
from .places import forward_on
from .spans_mask import SpansMask

_ORDINARY = (Tensor, Parameter)
# AOTAutograd wraps ordinary tensors in these.
_OF_TRACES = (FakeTensor, FunctionalTensor)
_TENSOR = "torch.distributed.tensor"
# Functions of torch.distributed that return their tensors, or convert them from and to DTensors.
_FSDP_HOOKS = ("RegisterPreBackwardFunction", "RegisterPostBackwardFunction")
_CONVERSIONS = ("_FromTorchTensor", "_ToTorchTensor", "Redistribute")
_ADVICE = "convert whole tensors, outside of the blocks or in a torch.autograd.Function"


def holds_part(x: Tensor) -> bool:
    """Whether a tensor is a part, or a subclass that wraps one."""
    if part_of(x) is not None or type(x) in _ORDINARY:
        return part_of(x) is not None
    names = x.__tensor_flatten__()[0] if hasattr(x, "__tensor_flatten__") else vars(x)
    return any(part_of(getattr(x, name, None)) is not None for name in names)


def run_of(view: Any, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return what runs a function of parts and subclasses in the view; None if the function's rule does.

    Raises:
        RuntimeError: a subclass wraps a part, which its code would take for a whole tensor.
    """
    found = [x for x in tensors_in(args, kwargs) if type(x) not in _ORDINARY]
    for x in found:
        if part_of(x) is None and holds_part(x):
            raise view.error(name, f"gets a {type(x).__name__} that wraps a sharded tensor", _ADVICE)
    if any(map(is_waiting, found)):
        args, kwargs = changed(arrived, (args, kwargs))
        return functools.partial(func, *args, **kwargs)
    kinds: tuple[Any, ...] = tuple(dict.fromkeys(map(type, found)))
    for kind in kinds if torch._C._is_torch_function_enabled() else ():
        if not _is_torchs(kind.__torch_function__):  # the functions that it calls come to the view
            return functools.partial(kind.__torch_function__, func, kinds, args, kwargs)
    return None


def computes(*values: Any) -> bool:
    """Whether an argument is of a subclass with code of its own below the view."""
    return any(
        type(x).__torch_dispatch__ is not _disabled_torch_dispatch_impl
        and not (is_distributed(x) or isinstance(x, (*_OF_TRACES, SpansMask)))
        for x in tensors_in(*values)
        if type(x) not in _ORDINARY
    )


def is_below(plan: Plan, call: FunctionCall) -> bool:
    """Whether a plan reads the memory of a DTensor of a part, which has none: it runs whole instead."""
    tensors = call.tensors
    read = tensors if plan.run is not None else [tensors[i] for i, _ in plan.moves]
    return any(is_distributed(x) and part_of(x) is not None for x in read)


def _is_torchs(function: Any) -> bool:
    own = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    return function is _disabled_torch_function_impl or getattr(function, "__func__", None) is own


# ---- DTensors ----


def keeps_parts(cls: Any) -> bool:
    """Whether a Function's results are the parts that it gets: FSDP2's hooks, and DTensor's conversions."""
    module, name = str(cls.__module__), cls.__name__
    is_hook = module.startswith("torch.distributed.") and name in _FSDP_HOOKS
    return is_hook or (module.startswith(_TENSOR) and name in _CONVERSIONS)


def converted(view: Any, cls: Any, call: Callable[..., Any], args: Any) -> Any:
    """Call such a Function, and say which parts its results are."""
    parts = [part_of(x) for x in tensors_in(args)]
    if cls.__name__ == "_FromTorchTensor":
        _check(view, "DTensor.from_local", args[1], args[2], parts[0])
        if parts[0] is not None and args[4] and args[5]:
            args = (*args[:4], *_local_shape(view, args[4], args[5], parts[0]), *args[6:])
    elif parts[0] is not None and cls.__name__ == "_ToTorchTensor":
        _check(view, "DTensor.to_local", args[0].device_mesh, args[0].placements, parts[0])
    out = changed(arrived, call(*args))
    for x, part in zip(tensors_in(out), parts, strict=True):
        mark(x, part)
    return out


def check_inputs(view: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse DTensors over ranks that share a sequence as inputs of a model."""
    inputs: list[Any] = tensors_in(args, kwargs)
    for x in inputs:
        if is_distributed(x) and not is_apart(view.parts.group, ranks_of(x.device_mesh)):
            raise ValueError(
                f"{forward_on(view.parts)}: an input is a DTensor {list(x.shape)} over ranks that "
                "share the sequence; pass its full_tensor(), or its to_local() with inputs= in parallelize"
            )


def make_subclass(
    view: Any, own: Callable[..., Any], cls: Any, data: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Stand for Tensor's method of this name: refuse parts."""
    if part_of(data) is not None:
        raise view.error(cls.__name__, "would be of this rank's part", _ADVICE)
    return own(cls, data, *args, **kwargs)


def to_local(view: Any, own: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for DTensor's method of this name, which without gradients calls no Function."""
    part = part_of(x)
    if part is None:
        return own(x, *args, **kwargs)
    _check(view, "DTensor.to_local", x.device_mesh, x.placements, part)
    return mark(arrived(own(x, *args, **kwargs)), part)


def _check(view: Any, name: str, mesh: Any, placements: Any, part: Part | None) -> None:
    if not is_apart(view.parts.group, ranks_of(mesh)):
        advice = "take a mesh of other ranks, and call the model outside of torch's context_parallel"
        raise view.error(name, "is over ranks that share a sequence", advice)
    if part is None:
        return
    if any(divides(placement, part.dim) for placement in placements):
        advice = f"keep DTensors from style to style by use_local_output=False, or {_ADVICE}"
        raise view.error(name, f"divides dim {part.dim}, which is sharded, over other ranks", advice)
    for group in mesh.get_all_groups():
        check_same_tokens(view, name, group, mesh.device_type)


def _local_shape(view: Any, shape: Any, stride: Any, part: Part) -> tuple[Any, Any]:
    """Return a DTensor's shape and stride with this rank's tokens, in the place of those with all."""
    if shape[part.dim] != part.whole:
        problem = f"gets the shape {list(shape)}, and a sharded tensor of {part.whole} in dim {part.dim}"
        raise view.error("DTensor.from_local", problem, "pass the shape with all tokens")
    whole = torch.empty_strided(shape, stride, device="meta")
    own = torch.empty_like(whole.narrow(part.dim, 0, part.local))
    return own.shape, own.stride()


def wraps_part(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a tensor that a transform of torch.func wraps, which loses its attributes, is a part."""
    for x in tensors_in(args, kwargs):
        while is_functorch_wrapped_tensor(x):
            x = get_unwrapped(x)
        if part_of(x) is not None:
            return True
    return False
