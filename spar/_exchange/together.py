# SPDX-License-Identifier: Apache-2.0
"""Check the tensors that one call of a public operation exchanges together, and exchange them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _C
from .._control.state import Place
from .._group.group import Group as Group_
from ..topology.resolve import Group
from .arguments import Arguments, Key, apply_together, check_summable, not_empty, ranks_of
from .exchange import MOVE, SUM, Exchange, Scale
from .layouts import Args
from .observers import must_record
from .outputs import checked, write_to
from .row_exchange import RowExchange
from .work import Work, Works, launch

_MOST = _C.MOST_TENSORS
_AT = [f"[{i}]" for i in range(_MOST)]  # what names each tensor of a list in messages


def exchange_together(
    name: str,
    input_: Any,
    group: Group | Group_ | Place,
    layouts: Callable[[list[Arguments], list[str]], tuple[tuple[Args, ...], Scale]],
    key: Key = None,
    kind: int = MOVE,
    exchanges: int = 1,
    out: Any = None,
    async_op: Any = False,
    make: Callable[[Sequence[Arguments]], RowExchange] | None = None,
    most: int = _MOST,
) -> Any:
    """Check a tensor, or several of one dtype and device, and move up to 16 in one exchange.

    Args:
        layouts: checks the other arguments; returns the layouts of each input, and what gradients are scaled
            by. It receives the calls, and what names each tensor in messages: "[1]" after an argument's name,
            or "".
        key, kind: as for `apply_together`.
        exchanges: as for Arguments, of up to 16 tensors.
        make: returns what moves the inputs of some of the calls; None: an Exchange by their layouts.
        most: how many inputs one exchange moves.

    Returns:
        A list, or its only tensor if `input_` is not a list; with async_op a tuple of that and a Work.
    """
    one = not isinstance(input_, (list, tuple))
    ranks = ranks_of(group, name)
    inputs: Sequence[Any] = [input_] if one else not_empty(name, input_, ranks, "input_", exchanges)
    steps = range(0, len(inputs), most)
    first = Arguments(name, inputs[0], ranks, "input_" if one else "input_[0]", exchanges * len(steps))
    first.tensors = 0 if one else len(inputs)
    with first:
        at = [""] if one else [*_AT[: len(inputs)], *[f"[{i}]" for i in range(_MOST, len(inputs))]]
        calls = [first]
        for i in range(1, len(inputs)):
            calls.append(first.beside(inputs[i], f"input_{at[i]}"))
        # A meta tensor is not exchanged: peers wait for the others.
        if inputs[0].is_meta:
            first.device = next((x.device.type for x in inputs if not x.is_meta), "meta")
        _check_alike(first, inputs)
        args, grad_scale = layouts(calls, at)
        if kind != MOVE and (async_op or out is not None):
            check_summable(first, kind == SUM, async_op and must_record(inputs))
        if out is not None and len(steps) > 1:  # before the first of them writes
            out = checked(out, calls, at, Exchange(name, first.group, args, kind=kind))
        outputs: list[torch.Tensor] = []
        works: list[Work] = []
        for i in steps:
            part = slice(i, i + most)
            if len(steps) > 1:
                key = None
                calls[i].note = f"tensors from {i} of {len(inputs)}"
            made = None if make is None else make(calls[part])
            if out is None and not async_op:
                if made is None:
                    outputs += apply_together(calls[part], args[part], grad_scale, key, kind)
                else:
                    outputs += made.apply([call.input for call in calls[part]])
                continue
            outs = out if out is None or len(steps) == 1 else out[part]
            exchange = made or Exchange(name, first.group, args[part], kind=kind, note=calls[i].note)
            if async_op:
                found, work = launch(calls[part], at[part], exchange, outs, async_op)
                work._tensors = first.tensors
                works.append(work)
                outputs += found
            else:
                outputs += write_to(outs, calls[part], at[part], exchange)
        result = outputs[0] if one else outputs
        return (result, works[0] if len(works) == 1 else Works(works)) if async_op else result


def _check_alike(first: Arguments, inputs: Sequence[torch.Tensor]) -> None:
    """Raise TypeError unless all tensors have the dtype and device of the first."""
    x = inputs[0]
    dtype, on_cpu = x.dtype, x.is_cpu
    for i in range(1, len(inputs)):
        y = inputs[i]
        if y.dtype != dtype or not (y.is_cpu if on_cpu else y.device == x.device):
            value = f"of {y.dtype} on {y.device}"
            raise first.type_error(f"input_[{i}]", value, f"{dtype} on {x.device}, as input_[0]")


def entries(call: Arguments, name: str, sizes: Any, at: list[str]) -> Sequence[Any]:
    """Return the sizes of each tensor of `exchange_together`."""
    if at == [""]:
        return [sizes]
    if sizes is None:
        return [None] * len(at)
    if not isinstance(sizes, (list, tuple)) or len(sizes) != len(at):
        raise call.error(name, f"{sizes!r:.200}", f"{len(at)} entries, one for each tensor, or None")
    return sizes
