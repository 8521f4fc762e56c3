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
from .outputs import write_to
from .watch import must_record
from .work import launch

# what names each tensor of a list in messages; any that is too many is the last
_AT = [f"[{i}]" for i in range(_C.MOST_TENSORS)]
_NAMES = [f"input_{at}" for at in (*_AT, f"[{_C.MOST_TENSORS} or more]")]


def exchange_together(
    name: str,
    input_: Any,
    group: Group | Group_ | Place,
    layouts: Callable[[list[Arguments], list[str]], tuple[tuple[Args, ...], Scale]],
    key: Key = None,
    kind: int = MOVE,
    note: str = "",
    exchanges: int = 1,
    out: Any = None,
    async_op: Any = False,
) -> Any:
    """Check a tensor, or several of one dtype and device, and move them in one exchange.

    Args:
        layouts: checks the other arguments; returns the layouts of each input, and what gradients are scaled
            by. It receives the calls, and what names each tensor in messages: "[1]" after an argument's name,
            or "".
        key, kind: as for `apply_together`.
        note: as in Exchange.
        exchanges: as for Arguments.

    Returns:
        A list, or its only tensor if `input_` is not a list; with async_op a tuple of that and a Work.
    """
    one = not isinstance(input_, (list, tuple))
    ranks = ranks_of(group, name)
    inputs: Sequence[Any] = [input_] if one else not_empty(name, input_, ranks, "input_", exchanges)
    first = Arguments(name, inputs[0], ranks, "input_" if one else "input_[0]", exchanges)
    first.tensors = 0 if one else len(inputs)
    with first:
        calls = [first]
        for i in range(1, len(inputs)):
            calls.append(first.beside(inputs[i], _NAMES[min(i, len(_AT))]))
        if inputs[0].is_meta:  # which is not exchanged: the peers wait for the others
            first.device = next((x.device.type for x in inputs if not x.is_meta), "meta")
        _check_alike(first, inputs)
        if len(calls) > len(_AT):
            expected = f"at most {len(_AT)} in one call"
            raise first.error("input_", f"a list of {len(calls)} tensors", expected)
        first.note = note
        at = [""] if one else _AT[: len(inputs)]
        args, grad_scale = layouts(calls, at)
        if out is None and not async_op:
            outputs = apply_together(calls, args, grad_scale, key, kind)
            return outputs[0] if one else list(outputs)
        if kind != MOVE:
            check_summable(first, kind == SUM, async_op and must_record(inputs))
        exchange = Exchange(name, first.group, args, kind=kind, note=note)
        if not async_op:
            outputs = write_to(out, calls, at, exchange)
            return outputs[0] if one else outputs
        outputs, work = launch(calls, at, exchange, out, async_op)
        work._tensors = first.tensors
        return (outputs[0] if one else outputs), work


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
