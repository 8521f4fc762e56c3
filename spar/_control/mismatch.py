# SPDX-License-Identifier: Apache-2.0
"""The error of calls that differ: each rank's call, the first argument that differs, the sizes to pass."""

from __future__ import annotations

import re
from typing import NamedTuple

from .. import _C
from ..errors import ExchangeTimeoutError, MismatchError, SparError, by_rank, ranks_of
from ..sizes import share
from . import status
from .state import GroupState

# a call in words, as csrc/plan/describe.c and spar/_exchange/exchange.py write it
_CALL = re.compile(
    r"(?P<op>[^\[]+) (?P<tensors>\[.*?) of (?P<dtype>torch\.\w+) on (?P<device>\w+)"
    r"(?: (?P<factor>[*/] [^ ,]+))?(?:, gradient (?P<gradient>\w+))?(?:, (?P<notes>.*?))?"
    r"(?: \(call (?P<number>.*)\))?"
)
_TENSOR = re.compile(r"(?P<shape>\[.*?\]): (?P<before>.*) -> (?P<after>.*)")
_LAYOUT = re.compile(r"(?:dim )?(?P<dim>\w+)(?: in (?P<sizes>\[.*?\])(?: \((?P<order>.*)\))?)?")
_GRADIENT = "the gradient"
# Of a place in a view, as csrc/plan/place.c writes it. 0 is not known, and equals any.
CODE, TORCH, RANDOM, NUMPY = _PLACE = (
    "the hash of the code that ran",
    "the state of torch's generators",
    "the state of Python's random",
    "the state of numpy.random",
)
_FIELDS = re.compile(r"(.*), code (\w+), torch (\w+), random (\w+), numpy (\w+)")
_LONGEST = 120  # characters of a value


def first_difference(texts: list[str]) -> str:
    """Return " in ARGUMENT: VALUE on rank 0; VALUE on rank 1", or another end of a sentence for a gradient.

    Empty if a text is not the description of a call, as a stage of a set-up.
    """
    calls = [_arguments(text) for text in texts]
    for name in dict.fromkeys([name for call in calls for name in call]) if all(calls) else ():
        values = [call.get(name) or "none" for call in calls]
        if name in _PLACE:
            known = [value for value in values if value not in ("0", "none")]
            values = [value if value in known else known[0] for value in values] if known else values[:1]
        ranks = ranks_of(values)
        if len(ranks) == 1:
            continue
        if name == _GRADIENT and "none" in ranks:
            return f": the input of {ranks['none']} does not require a gradient, or grad is disabled there"
        differences = [f"{value[:_LONGEST]} on {holders}" for value, holders in ranks.items()]
        return f" in {name}: {'; '.join(differences)}"
    return ""


def _arguments(text: str) -> dict[str, str | None]:
    """Return a call's arguments by name, in the order in which they are compared; empty if it is none."""
    call = _CALL.fullmatch(text)
    if call is None:
        return {}
    tensors = call["tensors"].split("; ")
    arguments = {"the operation": call["op"], "the number of tensors": str(len(tensors))}
    arguments |= {"the dtype": call["dtype"], "the device": call["device"]}
    for i, described in enumerate(tensors):
        which = f" of tensor {i}" if len(tensors) > 1 else ""
        tensor = _TENSOR.fullmatch(described)
        if tensor is None:  # The text was cut.
            arguments[f"the layout{which}"] = described
            continue
        arguments[f"the shape of the whole{which or ' tensor'}"] = tensor["shape"]
        for verb, side in (("gathered", tensor["before"]), ("scattered", tensor["after"])):
            layout = _LAYOUT.fullmatch(side)
            dim, sizes, order = layout.groups() if layout else (side, None, None)
            arguments[f"the {verb} dim{which}"] = dim
            arguments[f"the sizes of the {verb} dim{which}"] = sizes
            arguments[f"the order of the {verb} dim{which}"] = order or "consecutive"
    arguments |= {"the factor": call["factor"], _GRADIENT: call["gradient"]}
    for note in call["notes"].split(", ") if call["notes"] else ():
        name, _, value = note.rpartition(" ")
        arguments[name or note] = value
    place = _FIELDS.fullmatch(call["number"] or "")
    arguments["the number of the call"] = place[1] if place else call["number"]
    return arguments | (dict(zip(_PLACE, place.groups()[1:], strict=True)) if place else {})


