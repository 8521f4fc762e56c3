"""The shape rules of the core's ops, repeated here for symbolic ints; their inverses and selections.

They are arithmetic without branches on sizes, so that symbolic sizes stay symbolic under torch.compile.
csrc/ops has the same rules for concrete sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from ..sizes import share

Args = tuple[int, ...]
_F = TypeVar("_F", bound=Callable[..., Any])


def constant(function: _F) -> _F:
    """Mark a function as torch.compiler.assume_constant_result does, without importing torch._dynamo (1.4 s).

    torch.compile evaluates the function while tracing. Its result is a constant of the compiled code, which
    dynamo guards by the identity of the group. A look-up that dynamo traced would not be guarded.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Op(NamedTuple):
    """One op of the core.

    Attributes:
        shape: shape(sizes, args, world, rank) turns the input's sizes into the output's, in place.
        inverse: inverse(input sizes, args, world) returns the op that undoes it, and its args.
        local: whether it communicates nothing.
        select: select(input, args, world, rank) returns a local op's output in torch ops, as a view if
            possible; None if they cannot be traced.
    """

    shape: Callable[[list[int], Args, int, int], None]
    inverse: Callable[[Args, Args, int], tuple[str, Args]]
    local: bool = False
    select: Callable[[torch.Tensor, Args, int, int], torch.Tensor] | None = None


def share_start(total: int, world: int, rank: int) -> int:
    """Return the offset of `rank`'s shard of `total`, whose size is `share`."""
    return rank * (total // world) + min(rank, total % world)


# ---- all_to_all: (scatter dim, gather dim, gather size) ----


def _all_to_all_shape(shape: list[int], args: Args, world: int, rank: int) -> None:
    scatter, gather, gather_size = args
    shape[scatter] = share(shape[scatter], world, rank)
    shape[gather] = gather_size


# ---- split, gather: (dim, size of each rank...); by the size rule split: (dim,), gather: (dim, total) ----


def _split_shape(shape: list[int], args: Args, world: int, rank: int) -> None:
    dim, *sizes = args
    shape[dim] = sizes[rank] if sizes else share(shape[dim], world, rank)


def _gather_shape(shape: list[int], args: Args, world: int, rank: int) -> None:
    dim, *sizes = args
    shape[dim] = sum(sizes) if sizes else shape[dim] * world


def _select_split(input_: torch.Tensor, args: Args, world: int, rank: int) -> torch.Tensor:
    dim, *sizes = args
    if sizes:
        return input_.narrow(dim, sum(sizes[:rank]), sizes[rank])
    total = input_.size(dim)
    return input_.narrow(dim, share_start(total, world, rank), share(total, world, rank))


# ---- zigzag_split, zigzag_gather: (dim, inner, total) ----


def _zigzag_split_shape(shape: list[int], args: Args, world: int, rank: int) -> None:
    dim, inner, total = args
    outer = world // inner
    shape[dim] = share(total // outer, inner, rank // outer)


def _zigzag_gather_shape(shape: list[int], args: Args, world: int, rank: int) -> None:
    shape[args[0]] = args[2]


def _select_zigzag(input_: torch.Tensor, args: Args, world: int, rank: int) -> torch.Tensor:
    """Return the inner rank's share of the ring rank's two chunks, which are laid one behind the other."""
    dim, inner, total = args
    outer = world // inner
    ring, chunk = rank % outer, total // (2 * outer)
    begin = share_start(2 * chunk, inner, rank // outer)
    end = begin + share(2 * chunk, inner, rank // outer)
    first, second = ring * chunk, (2 * outer - 1 - ring) * chunk
    parts = []
    if begin < chunk:
        parts.append(input_.narrow(dim, first + begin, min(end, chunk) - begin))
    if end > chunk:
        parts.append(input_.narrow(dim, second + max(begin, chunk) - chunk, end - max(begin, chunk)))
    return torch.cat(parts, dim) if parts else input_.narrow(dim, 0, 0)


# ---- packed_split, packed_gather: (dim, inner, sequences, lengths... or sizes on each ring rank...) ----


def _packed_sizes(args: Args, world: int, rank: int) -> list[int]:
    """Return the ring rank's local size of each sequence."""
    _, inner, sequences, *numbers = args
    outer = world // inner
    ring = rank % outer
    if sequences == len(numbers):
        return [share(length, outer, ring) for length in numbers]
    return numbers[ring * sequences : (ring + 1) * sequences]


def _packed_split_shape(shape: list[int], args: Args, world: int, rank: int) -> None:
    dim, inner = args[:2]
    shape[dim] = share(sum(_packed_sizes(args, world, rank)), inner, rank // (world // inner))


def _packed_gather_shape(shape: list[int], args: Args, world: int, rank: int) -> None:
    shape[args[0]] = sum(args[3:])


def packed_index(args: Args, world: int, rank: int) -> torch.Tensor:
    """Return the global index of each item that `rank` holds, for devices on which C does not copy."""
    _, inner, sequences, *flat = args
    outer = world // inner
    ring, numbers = rank % outer, torch.tensor(flat, dtype=torch.int64)
    if sequences == len(flat):
        numbers = numbers // outer + (torch.arange(outer)[:, None] < numbers % outer)
    table = numbers.reshape(outer, sequences)
    ends = table.T.reshape(-1).cumsum(0).reshape(sequences, outer)  # in the whole, of each part
    sizes = table[ring]
    starts = ends[:, ring] - sizes - (sizes.cumsum(0) - sizes)
    index = starts.repeat_interleave(sizes) + torch.arange(int(sizes.sum()))
    begin = share_start(len(index), inner, rank // outer)
    return index[begin : begin + share(len(index), inner, rank // outer)]


OPS = {
    "all_to_all": Op(
        _all_to_all_shape,
        lambda shape, args, world: ("all_to_all", (args[1], args[0], shape[args[0]])),
    ),
    "split": Op(
        _split_shape,
        lambda shape, args, world: ("gather", args if len(args) > 1 else (args[0], shape[args[0]])),
        local=True,
        select=_select_split,
    ),
    "gather": Op(
        _gather_shape,
        lambda shape, args, world: ("split", args if len(args) == 1 + world else args[:1]),
    ),
    "zigzag_split": Op(
        _zigzag_split_shape,
        lambda shape, args, world: ("zigzag_gather", args),
        local=True,
        select=_select_zigzag,
    ),
    "zigzag_gather": Op(_zigzag_gather_shape, lambda shape, args, world: ("zigzag_split", args)),
    "packed_split": Op(_packed_split_shape, lambda shape, args, world: ("packed_gather", args), local=True),
    "packed_gather": Op(_packed_gather_shape, lambda shape, args, world: ("packed_split", args)),
}
