# SPDX-License-Identifier: Apache-2.0
"""Which part of a whole tensor a rank holds: an attribute of an ordinary tensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .._attention.spans import Spans
from .._exchange.gather_plan import GatherPlan
from .._exchange.layouts import pieces, shards
from ..sequence_layout import SequenceLayout, numbers_of
from ..topology.groups_by_name import ParallelState
from . import dtensors
from .memory import in_order_of
from .nested import tensors_in

_T = TypeVar("_T")
_SHARD = "_spar_shard"
_EVEN_ENOUGH = 1.25  # the largest share of a rank, in equal shares
_UNEVEN = 1.05  # the largest share of a rank, in that of an even part, of what is not moved to it


class Uneven(int):
    """The length of a sequence that is divided among the ranks, in their order, otherwise than by the layout.

    `split` cuts such pieces from a sequence: their tokens stay on the ranks that hold them.

    Attributes:
        sizes: the tokens of each rank.
    """

    sizes: tuple[int, ...]

    def __new__(cls, sizes: tuple[int, ...]) -> Uneven:
        made = super().__new__(cls, sum(sizes))
        made.sizes = sizes
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Uneven) and self.sizes == other.sizes

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.sizes)

    def __repr__(self) -> str:
        return f"{int(self)} as {self.sizes}"


class Part:
    """A dim of a tensor that has the tokens, of which each rank holds its own.

    The dim is (outer, tokens, inner), flattened. Its tokens are those of one or several sequences that were
    joined, each of which lies on the ranks by the layout of `Parts`, which makes each part once: equal parts
    are the same object. A dim that is one run on each rank may be padded: the first rank has rows before it,
    and the last that has tokens rows behind it.

    Attributes:
        dim: the dim, counted from the first.
        lengths: of the sequences; one alone may be `Uneven`.
        padding: the rows before and behind the tokens.
        runs: where this rank's runs of tokens begin, and how many they are.
        whole, local: the dim's size in the whole tensor, and on this rank.
    """

    __slots__ = (
        "__weakref__",
        "_shards",
        "dim",
        "held",
        "inner",
        "lengths",
        "local",
        "outer",
        "padding",
        "parts",
        "runs",
        "whole",
    )

    def __init__(
        self,
        parts: Parts,
        dim: int,
        lengths: tuple[int, ...],
        outer: int,
        inner: int,
        padding: tuple[int, int],
    ) -> None:
        self.parts = parts
        self.dim, self.lengths, self.outer, self.inner, self.padding = dim, lengths, outer, inner, padding
        self.runs, self.held = parts.runs_of(lengths), parts.held(lengths)
        self.whole = outer * sum(lengths) * inner + sum(padding)
        self.local = outer * self.held * inner + self._padded(parts.rank)
        self._shards: dict[tuple[int, ...], Shard] = {}

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def is_plain(self) -> bool:
        """Whether the dim has tokens and nothing else."""
        return self.outer == self.inner == 1 and not self.is_padded

    @property
    def is_sequence(self) -> bool:
        """Whether the dim has the tokens of one sequence, which lies as its layout says."""
        return self.is_plain and len(self.lengths) == 1 and not self.is_uneven

    @property
    def is_uneven(self) -> bool:
        return isinstance(self.lengths[0], Uneven) if self.lengths else False

    @property
    def even(self) -> Part:
        """The part of the same dim whose tokens lie on the ranks by the layout."""
        return self.of((self.tokens,)) if self.is_uneven else self

    @property
    def balanced(self) -> Part:
        """The part of the same dim with even numbers of rows on the ranks, if this one is uneven."""
        even = self.parts.part(self.dim, (self.whole,))
        return even if max(self.sizes) > _UNEVEN * max(even.sizes) else self

    @property
    def is_everywhere(self) -> bool:
        """Whether each rank has rows."""
        return self.parts.is_tile or all(self.sizes)

    @property
    def is_padded(self) -> bool:
        return self.padding != (0, 0)

    @property
    def last(self) -> int:
        """The last rank that has tokens, if each has one run of them."""
        return max(0, min(self.tokens, self.parts.world) - 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The dim's size on each rank."""
        ranks = range(self.parts.world)
        return tuple(
            [self.outer * self.parts.held(self.lengths, r) * self.inner + self._padded(r) for r in ranks]
        )

    def _padded(self, rank: int) -> int:
        """Return how many rows of padding a rank has."""
        before, after = self.padding
        return before * (rank == 0) + after * (rank == self.last)

    @property
    def rows(self) -> SequenceLayout | None:
        """How the dim's rows lie on the ranks, in one run on each; None if they do not."""
        if self.outer > 1 or len(self.lengths) > 1 or not self.parts.is_in_order:
            return None
        return SequenceLayout("local", self.sizes, self.parts.group)

    @property
    def layout(self) -> SequenceLayout | None:
        """How the dim lies on the ranks; None if no layout has such runs."""
        if self.is_plain and (len(self.lengths) == 1 or self.parts.is_in_order):
            return self.parts.layout(self.lengths)
        return self.rows

    @property
    def plain(self) -> Part:
        """The part of the same dim that has a layout: of one sequence where several have none."""
        is_one = self.is_plain and (len(self.lengths) == 1 or self.parts.is_in_order)
        return self if is_one else self.parts.part(self.dim, (self.whole,))

    def at(self, dim: int) -> Part:
        """Return the same part of another dim."""
        if dim == self.dim:
            return self
        return self.parts.part(dim, self.lengths, self.outer, self.inner, self.padding)

    def of(self, lengths: tuple[int, ...]) -> Part:
        """Return the part of other sequences in the same dim."""
        return self.parts.part(self.dim, lengths, self.outer, self.inner)

    def repeated(self, outer: int, inner: int) -> Part:
        return self.parts.part(self.dim, self.lengths, self.outer * outer, self.inner * inner)

    def padded(self, before: int, after: int) -> Part:
        """Return the part with more rows before and behind the tokens."""
        padding = self.padding[0] + before, self.padding[1] + after
        return self.parts.part(self.dim, self.lengths, self.outer, self.inner, padding)

    def shard(self, local: Sequence[int]) -> Shard:
        """Return what a tensor of a local shape is."""
        shape = *local[: self.dim], self.whole, *local[self.dim + 1 :]
        found = self._shards.get(shape)
        if found is None:
            found = self._shards[shape] = Shard(self, torch.Size(shape))
        return found

    def between(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return which sequences lie in tokens start to before stop; None if one lies in them partly."""
        ends = [0]
        for length in self.lengths:
            ends.append(ends[-1] + length)
        if start not in ends or stop not in ends or stop < start:
            return None
        first = ends.index(start)
        return first, max(first, len(ends) - 1 - ends[::-1].index(stop))

    def __deepcopy__(self, memo: object) -> Part:
        return self

    def __repr__(self) -> str:
        around = "" if self.is_plain else f", outer={self.outer}, inner={self.inner}"
        around += f", padding={self.padding}" if self.is_padded else ""
        return f"Part(dim={self.dim}, lengths={list(self.lengths)}{around})"


class Shard:
    """What a tensor is: a part of a whole tensor, of this shape. Equal ones are the same object."""

    __slots__ = ("part", "shape")

    def __init__(self, part: Part, shape: torch.Size) -> None:
        self.part, self.shape = part, shape

    def __deepcopy__(self, memo: object) -> Shard:
        return self


class Parts:
    """The parts of a group's ranks.

    method: of `spar.attention`; None lets each attention choose.
    state: of the ring and ulysses groups over which sequences lie; None: over the group.
    layout: "even" or "zigzag", of all sequences; or that of sequences of its length, where others are even.
    mask: the caller's spans of such a sequence, if it passed any.

    Attributes:
        given: the layout of sequences of its length; None if all are of one kind.
        is_in_order: whether each rank has one run of each sequence, in the order of the ranks.
        is_tile, is_later: whether they are tiles of this rank's parts (`TileParts`, `LaterParts`).
    """

    is_tile = is_later = False

    def __init__(
        self,
        group: Any,
        world: int,
        rank: int,
        method: str | None = None,
        state: ParallelState | None = None,
        layout: str | SequenceLayout = "even",
        mask: Spans | None = None,
    ) -> None:
        self.mask = mask
        self.group, self.world, self.rank, self.method, self.state = group, world, rank, method, state
        self._kind = layout
        self.given = layout if isinstance(layout, SequenceLayout) else None
        self.is_in_order = state is None and layout == "even"
        self.device = torch.device("cpu")  # of the model
        # As long as tensors and plans have them: lengths may differ in each forward.
        self._made: WeakValueDictionary[tuple[object, ...], Part] = WeakValueDictionary()
        self._layouts: dict[tuple[int, ...], SequenceLayout] = {}
        self.moves: dict[tuple[Part, Part, int], GatherPlan | None] = {}  # the plans of `moved`
        self.indexes: dict[tuple[object, ...], Any] = {}  # of this forward: what `row_table` has found
        self.tiles: dict[tuple[tuple[int, ...], int], Any] = {}  # `TileParts`, by their lengths and size

    def __deepcopy__(self, memo: object) -> Parts:
        return self

    def forget(self) -> None:
        """Drop what was found for lengths that may not come again."""
        self._layouts.clear()
        self.moves.clear()
        self.tiles.clear()

    def part(
        self,
        dim: int,
        lengths: tuple[int, ...],
        outer: int = 1,
        inner: int = 1,
        padding: tuple[int, int] = (0, 0),
    ) -> Part:
        key = dim, lengths, outer, inner, padding
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = Part(self, *key)
        return found

    def layout(self, lengths: tuple[int, ...]) -> SequenceLayout:
        """Return how the sequences lie on the ranks: several in order only."""
        found = self._layouts.get(lengths)
        if found is None:
            found = self._layouts[lengths] = self._layout(lengths)
        return found

    def _layout(self, lengths: tuple[int, ...]) -> SequenceLayout:
        if len(lengths) != 1:
            return SequenceLayout("joint", (1, len(lengths), *lengths), self.group)
        if isinstance(lengths[0], Uneven):
            return SequenceLayout("local", lengths[0].sizes, self.group)
        if self.state is not None:
            return SequenceLayout.hybrid(lengths[0], self.state)
        if self.given is not None and lengths[0] == self.given.total:
            return self.given
        if self._kind == "zigzag":
            return SequenceLayout.zigzag(lengths[0], self.group)
        return SequenceLayout.even(lengths[0], self.group)

    def length(self, sizes: Sequence[int]) -> int:
        """Return the length of a sequence of which the ranks, in their order, hold such numbers of tokens."""
        uneven = Uneven(tuple(sizes))
        is_even = self.is_in_order and uneven >= self.world
        is_even = is_even and self.layout((int(uneven),)).sizes == uneven.sizes
        return int(uneven) if is_even else uneven

    def runs(self, length: int, rank: int | None = None) -> list[tuple[int, int]]:
        """Return where a rank's runs of a sequence begin, and their tokens; by default this rank's."""
        layout, rank = numbers_of(self.layout((length,)), 0), self.rank if rank is None else rank
        return [(run.start, run.size) for run in pieces(layout, self.world, rank)]

    def runs_of(self, lengths: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return this rank's runs of sequences that are joined, in all of which their starts count."""
        starts = accumulate(lengths, initial=0)
        return [
            (at + start, size)
            for at, length in zip(starts, lengths, strict=False)
            for start, size in self.runs(length)
        ]

    def held(self, lengths: tuple[int, ...], rank: int | None = None) -> int:
        """Return how many tokens of sequences a rank has; by default this rank."""
        return sum(size for length in lengths for _, size in self.runs(length, rank))

    def shard(self, x: Tensor, part: Part) -> Tensor:
        """Keep this rank's part of a whole tensor: a view where it is one run of tokens.

        In backward each rank's gradient is its part's, and zero elsewhere: their mean over the ranks is right
        if the gradients of parts are those of the sum of all ranks' losses.
        """
        dim, flat = part.dim, x
        if part.is_padded:
            return mark(x.narrow(dim, sum(part.sizes[: self.rank]), part.local), part)
        if not part.is_plain:
            flat, dim = x.unflatten(dim, (part.outer, part.tokens, part.inner)), dim + 1
        kept = [flat.narrow(dim, start, size) for start, size in part.runs or [(0, 0)]]
        out = kept[0] if len(kept) == 1 else torch.cat(kept, dim)
        return mark(out if part.is_plain else out.flatten(part.dim, part.dim + 2), part)

    def check_by_token(self, name: str) -> None:
        """Raise if a function that is not computed token by token cannot run."""

    def gather(self, x: Tensor) -> Tensor:
        """Return the whole of a tensor of which each rank has its part; ranks' gradients are summed."""
        part = part_of(x)
        if part is None:
            return x
        if part.parts is not self:  # The part of a forward with another layout.
            return part.parts.gather(x)
        rows = part.rows
        if dtensors.is_distributed(x):
            return dtensors.gathered(x, part.dim, lambda local: self.gather(mark(local, part)))
        if part.is_plain:
            whole = self._gathered(x, part.lengths, part.dim)
        elif rows is not None:
            whole = rows.all_gather(x, part.dim)
        else:
            flat: Tensor = x.unflatten(part.dim, (part.outer, part.held, part.inner))
            whole = self._gathered(flat, part.lengths, part.dim + 1).flatten(part.dim, part.dim + 2)
        return in_order_of(whole, x)

    def _gathered(self, x: Tensor, lengths: tuple[int, ...], dim: int) -> Tensor:
        if len(lengths) < 2 or self.is_in_order:
            return self.layout(lengths).gather(x, dim, backward="sum")
        shards = x.split([self.held((length,)) for length in lengths], dim)
        found = [self._gathered(y, (length,), dim) for y, length in zip(shards, lengths, strict=True)]
        return torch.cat(found, dim)


def evenest(parts: Sequence[Part]) -> Part | None:
    """Return the first of parts that lies evenly enough on the ranks, else that which lies most evenly."""

    def excess(part: Part) -> float:
        return max(part.sizes) * part.parts.world / max(part.whole, 1)

    even = next((part for part in parts if excess(part) <= _EVEN_ENOUGH), None)
    return even or min(parts, key=excess, default=None)


def placement(layout: SequenceLayout) -> SequenceLayout:
    """Return a layout of one sequence, without documents, whose tokens lie as in this one."""
    if not layout.is_packed:
        return layout
    held = shards(numbers_of(layout, 0), layout.group.size())
    runs = [[(run.start, run.start + run.size) for run in own] for own in held]
    return SequenceLayout.of_runs(runs, layout.group)


def part_of(x: Any) -> Part | None:
    """Return which part of a whole tensor x is; None if it is whole, or no tensor."""
    shard = shard_of(x)
    return None if shard is None else shard.part


def shard_of(x: Any) -> Shard | None:
    """Return what a tensor is; None if it is whole, or no tensor."""
    return getattr(x, _SHARD, None) if isinstance(x, Tensor) else None


def has_part(*values: Any) -> bool:
    """Whether a tensor in nested values is a part."""
    return any(part_of(x) is not None for x in tensors_in(*values))


def is_uneven(x: Any) -> bool:
    """Whether x is a part of an `Uneven` sequence."""
    part = part_of(x)
    return part is not None and part.is_uneven


def mark(x: _T, part: Part | None) -> _T:
    """Say which part of a whole tensor x is."""
    if isinstance(x, Tensor) and (part is not None or hasattr(x, _SHARD)):
        setattr(x, _SHARD, None if part is None else part.shard(x.shape))
    return x


def whole_shape(x: Tensor) -> list[int]:
    """Return the shape of the whole tensor of which x is a part."""
    shard = getattr(x, _SHARD, None)
    return list(x.shape if shard is None else shard.shape)


def whole_numel(x: Tensor) -> int:
    return prod(whole_shape(x))
