"""Autograd's view of an all_gather, and of its transpose, a reduce_scatter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .._group.member import Place
from .._group.registry import calls_on
from .arguments import Call, remember
from .exchange import (
    ARITHMETIC,
    Tensors,
    are_long,
    calls_before,
    define,
    flattened,
    is_any_traced,
    is_transformed,
    must_record,
    number_of_newest,
    report_failure,
    tangent_name,
    unflattened,
)
from .graph_ops import code
from .layouts import Layout
from .move import Move

Recorded = tuple[Move, Move | None]  # what is done, and its transpose (None: not known)


@functools.lru_cache(64)
def _untraced(move: Move) -> Recorded:
    """Return what autograd records; a step of training repeats the calls of the one before."""
    return move, move.turned()


class SparTranspose(torch.autograd.Function):
    """Gather shards, or sum and scatter; the gradient of each is the other."""

    @staticmethod
    def forward(ctx: Any, call: Recorded, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        move = call[0]
        ctx.call = call
        outputs = tuple(move.run(inputs, True))
        if is_any_traced(inputs):
            (ctx.forward,) = number_of_newest(((move.place, move.args),)) or (0,)
        else:
            ctx.forward = calls_on(move.place.handle)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        move, back = ctx.call
        move = move.turned() if back is None or is_dynamo_compiling() else back
        (before,) = calls_before((move.place,))
        try:
            if must_record(grads):
                return None, *recorded(move, grads)
            return None, *move.run(grads, forward=ctx.forward)
        except BaseException as error:
            report_failure([(move.place, before + 1)], move.name, grads[0].device.type, error)
            raise


class SparTransposeTransformed(SparTranspose):
    """The same in forward mode, and for functorch's transforms: see SparTransformed."""

    @staticmethod
    def forward(call: Recorded, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return SparTranspose.forward(SimpleNamespace(), call, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.call, ctx.forward = inputs[0], 0

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        move, _ = ctx.call
        move = move._replace(name=tangent_name(move.name))
        (before,) = calls_before((move.place,))
        try:
            return recorded(move, tangents)
        except BaseException as error:
            report_failure([(move.place, before + 1)], move.name, tangents[0].device.type, error)
            raise


# Function.apply without its check for functorch's wrappers: see exchange.py
_apply_plain: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, SparTranspose).apply


def recorded(move: Move, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    traced = is_any_traced(inputs)
    if forward_ad._current_level >= 0 or (traced and is_transformed()):
        return cast(tuple[torch.Tensor, ...], SparTransposeTransformed.apply((move, None), *inputs))  # type: ignore[no-untyped-call]
    if traced:
        return cast(tuple[torch.Tensor, ...], SparTranspose.apply((move, None), *inputs))  # type: ignore[no-untyped-call]
    if are_long(move.args):
        return _apply_plain((move, None), *inputs)
    return _apply_plain(_untraced(move), *inputs)


def _recorder(move: Move) -> Callable[[Tensors], Tensors]:
    """Return what runs and records the move for plain tensors that no tracer must see."""
    call: Recorded = move, move.turned()
    return lambda inputs: _apply_plain(call, *inputs)


def check_dtype(call: Call, sums: bool) -> None:
    """Raise TypeError if torch cannot add the input's items, which the call sums, or else its backward."""
    dtype = call.input.dtype
    if dtype not in ARITHMETIC:
        what = f"a tensor of {dtype}" + ("" if sums else " whose gradients are to be summed")
        raise call.type_error("input_", what, "a dtype that torch adds, such as torch.float32")


def transpose(
    calls: Sequence[Call], shards: Sequence[Layout], sums: bool, key: tuple[object, ...] | None = None
) -> Tensors:
    """Gather the shards of each input, or sum and scatter them; record it if an input requires a gradient.

    key: by which `repeat` finds the exchange; None: it does not.
    """
    first, inputs = calls[0], [call.input for call in calls]
    records = must_record(inputs)
    if sums or records:
        check_dtype(first, sums)
    if first.world == 1:
        return inputs
    if not first.known and is_dynamo_compiling():
        transposed: Tensors = torch.ops.spar.transpose(
            inputs, first.name, [*first.place], flattened(shards), sums, records, first.note, code()
        )
        return transposed
    move = Move.of_shards(first.name, first.place, shards, sums, first.note)
    remember(calls, key, move.args, _recorder(move) if records and key is not None else None, sums)
    return recorded(move, inputs) if records else move.run(inputs)


def _transpose(
    inputs: Tensors,
    name: str,
    place: Sequence[int],
    shards: Sequence[int],
    sums: bool,
    records: bool,
    note: str,
    _code: str,
) -> list[torch.Tensor]:
    move = Move.of_shards(name, Place(*place), unflattened(shards), sums, note)
    return list(recorded(move, inputs) if records else move.run(inputs))


define(
    "transpose(Tensor[] inputs, str name, int[] place, SymInt[] shards, bool sums, bool records, str note,"
    " str code) -> Tensor[]",
    _transpose,
)
