"""The exchange of an all_gather, and its transpose, a reduce_scatter: one exchange and a sum on each rank.

A reduce_scatter is an exchange of layouts as well: with a dim in front for the rank that holds a summand,
shards by that dim become shards of the scattered one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from .call import Call
from .exchange import (
    ARITHMETIC,
    GATHERED,
    ONE,
    SUMMED,
    UNRECORDED,
    Tensors,
    calls_before,
    is_traced,
    report_failure,
    run_steps,
)
from .layouts import WHOLE, Layout, even, moved, pair
from .member import Place
from .registry import by_handle

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
Transposed = tuple[str, Place, tuple[Layout, ...], bool]  # name, place, each tensor's shards, whether it sums


def _run(call: Transposed, inputs: Tensors, records: bool) -> Tensors:
    name, place, shards, sums = call
    # or it would match a gather or exchange whose backward differs
    gradient = (GATHERED if sums else SUMMED) if records else UNRECORDED
    if not sums:
        return run_steps(inputs, name, ((place, tuple([pair(s, WHOLE) for s in shards])),), ONE, gradient)
    args = tuple([pair(even(0, place.world), moved(s)) for s in shards])
    parts = run_steps([x.unsqueeze(0) for x in inputs], name, ((place, args),), ONE, gradient)
    return [sum_in_order(part) for part in parts]


def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """Sum over dim 0 in its order, 16-bit floats in float32: every run gives the same bits."""
    first, *rest = parts.unbind(0)
    if not rest:
        return first.clone()
    total = first.to(_WIDER.get(parts.dtype, parts.dtype)) + rest[0]
    for part in rest[1:]:
        total += part
    return total.to(parts.dtype)


class SparTranspose(torch.autograd.Function):
    """Gather shards, or sum and scatter; the gradient of each is the other."""

    @staticmethod
    def forward(ctx: Any, call: Transposed, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        group = None if torch.compiler.is_compiling() else by_handle(call[1].handle).group
        ctx.call = call, group  # keeps the group alive until backward
        return tuple(_run(call, inputs, True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (name, place, shards, sums), _ = ctx.call
        if not name.startswith("backward of "):
            name = f"backward of {name}"
        call, (before,) = (name, place, shards, not sums), calls_before((place,))
        try:
            records = torch.is_grad_enabled() and any(grad.requires_grad for grad in grads)
            return None, *(recorded(call, grads) if records else _run(call, grads, False))
        except BaseException as error:
            report_failure([(place, before + 1)], name, grads[0].device.type, error)
            raise


# Function.apply without its check for functorch's wrappers: see exchange.py
_apply_plain: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, SparTranspose).apply


def recorded(call: Transposed, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    if any(map(is_traced, inputs)):
        return cast(tuple[torch.Tensor, ...], SparTranspose.apply(call, *inputs))  # type: ignore[no-untyped-call]
    return _apply_plain(call, *inputs)


def check_dtype(call: Call, sums: bool, records: bool) -> None:
    """Raise TypeError if torch cannot add the input's items, and the call or its backward sums them."""
    dtype = call.input.dtype
    if (sums or records) and dtype not in ARITHMETIC:
        what = f"a tensor of {dtype}" + ("" if sums else " whose gradients are to be summed")
        raise call.type_error("input_", what, "a dtype that torch adds, such as torch.float32")


def transpose(calls: Sequence[Call], shards: Sequence[Layout], sums: bool) -> Tensors:
    """Gather the shards of each input, or sum and scatter them; record it if an input requires a gradient."""
    first, inputs = calls[0], [call.input for call in calls]
    records = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    check_dtype(first, sums, records)
    if first.world == 1:
        return inputs
    call = first.name, first.place, tuple(shards), sums
    if records:
        return recorded(call, inputs)
    return _run(call, inputs, False)
