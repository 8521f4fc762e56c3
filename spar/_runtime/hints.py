"""Add to an exchange's error the public operation's name, and the sizes to pass."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import MismatchError, SparError
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


def name_operation(error: BaseException, name: str) -> None:
    """Replace the core's op by the public operation's name in an error; append the sizes that would match."""
    if not isinstance(error, SparError) or error.op is None:
        return
    text = str(error)
    if text.startswith(error.op):
        text = name + text[len(error.op) :]
    if isinstance(error, MismatchError) and error._gathered_sizes is not None:
        dim, sizes = error._gathered_sizes
        if (advice := _advice(name, sizes)) is not None:
            text += f"\nThe ranks hold {sizes} of dim {dim}: {advice}"
    error.args = (text,)
    error.op = name


def _advice(name: str, sizes: list[int]) -> str | None:
    """Return what to pass if the ranks hold these sizes of the gathered dim."""
    total, world = sum(sizes), len(sizes)
    by_rule = [share(total, world, rank) for rank in range(world)]
    exact = f"pass gather_size={total}, their sum"
    other = f"all_to_all needs equal sizes, or gather_size={total} and the sizes {by_rule}"
    return {
        "all_to_all": exact if sizes == by_rule else other,
        "gather_forward_split_backward": f"pass gather_sizes={sizes}",
        "gather_forward_split_backward_and_unpad": "equal sizes are required",
        "sp_gather": "pass validate=True",
    }.get(name)
