# SPDX-License-Identifier: Apache-2.0
"""The tables from which generic tests draw: layouts, makers of SequenceLayout, exchanges and transports.

A new one is a row.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from helpers.reference import among, in_runs, packed, rule, zigzag
from spar import _C, SequenceLayout
from spar._exchange import layouts
from spar._exchange.layouts import WHOLE, Args, Layout, by_sizes, even, pair
from spar._group import setup

Draw = Callable[[int, int], int]  # an int from the first to the last
Group = dist.ProcessGroup


def by_rule(total: int, world: int) -> tuple[int, ...]:
    """The size rule, by torch."""
    return tuple(len(part) for part in torch.empty(total, 0).tensor_split(world))


def any_sizes(draw: Draw, total: int, world: int) -> tuple[int, ...]:
    ends = [0, *sorted(draw(0, total) for _ in range(world - 1)), total]
    return tuple(b - a for a, b in itertools.pairwise(ends))


# ---- Kinds of layouts, as the core reads them --------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of layout, named as in csrc/ops/layout.h.

    draw: from a total and the number of ranks, ints after the kind, and the rank that owns each index.
    inner: whether there are inner ranks; then `draw` gets the number of ring ranks, and returns their ints.
    """

    draw: Callable[[Draw, int, int], tuple[Sequence[int], Sequence[int]]]
    inner: bool = False


def _sizes(draw: Draw, total: int, world: int) -> tuple[Sequence[int], Sequence[int]]:
    sizes = any_sizes(draw, total, world)
    return sizes, in_runs(sizes)


def _packed(draw: Draw, total: int, world: int) -> tuple[Sequence[int], Sequence[int]]:
    """Draw sequences by their lengths, or by each rank's size of each."""
    count = draw(1 if total else 0, 4)
    lengths = any_sizes(draw, total, count) if count else ()
    sizes, numbers = [by_rule(length, world) for length in lengths], lengths
    if draw(0, 1):
        sizes = [any_sizes(draw, length, world) for length in lengths]
        numbers = tuple(size[rank] for rank in range(world) for size in sizes)
    return (len(lengths), *numbers), [owner for size in sizes for owner in in_runs(size)]


def _rotated(draw: Draw, total: int, world: int) -> tuple[Sequence[int], Sequence[int]]:
    shift, sizes = draw(0, world - 1), any_sizes(draw, total, world)
    return (shift, *sizes), [(chunk + shift) % world for chunk in in_runs(sizes)]


def _runs(draw: Draw, total: int, world: int) -> tuple[Sequence[int], Sequence[int]]:
    """Draw documents, and runs of each on any ranks."""
    count = draw(1 if total else 0, 4)
    lengths = any_sizes(draw, total, count) if count else ()
    runs: list[tuple[int, int]] = []
    for length in lengths:
        runs += [(draw(0, world - 1), size) for size in any_sizes(draw, length, draw(1, 4))]
    owners = [rank for rank, size in runs for _ in range(size)]
    return (count, *lengths, *itertools.chain(*runs), *map(owners.count, range(world))), owners


KINDS = {
    "even": Kind(lambda draw, total, world: ((total,), in_runs(by_rule(total, world)))),
    "sizes": Kind(_sizes),
    "zigzag": Kind(lambda draw, total, world: ((total,), zigzag(total, world)), inner=True),
    "packed": Kind(_packed, inner=True),
    "rotated": Kind(_rotated),
    "runs": Kind(_runs),
}


def inner_ranks(draw: Draw, world: int) -> int:
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    return divisors[draw(0, len(divisors) - 1)] * (-1) ** draw(0, 1)


def draw_layout(draw: Draw, name: str, dim: int, total: int, world: int) -> tuple[Layout, Sequence[int]]:
    """Draw a layout of a kind, and the rank that owns each index."""
    kind, number = KINDS[name], getattr(layouts, name.upper())
    if not kind.inner:
        numbers, owners = kind.draw(draw, total, world)
        return (dim, number, *numbers), owners
    inner = inner_ranks(draw, world)
    outer = world // abs(inner)
    numbers, owners = kind.draw(draw, total, outer)
    return (dim, number, inner, *numbers), among(owners, outer, inner)


# ---- Makers of SequenceLayout ------------------------------------------------------------------------------

TOTALS = (37, 16, 5, 1, 0)  # odd, a multiple of 2P, fewer tokens than 2P, none
DOCUMENTS = ([5, 0, 9, 1, 14], [2], [0, 0, 3], [])


