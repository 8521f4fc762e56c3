"""Short names for the kinds of exchanges, and their layouts as the core reads them."""

from __future__ import annotations

from collections.abc import Sequence

from spar._exchange.layouts import WHOLE, Args, Layout, by_sizes, even, packed, pair, zigzag

OPS = {  # name -> name of the inverse
    "all_to_all": "all_to_all",
    "split": "gather",
    "gather": "split",
    "zigzag_split": "zigzag_gather",
    "zigzag_gather": "zigzag_split",
    "packed_split": "packed_gather",
    "packed_gather": "packed_split",
    "exchange": "exchange",
}


def numbers(op: str, args: Sequence[int], extents: Sequence[int], world: int) -> Args:
    """Return the core's numbers for a rank's input with these extents.

    args: all_to_all: (scatter dim, gather dim, gather size); split, gather: (dim, size of each rank...),
        (dim, total) or (dim,) for the size rule; zigzag: (dim, inner, total); packed: (dim, inner, sequences,
        numbers...); exchange: the numbers.
    """
    if op == "exchange":
        return tuple(args)
    if op == "all_to_all":
        scatter, gather, total = args
        return pair(even(gather, total), even(scatter, _extent(extents, scatter)))
    shards = _shards(op, args, extents, world)
    return pair(WHOLE, shards) if op.endswith("split") else pair(shards, WHOLE)


def _extent(extents: Sequence[int], dim: int) -> int:
    return extents[dim] if 0 <= dim < len(extents) else 0  # the core rejects the dim


def _shards(op: str, args: Sequence[int], extents: Sequence[int], world: int) -> Layout:
    dim, *rest = args
    if op.startswith("zigzag"):
        inner, total = rest
        return zigzag(dim, total, inner)
    if op.startswith("packed"):
        inner, sequences, *lengths = rest
        return packed(dim, sequences, lengths, inner)
    if len(rest) == world and (op == "split" or world > 1):
        return by_sizes(dim, rest)
    return even(dim, rest[0] if rest else _extent(extents, dim) * (1 if op == "split" else world))
