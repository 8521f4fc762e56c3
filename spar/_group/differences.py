"""Name the first argument in which calls differ, from their texts: csrc/plan/describe.c and `call_text`."""

from __future__ import annotations

import re

from ..errors import ranks_of

_CALL = re.compile(
    r"(?P<op>[^\[]+) (?P<tensors>\[.*?) of (?P<dtype>torch\.\w+) on (?P<device>\w+)"
    r"(?: (?P<factor>[*/] [^ ,]+))?(?:, gradient (?P<gradient>\w+))?(?:, (?P<notes>.*?))?"
    r"(?: \(call (?P<number>.*)\))?"
)
_TENSOR = re.compile(r"(?P<shape>\[.*?\]): (?P<before>.*) -> (?P<after>.*)")
_LAYOUT = re.compile(r"(?:dim )?(?P<dim>\w+)(?: in (?P<sizes>\[.*?\])(?: \((?P<order>.*)\))?)?")
_GRADIENT = "the gradient"
_LONGEST = 120  # characters of a value


def first_difference(texts: list[str]) -> str:
    """Return " in ARGUMENT: VALUE on rank 0; VALUE on rank 1", or another end of a sentence for a gradient.

    Empty if a text is not the description of a call, as a stage of a set-up.
    """
    calls = [_arguments(text) for text in texts]
    for name in dict.fromkeys([name for call in calls for name in call]) if all(calls) else ():
        values = [call.get(name) or "none" for call in calls]
        ranks = ranks_of(values)
        if len(ranks) == 1:
            continue
        if name == _GRADIENT and "none" in ranks:
            return f": the input of {ranks['none']} does not require a gradient, or grad is disabled there"
        shown = [f"{value[:_LONGEST]} on {where}" for value, where in ranks.items()]
        return f" in {name}: {'; '.join(shown)}"
    return ""


def _arguments(text: str) -> dict[str, str | None]:
    """Return a call's arguments by name, in the order in which they are compared; empty if it is none."""
    call = _CALL.fullmatch(text)
    if call is None:
        return {}
    tensors = call["tensors"].split("; ")
    found = {"the operation": call["op"], "the number of tensors": str(len(tensors))}
    found |= {"the dtype": call["dtype"], "the device": call["device"]}
    for i, described in enumerate(tensors):
        which = f" of tensor {i}" if len(tensors) > 1 else ""
        tensor = _TENSOR.fullmatch(described)
        if tensor is None:  # it was cut
            found[f"the layout{which}"] = described
            continue
        found[f"the shape of the whole{which or ' tensor'}"] = tensor["shape"]
        for verb, side in (("gathered", tensor["before"]), ("scattered", tensor["after"])):
            layout = _LAYOUT.fullmatch(side)
            dim, sizes, order = layout.groups() if layout else (side, None, None)
            found[f"the {verb} dim{which}"] = dim
            found[f"the sizes of the {verb} dim{which}"] = sizes
            found[f"the order of the {verb} dim{which}"] = order or "consecutive"
    found |= {"the factor": call["factor"], _GRADIENT: call["gradient"]}
    for note in call["notes"].split(", ") if call["notes"] else ():
        name, _, value = note.rpartition(" ")
        found[name or note] = value
    return found | {"the number of the call": call["number"]}