@dataclass(frozen=True)
class Maker:
    """A class method of SequenceLayout whose layout the arguments and the group decide.

    parameters: its signature.
    examples: arguments for a number of ranks.
    of: arguments for a total of at least 8 and a number of ranks.
    owners: the rank that owns each token, from the number of ranks and the arguments.
    documents: the lengths between which positions restart, from the arguments.
    make: the layout, from the group and the arguments.
    traced: the same in a compiled function.
    """

    parameters: str
    examples: Callable[[int], list[tuple[Any, ...]]]
    of: Callable[[int, int], tuple[Any, ...]]
    owners: Callable[..., Sequence[int]]
    documents: Callable[..., list[int]]
    make: Callable[..., SequenceLayout]
    traced: Callable[..., SequenceLayout] | None = None

    def of_total(self, total: int, group: Group) -> SequenceLayout:
        return self.make(group, *self.of(total, group.size()))

    def in_graph(self, group: Group, *arguments: Any) -> SequenceLayout:
        return (self.traced or self.make)(group, *arguments)


def _ramp(world: int) -> tuple[list[int]]:
    return ([3 * (world - rank) % 4 for rank in range(world)],)


def _of_total(total: int, world: int) -> tuple[int]:
    return (total,)


def _balanced(world: int, lengths: Sequence[int]) -> list[int]:
    """Read the owners from the core's numbers; `test_balance.py` compares these with what they promise."""
    _, *numbers = _C.balance(tuple(lengths), world, 0.05)
    runs = numbers[len(lengths) : len(numbers) - world]
    return [rank for rank, size in zip(runs[::2], runs[1::2], strict=True) for _ in range(size)]


