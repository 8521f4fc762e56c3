"""Check several tensors that one call of a public operation exchanges together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _C
from .._group.hints import add_advice
from .._group.member import Place
from .._group.registry import place_of
from ..topology.resolve import Group, process_group
from .arguments import Call
from .exchange import calls_before, report_failure

# what names each tensor of a list in messages; any that is too many is the last
_AT = [f"[{i}]" for i in range(_C.MOST_TENSORS)]
_NAMES = [f"input_{at}" for at in (*_AT, f"[{_C.MOST_TENSORS} or more]")]


def checked_together(
    name: str,
    input_: Any,
    group: Group | Place,
    run: Callable[[list[Call], list[str]], Sequence[torch.Tensor]],
    exchanges: int = 1,
) -> Any:
    """Check a tensor, or several of one dtype and device that one exchange moves; then `run` their calls.

    run: receives the calls, and what names each tensor in messages: "[1]" after an argument's name, or "".

    Returns what `run` returns: a list, or its only tensor if `input_` is not a list.
    """
    one = not isinstance(input_, (list, tuple))
    inputs: Sequence[Any] = [input_] if one else input_
    if not inputs:
        _reject_empty_list(name, group, exchanges)
    first = Call(name, inputs[0], group, "input_" if one else "input_[0]", exchanges)
    calls, at = [first], [""] if one else _AT[: len(inputs)]
    shapes = None
    if len(inputs) > 1:
        shapes = _C.plain_shapes(inputs) if first.known else None
        for i in range(1, len(inputs)):
            what = _NAMES[i] if i < len(_AT) else _NAMES[-1]
            calls.append(first.beside(inputs[i], None if shapes is None else shapes[i], what))
    try:
        if len(calls) > 1 and shapes is None:
            _check_alike(first, inputs)
        if len(calls) > len(_AT):
            expected = f"at most {len(_AT)} in one call"
            raise first.error("input_", f"a list of {len(calls)} tensors", expected)
        outputs = run(calls, at)
        return outputs[0] if one else list(outputs)
    except BaseException as error:
        if not one:
            add_advice(error, len(inputs))
        # meta tensors are not exchanged: the peers wait for the others
        next((call for call in calls if not call.input.is_meta), calls[0]).fail(error)
        raise


def _check_alike(first: Call, inputs: Sequence[torch.Tensor]) -> None:
    """Raise TypeError unless all tensors have the dtype and device of the first."""
    x = inputs[0]
    dtype, on_cpu = x.dtype, x.is_cpu
    for i in range(1, len(inputs)):
        y = inputs[i]
        if y.dtype != dtype or not (y.is_cpu if on_cpu else y.device == x.device):
            found = f"of {y.dtype} on {y.device}"
            raise first.type_error(f"input_[{i}]", found, f"{dtype} on {x.device}, as input_[0]")


def _reject_empty_list(name: str, group: Group | Place, exchanges: int) -> None:
    place = group if isinstance(group, Place) else place_of(process_group(group, name))
    where = f"{name} on rank {place.rank} of {place.world}"
    error = ValueError(f"{where}: input_ is an empty list; expected at least one tensor")
    if exchanges:
        report_failure([(place, calls_before((place,))[0] + exchanges)], name, None, error)
    raise error


def entries(call: Call, what: str, sizes: Any, at: list[str]) -> Sequence[Any]:
    """Return the sizes of each tensor of `checked_together`."""
    if at == [""]:
        return [sizes]
    if sizes is None:
        return [None] * len(at)
    if not isinstance(sizes, (list, tuple)) or len(sizes) != len(at):
        raise call.error(what, f"{sizes!r:.200}", f"{len(at)} entries, one for each tensor, or None")
    return sizes
