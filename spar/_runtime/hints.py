"""Add to an exchange's error what differs between the ranks, and the sizes to pass."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import MismatchError, ranks_by_text
from ..sizes import share


class Gathered(NamedTuple):
    """What a rank holds of the gathered dim: csrc/plan/plan.h. Another process may have sent it."""

    rest: int  # equal on ranks whose calls differ only in `size`; 0: the call has no such dim
    dim: int
    size: int


def gathered_sizes(calls: list[Gathered]) -> tuple[int, list[int]] | None:
    """Return the gathered dim and each rank's size of it, if the calls differ only in that."""
    first = calls[0]
    if first.rest == 0 or any(call[:2] != first[:2] for call in calls):
        return None
    return first.dim, [max(call.size, 0) for call in calls]


# a call in words: spar_call_describe in csrc/transports/transport.c, which ends with items.call_text
_CALL = re.compile(
    r"(?P<op>.+?) (?P<tensors>\[.+) of (?P<dtype>torch\.\w+) on (?P<device>\w+)(?: (?P<factor>[*/] [^ ,]+))?"
    r"(?:, gradient (?P<gradient>\w+))?(?: \(call (?P<number>\d+)\))?"
)
_FIELDS = {
    "op": "operation",
    "number": "number of the call",
    "dtype": "dtype",
    "device": "device",
    "factor": "factor",
    "gradient": "gradient",
}
_TENSOR_FIELDS = ("global shape", "layout of the input", "layout of the output")


def differences(texts: list[str]) -> str:
    """Return a line about the fields in which the ranks' calls differ; texts are in rank order.

    Of different operations it names these alone; of lists of tensors the first that differs. Empty where a
    text is no call, or was cut.
    """
    calls = [_CALL.fullmatch(text) for text in texts]
    found = [call.groupdict("none") for call in calls if call is not None]
    if len(found) < len(texts):
        return ""
    fields = {name: [call[key] for call in found] for key, name in _FIELDS.items()}
    tensors = [call["tensors"].split("; ") for call in found]
    fields["number of tensors"] = [str(len(each)) for each in tensors]
    if len(set(fields["operation"])) > 1:
        fields = {"operation": fields["operation"]}
    elif len(set(fields["number of tensors"])) == 1:
        different = (i for i, each in enumerate(zip(*tensors, strict=True)) if len(set(each)) > 1)
        first = next(different, 0)
        parts = [re.split(": | -> ", each[first]) for each in tensors]
        of = f" of tensor {first}" if len(tensors[0]) > 1 else ""
        if all(len(part) == len(_TENSOR_FIELDS) for part in parts):
            named = zip(_TENSOR_FIELDS, zip(*parts, strict=True), strict=True)
            fields |= {f"{name}{of}": list(values) for name, values in named}
    by_text = {name: ranks_by_text(values) for name, values in fields.items() if len(set(values)) > 1}
    shown = [
        f"{name}: " + ", ".join(f"{text} (rank {ranks})" for text, ranks in those.items())
        for name, those in by_text.items()
    ]
    return "\nThey differ in " + "; ".join(shown) if shown else ""


def add_advice(error: BaseException) -> None:
    """Append to a mismatch's text the sizes that would match, if the ranks differ only in those they hold."""
    if not isinstance(error, MismatchError) or error._gathered_sizes is None or error.op is None:
        return
    dim, sizes = error._gathered_sizes
    error._gathered_sizes = None
    if (advice := _advice(error.op, sizes)) is not None:
        error.args = (f"{error}\nThe ranks hold {sizes} of dim {dim}: {advice}",)


def _advice(name: str, sizes: list[int]) -> str | None:
    """Return what to pass if the ranks hold these sizes of the gathered dim."""
    total, world = sum(sizes), len(sizes)
    by_rule = [share(total, world, rank) for rank in range(world)]
    return {
        "all_to_all": f"pass gather_size={total}, their sum"
        if sizes == by_rule
        else f"pass gather_sizes={sizes}",
        "all_gather": f"pass sizes={sizes}",
        "gather_forward_split_backward": f"pass gather_sizes={sizes}",
        "gather_forward_split_backward_and_unpad": "equal sizes are required",
        "sp_gather": "pass validate=True",
    }.get(name)