def _runs_of(owners: Sequence[int], world: int) -> list[list[tuple[int, int]]]:
    """Return each rank's runs; neighbours stay apart at every third token."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for i, owner in enumerate(owners):
        of_rank = found[owner]
        if i % 3 and of_rank and of_rank[-1][1] == i:
            of_rank[-1] = of_rank[-1][0], i + 1
        else:
            of_rank.append((i, i + 1))
    return found


def _in_eight(total: int, world: int) -> list[list[tuple[int, int]]]:
    """Return runs of as many chunks for any total; some ranks may have none."""
    return _runs_of([i * (i + 1) // 2 % world for i in in_runs(by_rule(total, 8))], world)


def _owners_of(world: int, runs: list[list[tuple[int, int]]], *_: Any) -> list[int]:
    pairs = [(i, rank) for rank, of_rank in enumerate(runs) for run in of_rank for i in range(*run)]
    return [rank for _, rank in sorted(pairs)]


MAKERS = {
    "even": Maker(
        "total, group=None",
        lambda world: [(total,) for total in TOTALS],
        _of_total,
        lambda world, total: in_runs(rule(total, world)),
        lambda total: [total],
        lambda group, total: SequenceLayout.even(total, group),
    ),
    "zigzag": Maker(
        "total, group=None",
        lambda world: [(total,) for total in TOTALS],
        _of_total,
        lambda world, total: zigzag(total, world),
        lambda total: [total],
        lambda group, total: SequenceLayout.zigzag(total, group),
    ),
    "packed": Maker(
        "lengths, group=None",
        lambda world: [(lengths,) for lengths in DOCUMENTS],
        lambda total, world: ([3, 0, total - 6, 1, 2],),
        lambda world, lengths: packed(lengths, world),
        lambda lengths: lengths,
        lambda group, lengths: SequenceLayout.packed(lengths, group),
    ),
    "balanced": Maker(
        "lengths, group=None, tolerance=0.05",
        lambda world: [(lengths,) for lengths in (*DOCUMENTS, [5] * 2 * world, [1])],
        lambda total, world: ([3, 0, total - 6, 1, 2],),
        _balanced,
        lambda lengths: lengths,
        lambda group, lengths: SequenceLayout.balanced(lengths, group),
    ),
    "of_runs": Maker(
        "runs, group=None",
        lambda world: [(_in_eight(total, world),) for total in TOTALS],
        lambda total, world: (_in_eight(total, world),),
        _owners_of,
        lambda runs: [len(_owners_of(0, runs))],
        lambda group, runs: SequenceLayout.of_runs(runs, group),
    ),
    "joint": Maker(
        "text, image, group=None",
        lambda world: [(7, 25), (0, 6), (3, 0)],
        lambda total, world: (3, total - 3),
        lambda world, text, image: packed([text, image], world),
        lambda text, image: [text + image],
        lambda group, text, image: SequenceLayout.joint(text, image, group),
    ),
    "from_local": Maker(
        "size, group=None",
        lambda world: [_ramp(world)],
        lambda total, world: ([total] if world == 1 else [total - 3, 3, *[0] * (world - 2)],),
        lambda world, sizes: in_runs(sizes),
        lambda sizes: [sum(sizes)],
        lambda group, sizes: SequenceLayout.from_local(sizes[group.rank()], group),
        traced=lambda group, sizes: SequenceLayout("local", tuple(sizes), group),  # from_local communicates
    ),
}


# ---- Exchanges of one tensor, with short arguments ---------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """Which rank owns each index of one dim, in ascending order. None: every rank holds the whole tensor."""

    dim: int = 0
    owners: Sequence[int] | None = None

    def parts(self, x: torch.Tensor, world: int) -> Sequence[torch.Tensor]:
        if self.owners is None:
            return [x] * world
        owners = torch.tensor(self.owners, dtype=torch.int64)
        return [x.index_select(self.dim, (owners == rank).nonzero().flatten()) for rank in range(world)]


@dataclass(frozen=True)
class Move:
    """The arguments of an exchange and of its inverse, and which rank holds what before and after."""

    args: list[int]
    inverse_args: list[int]
    before: Cut
    after: Cut

    def inverted(self) -> Move:
        return Move(self.inverse_args, self.args, self.after, self.before)


@dataclass(frozen=True)
class Exchange:
    """An exchange, by its name in the tests.

    inverse: the name of its inverse.
    numbers: the core's numbers, from the arguments, the extents of a rank's input and the number of ranks.
    move: draws arguments for a shape and a number of ranks; may change an extent that the exchange restricts.
    dims: the places of dims in the arguments.
    """

    inverse: str
    numbers: Callable[[Sequence[int], Sequence[int], int], Args]
    move: Callable[[Draw, list[int], int], Move]
    dims: tuple[int, ...] = (0,)
    min_dims: int = 1


def _extent(extents: Sequence[int], dim: int) -> int:
    return extents[dim] if 0 <= dim < len(extents) else 0  # the core rejects the dim


def _all_to_all_numbers(args: Sequence[int], extents: Sequence[int], world: int) -> Args:
    """args: the scatter dim, the gather dim, the gather size."""
    scatter, gather, total = args
    return pair(even(gather, total), even(scatter, _extent(extents, scatter)))


def _all_to_all(draw: Draw, shape: Sequence[int], world: int) -> Move:
    scatter = draw(0, len(shape) - 1)
    gather = (scatter + draw(1, len(shape) - 1)) % len(shape)
    return Move(
        [scatter, gather, shape[gather]],
        [gather, scatter, shape[scatter]],
        Cut(gather, in_runs(by_rule(shape[gather], world))),
        Cut(scatter, in_runs(by_rule(shape[scatter], world))),
    )


def _split_numbers(args: Sequence[int], extents: Sequence[int], world: int) -> Args:
    """args: the dim, and the size of each rank, or nothing for the size rule."""
    dim, *sizes = args
    total = sizes[0] if sizes else _extent(extents, dim)
    return pair(WHOLE, by_sizes(dim, sizes) if len(sizes) == world else even(dim, total))


def _gather_numbers(args: Sequence[int], extents: Sequence[int], world: int) -> Args:
    """args: the dim, and the size of each rank, or for the size rule the total, or nothing."""
    dim, *sizes = args
    total = sizes[0] if sizes else _extent(extents, dim) * world
    return pair(by_sizes(dim, sizes) if len(sizes) == world > 1 else even(dim, total), WHOLE)


def _split(draw: Draw, shape: Sequence[int], world: int) -> Move:
    dim = draw(0, len(shape) - 1)
    if draw(0, 1):
        sizes = any_sizes(draw, shape[dim], world)
        return Move([dim, *sizes], [dim, *sizes], Cut(), Cut(dim, in_runs(sizes)))
    return Move([dim], [dim, shape[dim]], Cut(), Cut(dim, in_runs(by_rule(shape[dim], world))))


def _gather(draw: Draw, shape: Sequence[int], world: int) -> Move:
    move = _split(draw, shape, world).inverted()
    if shape[move.args[0]] % world == 0 and len(move.args) == 2 and draw(0, 1):
        return replace(move, args=move.args[:1])
    return move


def _zigzag_split(draw: Draw, shape: list[int], world: int) -> Move:
    """Draw a multiple of the number of chunks."""
    dim, inner = draw(0, len(shape) - 1), inner_ranks(draw, world)
    outer = world // abs(inner)
    shape[dim] = 2 * outer * draw(0, max(1, shape[dim] // world))
    args = [dim, inner, shape[dim]]
    return Move(args, args, Cut(), Cut(dim, zigzag(shape[dim], outer, inner)))


def _packed_split(draw: Draw, shape: list[int], world: int) -> Move:
    """Draw sequences that are together up to four times as long as the dim, or none."""
    dim = draw(0, len(shape) - 1)
    shape[dim] = sum(draw(0, shape[dim]) for _ in range(draw(0, 4)))
    (_, _, *ints), owners = draw_layout(draw, "packed", dim, shape[dim], world)
    return Move([dim, *ints], [dim, *ints], Cut(), Cut(dim, owners))


def _exchange(draw: Draw, shape: list[int], world: int) -> Move:
    """Draw two layouts of different dims, or one of which every rank receives the whole."""
    names, dims = list(KINDS), (draw(0, len(shape) - 1), draw(0, len(shape) - 1))
    (before, held), (after, received) = (
        draw_layout(draw, names[draw(0, len(names) - 1)], dim, shape[dim], world) for dim in dims
    )
    gets = Cut(dims[1], received)
    if dims[0] == dims[1]:
        after, gets = WHOLE, Cut()
    return Move(list(pair(before, after)), list(pair(after, before)), Cut(dims[0], held), gets)


def _by_kind(name: str, move: Callable[[Draw, list[int], int], Move]) -> dict[str, Exchange]:
    """Return the split and the gather by a kind of layout; args: the dim, and the layout's ints."""
    number: int = getattr(layouts, name.upper())
    return {
        f"{name}_split": Exchange(
            f"{name}_gather", lambda args, *_: pair(WHOLE, (args[0], number, *args[1:])), move
        ),
        f"{name}_gather": Exchange(
            f"{name}_split",
            lambda args, *_: pair((args[0], number, *args[1:]), WHOLE),
            lambda *drawn: move(*drawn).inverted(),
        ),
    }


