"""Add to an exchange's error the public operation's name, and the sizes to pass."""

from __future__ import annotations

import re

from ..errors import MismatchError, SparError
from ..sizes import share

# A line of `errors.by_rank` with a call that gathers, in the words of csrc/plan/describe.c
_ROW = re.compile(r"^  rank ([\d, ]+): (all_to_all|gather) \[(.*?)\]: dim (\d+) in \[(.*?)\] -> (.*)$", re.M)


def name_operation(error: BaseException, name: str) -> None:
    """Replace the core's op by the public operation's name in an error; append the sizes that would match."""
    if not isinstance(error, SparError) or error.op is None:
        return
    text = str(error)
    if text.startswith(error.op):
        text = name + text[len(error.op) :]
    held = _sizes_held(text) if isinstance(error, MismatchError) else None
    advice = None if held is None else _advice(name, held[1])
    if held is not None and advice is not None:
        text += f"\nThe ranks hold {held[1]} of dim {held[0]}: {advice}"
    error.args = (text,)
    error.op = name


def _sizes_held(text: str) -> tuple[int, list[int]] | None:
    """Return the gathered dim and each rank's size of it, if the calls of a MismatchError differ in that.

    None if the caller passed the sizes: a call then expects different sizes of its ranks.
    """
    rows = _ROW.findall(text)
    if len(rows) != text.count("\n"):
        return None
    calls, by_rank, dim = set(), {}, 0
    for ranks, op, extents, of_dim, sizes, rest in rows:
        shape, expected, dim = extents.split(", "), sizes.split(", "), int(of_dim)
        if len(set(expected)) > 1:
            return None
        shape[dim] = ""
        calls.add((op, *shape, dim, rest))
        by_rank.update(dict.fromkeys(map(int, ranks.split(", ")), int(expected[0])))
    return (dim, [by_rank[rank] for rank in sorted(by_rank)]) if len(calls) == 1 else None


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
