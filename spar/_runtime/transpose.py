"""The exchange of an all_gather, and its transpose, a reduce_scatter: one exchange and a sum on each rank.

A reduce_scatter is an exchange of layouts as well: with a dim in front for the rank that holds a summand,
shards by that dim become shards of the scattered one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from .call import Call
from .channel import Operation
from .exchange import (
    ARITHMETIC,
    GATHERED,
    ONE,
    SUMMED,
    UNRECORDED,
    Tensors,
    calls_before,
    is_any_traced,
    report_failure,
    run_eager,
    run_steps,
)
from .items import add_rows
from .layouts import WHOLE, Layout, even, moved, pair
from .member import Place
from .registry import by_handle

Transposed = tuple[str, Place, tuple[Layout, ...], bool]  # name, place, each tensor's shards, whether it sums


def _run(call: Transposed, inputs: Tensors, records: bool) -> Tensors:
    name, place, shards, sums = call
    # or it would match a gather or exchange whose backward differs
    gradient = (GATHERED if sums else SUMMED) if records else UNRECORDED
    if not sums:
        return run_steps(inputs, name, ((place, tuple([pair(s, WHOLE) for s in shards])),), ONE, gradient)
    args = tuple([pair(even(0, place.world), moved(s)) for s in shards])
    rows = [x.unsqueeze(0) for x in inputs]
    if not inputs[0].is_meta and not is_any_traced(inputs):
        return run_eager(rows, place, Operation(name, args, *ONE, gradient, True))
    return [add_rows(parts) for parts in run_steps(rows, name, ((place, args),), ONE, gradient)]


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
    if is_any_traced(inputs):
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