def mismatch(
    group: GroupState, op: str, texts: list[str], sizes: tuple[int, list[int]] | None
) -> MismatchError:
    """Return the error that shows each rank's call: texts in rank order, and what gathered_sizes returns."""
    fewest = min(texts, key=texts.count)
    error = MismatchError(
        f"{op} on rank {group.rank}: calls differ between the ranks of group {group.name!r}"
        f"{first_difference(texts)}; nothing was exchanged:\n{by_rank(texts)}",
        **group.where(op),
        ranks=tuple(rank for rank, text in enumerate(texts) if text == fewest),
    )
    error._gathered_sizes = sizes
    return error


# ---- the sizes to pass ----


class GatheredSize(NamedTuple):
    """What a rank holds of the gathered dim: csrc/plan/plan.h. Another process may have sent it."""

    rest: int  # equal on ranks whose calls differ only in `size`; 0: the call has no such dim
    dim: int
    size: int


def gathered_sizes(calls: list[GatheredSize]) -> tuple[int, list[int]] | None:
    """Return the gathered dim and each rank's size of it, if the calls differ only in that."""
    first = calls[0]
    if first.rest == 0 or any(call[:2] != first[:2] for call in calls):
        return None
    return first.dim, [max(call.size, 0) for call in calls]


def add_advice(error: BaseException, tensors: int = 0) -> None:
    """Append to a mismatch's text the sizes that would match, if the ranks differ only in those they hold.

    tensors: how many a list had; 0: the call had a tensor.
    """
    if not isinstance(error, MismatchError) or error._gathered_sizes is None or error.op is None:
        return
    dim, sizes = error._gathered_sizes
    error._gathered_sizes = None
    if (advice := _advice(error.op, sizes, tensors)) is not None:
        error.args = (f"{error}\nThe ranks hold {sizes} of dim {dim}: {advice}",)


def _advice(name: str, sizes: list[int], tensors: int) -> str | None:
    """Return what to pass if the ranks hold these sizes of the gathered dim."""
    value = f"[{sizes}] * {tensors}" if tensors else f"{sizes}"
    total, world = sum(sizes), len(sizes)
    by_rule = [share(total, world, rank) for rank in range(world)]
    return {
        "all_to_all": f"pass gather_size={total}, their sum"
        if sizes == by_rule
        else f"pass gather_sizes={value}",
        "all_gather": f"pass sizes={value}",
        "gather_forward_split_backward": f"pass gather_sizes={sizes}",
        "gather_forward_split_backward_and_unpad": "equal sizes are required",
        "sp_gather": "pass validate=True",
    }.get(name)


# ---- errors of the core ----


def explained(group: GroupState, core: _C.Comm, op: str, error: SparError) -> SparError:
    """Return an error of the C core with what only this side knows."""
    text, rows, sizes = str(error), "", None
    if isinstance(error, MismatchError):
        calls = [call for *_, call in core.ranks() if call is not None]
        if len(calls) == group.world:
            sizes = gathered_sizes([GatheredSize(*gathered) for _, gathered in calls])
            if all(text for text, _ in calls):
                return mismatch(group, op, [text for text, _ in calls], sizes)
    if isinstance(error, ExchangeTimeoutError):
        text += f" (limit {group.timeout:g} s, SPAR_TIMEOUT)"
        last = [str(status.CallStatus.of(*call)) for *_, call, _ in core.ranks()]
        rows = status.listing(last) if last else ""
    result = type(error)(f"{group.title(op)}: {text}{rows}", **group.where(op), ranks=error.ranks)
    if isinstance(result, MismatchError):
        result._gathered_sizes = sizes
    return result