EXCHANGES = {
    "all_to_all": Exchange("all_to_all", _all_to_all_numbers, _all_to_all, dims=(0, 1), min_dims=2),
    "split": Exchange("gather", _split_numbers, _split),
    "gather": Exchange("split", _gather_numbers, _gather),
    **_by_kind("zigzag", _zigzag_split),
    **_by_kind("packed", _packed_split),
    "exchange": Exchange("exchange", lambda args, *_: tuple(args), _exchange, dims=(1,)),  # args: the numbers
}


def numbers(name: str, args: Sequence[int], extents: Sequence[int], world: int) -> Args:
    """Return the core's numbers of an exchange for a rank's input with these extents."""
    return EXCHANGES[name].numbers(args, extents, world)


# ---- Transports --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transport:
    """A transport, selected by SPAR_TRANSPORT; in the order of csrc/transports/transport.c.

    devices: whose tensors it serves.
    instead: by fault of helpers/fault_cases.py that cannot occur over it, what occurs instead.
    """

    devices: tuple[str, ...]
    instead: dict[str, str] = field(default_factory=dict)


TRANSPORTS = {
    "shm": Transport(("cpu",)),
    "tcp": Transport(("cpu",)),
    "push": Transport(("cuda",)),
    "nccl": Transport(("cuda",)),
    "torch": Transport(
        ("cpu", "cuda"),
        {"out of memory": "none"},  # no cap; test_local_failures.py covers torch's allocator
    ),
}

# The torch transport where ranks see themselves on hosts of their own.
ACROSS = "torch across hosts"
ACROSS_HOSTS = Transport(("cpu",), {"out of memory": "none"})


def use_transport(name: str, rank: int) -> None:
    """Select a transport of the table, or ACROSS, in a rank's process; over tcp two ranks share a host."""
    host = 1 + rank if name == ACROSS else 1 + rank // 2 if name == "tcp" else 0
    name = "torch" if name == ACROSS else name
    if host:
        setup._host_id = lambda: bytes([host]) * 16
    os.environ["SPAR_TRANSPORT"] = name
