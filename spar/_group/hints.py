"""Add to an exchange's error the sizes to pass."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import MismatchError
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
    given = f"[{sizes}] * {tensors}" if tensors else f"{sizes}"
    total, world = sum(sizes), len(sizes)
    by_rule = [share(total, world, rank) for rank in range(world)]
    return {
        "all_to_all": f"pass gather_size={total}, their sum"
        if sizes == by_rule
        else f"pass gather_sizes={given}",
        "all_gather": f"pass sizes={given}",
        "gather_forward_split_backward": f"pass gather_sizes={sizes}",
        "gather_forward_split_backward_and_unpad": "equal sizes are required",
        "sp_gather": "pass validate=True",
    }.get(name)
