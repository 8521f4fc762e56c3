# SPDX-License-Identifier: Apache-2.0
"""How one sequence lies on the ranks of a group: an immutable value, passed as an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast, overload

import torch
import torch.distributed as dist

from . import _C
from ._checks import check_int, check_lengths, check_number, check_sum, check_type
from ._control.process_group import group_name
from ._deprecated import warn_deprecated
from ._exchange.arguments import Arguments, Sizes, cumulative_hint, from_cumulative
from ._exchange.cut_and_join import without_halo
from ._exchange.exchange import ONE
from ._exchange.gather_plan import in_documents
from ._exchange.gathering_op import gather_runs
from ._exchange.grad_scale import NOT_GIVEN, GradScale
from ._exchange.layouts import (
    EVEN,
    LISTED,
    PACKED,
    RUNS,
    SIZES,
    WHOLE,
    ZIGZAG,
    Layout,
    extent,
    listed_index,
    pieces,
    select,
    total_of,
)
from ._exchange.rows import Rows, rows_of
from ._exchange.runs import numbers_of_runs
from ._exchange.whole_sequence import Backward, gather, shard_or_gather
from ._group.registry import place_of
from .topology import topology
from .topology.absent import group_or_name
from .topology.groups_by_name import ParallelState
from .topology.hybrid import ring_and_ulysses
from .topology.resolve import Group, process_group

__all__ = ["SequenceLayout"]


_KINDS = {"even": EVEN, "local": SIZES, "zigzag": ZIGZAG, "hybrid": ZIGZAG}
_KINDS |= {"packed": PACKED, "joint": PACKED, "balanced": RUNS, "documents": RUNS, "runs": RUNS}
# Of these a token attends to its own document.
WITH_DOCUMENTS = ("packed", "balanced", "documents")


@dataclass(frozen=True, repr=False)
class SequenceLayout:
    """How a sequence lies on the ranks of a group; made by one of the class methods.

    Layouts of the same kind, lengths and group are equal. Pass them as arguments, also to compiled functions,
    where their ints become symbolic. They pickle with their group's name. Where no such group exists, as in
    a data loader's worker, they shard as on the rank that pickled them, and raise ValueError to exchange.
    """

    kind: str
    numbers: tuple[int, ...]
    group: dist.ProcessGroup

    # ---- makers ----

    @classmethod
    def even(cls, total: int, group: Group = None) -> SequenceLayout:
        """Lay out consecutive shards by `cal_split_sizes`."""
        return cls("even", (_total("even", total),), process_group(group, "SequenceLayout.even"))

    @classmethod
    def zigzag(cls, total: int, group: Group = None) -> SequenceLayout:
        """Rank r of P holds chunks r and 2P-1-r of 2P, which balances the work under a causal mask.

        Chunks follow `cal_split_sizes`, for any total.
        """
        return cls("zigzag", (1, _total("zigzag", total)), process_group(group, "SequenceLayout.zigzag"))

    @classmethod
    def packed(cls, lengths: Sizes, group: Group = None) -> SequenceLayout:
        """Shard each of several packed documents by `cal_split_sizes`."""
        where = "SequenceLayout.packed"
        checked = check_lengths(where, "lengths", lengths)
        return cls("packed", (1, len(checked), *checked), process_group(group, where))

    @classmethod
    def balanced(cls, lengths: Sizes, group: Group = None, tolerance: float = 0.05) -> SequenceLayout:
        """Keep packed documents whole on one rank where ranks stay balanced; cut the others among a few.

        A document that is cut lies on its ranks from both ends inwards, as in a zigzag layout: each has the
        same share of its tokens as of its work under a causal mask. Attention by gather and ring moves only
        keys of documents that ranks share. Make it outside of compiled functions.

        Args:
            lengths: of the documents, at least 0, the same on all ranks.
            tolerance: by how much a rank's tokens, and its work, may exceed the mean: 0.05 is 5 %. The work
                of a document is the square of its length. A greater one cuts fewer documents.

        Raises:
            ValueError: a length or the tolerance is negative.
        """
        where = "SequenceLayout.balanced"
        checked = check_lengths(where, "lengths", lengths)
        check_number(where, "tolerance", tolerance, 0)
        real = process_group(group, where)
        return cls("balanced", _C.balance(tuple(checked), real.size(), float(tolerance)), real)

    @classmethod
    def of_runs(cls, runs: Sequence[Sequence[tuple[int, int]]], group: Group = None) -> SequenceLayout:
        """Lay out the runs of tokens that are given for each rank, as another library lays them.

        Megatron and Transformer Engine lay each packed document (thd) in zigzag order over the ranks:

            def slices(start, n):
                return [(start + n * i // (2 * P), start + n * (i + 1) // (2 * P)) for i in range(2 * P)]

            documents = list(map(slices, itertools.accumulate(lengths, initial=0), lengths))
            runs = [[cut[i] for cut in documents for i in (r, 2 * P - 1 - r)] for r in range(P)]
            layout = SequenceLayout.of_runs(runs, group).with_documents(lengths)  # not in compiled code

        Args:
            runs: for each rank `(start, stop)` of each of its runs, as of slices of the sequence, ascending.
                Together they are the sequence, each token once. The same on all ranks.

        Raises:
            ValueError: a token is on no rank or on several, or runs of a rank do not ascend.
            TypeError: runs are not lists of pairs of ints.
        """
        real = process_group(group, "SequenceLayout.of_runs")
        return cls("runs", numbers_of_runs("SequenceLayout.of_runs", runs, real.size()), real)

    @classmethod
    def joint(cls, text: int, image: int, group: Group = None) -> SequenceLayout:
        """Shard the text and the image of one sequence each by `cal_split_sizes`, as Flux joins them."""
        lengths = _total("joint", text, "text"), _total("joint", image, "image")
        check_sum("SequenceLayout.joint", "text and image", lengths)
        return cls("joint", (1, 2, *lengths), process_group(group, "SequenceLayout.joint"))

    @classmethod
    def from_local(cls, size: int, group: Group = None) -> SequenceLayout:
        """Lay out consecutive shards; this rank's has `size`. Collective: ranks exchange their sizes."""
        real = process_group(group, "SequenceLayout.from_local")
        local_size = torch.zeros(1, dtype=torch.int64, device="cpu")
        with Arguments("SequenceLayout.from_local", local_size, real) as call:
            local_size.fill_(check_int(call.where, "size", size, 0, 2**63 - 1))
            sizes: list[int] = call.apply((0, EVEN, call.world), WHOLE, ONE).tolist()
        return cls("local", tuple(sizes), real)

    @classmethod
    def hybrid(cls, total: int, state: ParallelState | None = None) -> SequenceLayout:
        """Lay out over ring x ulysses by the parallel state: zigzag over the ring, then even over ulysses.

        In the cp group either the ring ranks or the ulysses ranks are neighbours.

        state: a ParallelState; None: the current one.
        """
        state = topology.current().state if state is None else state
        if state is None:
            raise ValueError(
                "SequenceLayout.hybrid: there is no parallel state; call init_parallel_state first"
            )
        check_type("SequenceLayout.hybrid", "state", state, ParallelState, "a ParallelState or None")
        total = _total("hybrid", total)
        kind, inner, group = ring_and_ulysses(state)
        if kind == "hybrid":
            return cls(kind, (inner, total), group)
        return cls.even(total, group) if kind == "even" else cls.zigzag(total, group)

    def with_documents(self, lengths: Sizes) -> SequenceLayout:
        """Divide the sequence into documents, as those of a packed layout; tokens lie as in this one.

        Args:
            lengths: of the documents, one behind the other, at least 0, the same on all ranks.

        Raises:
            ValueError: they are not as long as the sequence, or this layout already has documents.
        """
        where = "SequenceLayout.with_documents"
        numbers = check_lengths(where, "lengths", lengths)
        if self.is_packed or sum(numbers) != self.total:
            expected = f"a layout without documents, and lengths of {self.total} tokens in all"
            hint = cumulative_hint(cut) if (cut := from_cumulative(numbers)) else ""
            raise ValueError(f"{where}: lengths is {numbers!r:.200}, for {self}; expected {expected}{hint}")
        runs = in_documents(numbers_of(self, 0), numbers, self.group.size())
        return SequenceLayout("documents", runs, self.group)

    # ---- what it says ----

    @property
    def total(self) -> int:
        """The length of the sequence."""
        return total_of(numbers_of(self, 0))

    @property
    def is_packed(self) -> bool:
        """Whether it has documents, of which each token attends to its own: packed, balanced, or given."""
        return self.kind in WITH_DOCUMENTS

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of its documents; of a layout without any the length of the sequence."""
        if _KINDS[self.kind] == RUNS:
            return self.numbers[1 : 1 + self.numbers[0]]
        return self.numbers[2:] if self.kind == "packed" else (self.total,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Each rank's number of tokens."""
        world, layout = self.group.size(), numbers_of(self, 0)
        return tuple([extent(layout, world, rank) for rank in range(world)])

    def index(self) -> torch.Tensor:
        """Return the place in the sequence of each token of this rank: int64 `[S_local]`, on the CPU."""
        place, layout = place_of(self.group), numbers_of(self, 0)
        if layout[1] in LISTED:
            return listed_index(layout, place.world, place.rank)
        part = select(torch.arange(self.total, device="cpu"), layout, place.world, place.rank)
        return cast(torch.Tensor, part).contiguous()

    def positions(self) -> torch.Tensor:
        """Return `index()`; in packed documents the place in the document, which begins at 0."""
        index = self.index()
        if not self.is_packed:
            return index
        ends = self.cu_seqlens().to(torch.int64)
        return index - ends[torch.searchsorted(ends, index, right=True) - 1]

    def cu_seqlens(self) -> torch.Tensor:
        """Return where the documents begin, and the sequence's end: int32 `[documents + 1]`, on the CPU."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device="cpu")

    def __repr__(self) -> str:
        arguments = f"{self.total}"
        if self.kind == "local":
            arguments = f"sizes={list(self.numbers)}"
        elif self.kind == "joint":
            arguments = ", ".join(map(str, self.numbers[2:]))
        elif self.kind == "hybrid":
            arguments += f", ulysses={abs(self.numbers[0])}{' neighbours' * (self.numbers[0] < 0)}"
        elif self.is_packed:
            arguments = f"{[*self.lengths[:16]]}"[:-1] + (", ...]" if len(self.lengths) > 16 else "]")
        makers = {"local": "from_local", "documents": "with_documents", "runs": "of_runs"}
        maker = makers.get(self.kind, self.kind)
        return f"SequenceLayout.{maker}({arguments}, {self.group.size()} ranks)"

    # It never changes: a copy is itself.
    def __copy__(self) -> SequenceLayout:
        return self

    def __deepcopy__(self, memo: object) -> SequenceLayout:
        return self

    # By the state, not by a function of its own, so that torch.load needs to know the class alone.

    def __getstate__(self) -> object:
        group = self.group
        return self.kind, self.numbers, (group_name(group), group.size(), group.rank())

    def __setstate__(self, state: tuple[str, tuple[int, ...], tuple[str, int, int]]) -> None:
        kind, numbers, place = state
        self.__dict__.update(kind=kind, numbers=numbers, group=group_or_name(*place))

    # ---- what it does ----

    @overload
    def shard(self, x: torch.Tensor, dim: int, grad_scale: GradScale = NOT_GIVEN) -> torch.Tensor: ...

    @overload
    def shard(
        self, x: Sequence[torch.Tensor], dim: int, grad_scale: GradScale = NOT_GIVEN
    ) -> list[torch.Tensor]: ...

    def shard(self, x: Any, dim: int, grad_scale: GradScale = NOT_GIVEN) -> Any:
        """Keep this rank's shard of a sequence in natural order; gather the gradients.

        Args:
            x: any strided tensor, the same on all ranks; or a list of tensors of one dtype and device.
            dim: the sequence's dim.
            grad_scale: what the gathered gradient, which is whole on each rank, is multiplied by. It must be
                given where a gradient is recorded. "down": 1 / the world size, right for parameters from
                which x is computed, whose gradients are summed or averaged as all others are. None: nothing,
                right where the gradient of x itself is read on each rank. Or a float.

        Returns:
            A view if the shard is contiguous, else a contiguous copy; for a list of tensors a list.

        Raises:
            ValueError: x does not have the sequence's length, or a gradient is recorded without grad_scale.
        """
        return shard_or_gather("SequenceLayout.shard", x, dim, self, checked_numbers, grad_scale, True)

    @overload
    def gather(
        self, x: torch.Tensor, dim: int, grad_scale: GradScale = ..., *, backward: Backward = ...
    ) -> torch.Tensor: ...

    @overload
    def gather(
        self, x: Sequence[torch.Tensor], dim: int, grad_scale: GradScale = ..., *, backward: Backward = ...
    ) -> list[torch.Tensor]: ...

    def gather(
        self, x: Any, dim: int, grad_scale: GradScale = NOT_GIVEN, *, backward: Backward = "slice"
    ) -> Any:
        """Gather the sequence in natural order on every rank; `grad_scale` or `backward` gives the gradient.

        Where a gradient is recorded, pass a grad_scale or backward="sum". The sum is always exact; a
        grad_scale is right if every rank has the same gradient of the output.

        Args:
            x: this rank's shard, any strided tensor; or a list of tensors of one dtype and device.
            dim: the sequence's dim.
            grad_scale: what this rank's shard of its gradient is multiplied by. "up": the world size, right
                where all ranks compute the same loss and gradients of parameters are averaged, as by DDP and
                FSDP. None: nothing, right where they are summed. Or a float.
            backward: "slice": keep this rank's shard of its own gradient, by grad_scale. "sum": sum the
                gradients of all ranks, as `spar.all_gather` does; without grad_scale. Then the gradients of
                parameters are to be summed.

        Returns:
            A new contiguous tensor; for a list of tensors a list.

        Raises:
            ValueError: x is not this rank's shard, a gradient is recorded without grad_scale or
                backward="sum", or both are given.
        """
        return gather(x, dim, self, checked_numbers, grad_scale, backward)

    def all_gather(self, x: Any, dim: int) -> Any:
        """Deprecated: `gather(x, dim, backward="sum")`."""
        warn_deprecated("SequenceLayout.all_gather", 'SequenceLayout.gather(backward="sum")', "0.4.0")
        return self.gather(x, dim, backward="sum")

    @overload
    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor: ...

    @overload
    def reduce_scatter(self, x: Sequence[torch.Tensor], dim: int) -> list[torch.Tensor]: ...

    def reduce_scatter(self, x: Any, dim: int) -> Any:
        """Call `spar.reduce_scatter` with this layout: the input is in natural order."""
        return shard_or_gather("reduce_scatter", x, dim, self, checked_numbers, None, True, exact=True)

    def halo(self, x: torch.Tensor, before: int, dim: int = 1, after: int = 0) -> torch.Tensor:
        """Extend each of this rank's runs of tokens by those before and behind it, as a convolution needs.

        One exchange moves tokens of other ranks alone. Gradients are added at their owners.

        Args:
            x: this rank's shard, any strided tensor.
            before: how many tokens to add before each run, at least 0. They are those of the sequence, in a
                layout with documents of the run's document; beyond its ends zeros.
            dim: the sequence's dim.
            after: how many tokens to add behind each run, likewise.

        Returns:
            Along dim, for each run (one in an even layout, up to two in zigzag, each cut where documents end)
            the tokens before it, the run, and the tokens behind it. `drop_halo` keeps the runs.
        """
        with Arguments("SequenceLayout.halo", x, self.group) as call:
            left, right = _side(call.where, "before", before), _side(call.where, "after", after)
            return self._gathered(call, dim, -left, left + right, 0)

    def drop_halo(self, y: torch.Tensor, before: int, dim: int = 1, after: int = 0) -> torch.Tensor:
        """Keep this rank's runs of a result as long as that of `halo` with the same arguments."""
        place, name = place_of(self.group), "SequenceLayout.drop_halo"
        sides = _side(name, "before", before), _side(name, "after", after)
        runs = pieces(numbers_of(self, 0), place.world, place.rank)
        return without_halo(f"{name} on rank {place.rank} of {place.world}", y, dim, runs, sides, self)

    def shift(self, x: torch.Tensor, n: int, dim: int = 1, fill: float = 0) -> torch.Tensor:
        """Replace each token by the n-th one behind it, as labels of the next token; of the same document.

        n: below 0: the -n-th one before it. fill: where the document has no such token.
        """
        # One exchange, and the peers' next call: only ranks that fill find out that fill does not fit.
        with Arguments("SequenceLayout.shift", x, self.group, exchanges=2) as call:
            offset = check_int(call.where, "n", n, -(2**31), 2**31)
            return self._gathered(call, dim, offset, 0, fill)

    def rows(self, index: torch.Tensor, padding: bool = False) -> Rows:
        """Plan an exchange of the rows that each rank wants, by their index in the whole. Collective.

        The plan serves all layers and steps with the same index, such as the edges of a graph or nearest
        neighbours. `Rows.gather` gathers rows, `Rows.add` is its transpose, `Rows.table` has each row once.

        Args:
            index: int64 or int32 of at least one dim, in [0, total), of this rank alone, on the rows' device.
                It may be empty, and have a row several times.
            padding: let the index have -1, for zeros.

        Raises:
            ValueError: the index is out of range.
            TypeError: the index is not of int64 or int32.
            MismatchError: calls differ between ranks. Every rank raises where one does.
        """
        return rows_of(numbers_of(self, 0), self.group, self, index, padding)

    def _gathered(self, call: Arguments, dim: int, offset: int, more: int, fill: float) -> torch.Tensor:
        """Gather each run, moved by an offset and longer by `more`."""
        layout = checked_numbers(call, "layout", self, call.dim("dim", dim), False)
        return gather_runs(call, layout, self.is_packed, offset, more, fill)


def numbers_of(layout: SequenceLayout, dim: int) -> Layout:
    """Return the core's numbers for a sequence along `dim`."""
    return dim, _KINDS[layout.kind], *layout.numbers


def checked_numbers(
    call: Arguments, name: str, layout: SequenceLayout, dim: int, whole: bool, at: str = ""
) -> Layout:
    """Check a layout's group and a call's size along `dim`; return the core's numbers.

    name: the argument that has the layout. at: names the tensor in messages: `exchange_together`.
    whole: whether the input has the whole sequence, not this rank's shard.
    """
    if not isinstance(layout, SequenceLayout):
        raise call.type_error(name, f"{layout!r:.200}", "a SequenceLayout or None")
    if call.group.handle != place_of(layout.group).handle:
        raise call.error(name, f"{layout} of another group", "a layout of the call's group")
    numbers, size = numbers_of(layout, dim), call.input.size(dim)
    expected = total_of(numbers) if whole else extent(numbers, call.world, call.rank)
    if size != expected:
        meaning = "the length of the sequence" if whole else f"rank {call.rank}'s shard"
        text = f"{expected}, {meaning} in {layout}"
        if layout.is_packed and (cut := from_cumulative(layout.lengths)):
            text += cumulative_hint(cut)
        raise call.error(f"input_{at}", f"of size {size} in dim {dim}", text)
    return numbers


def _side(where: str, name: str, tokens: int) -> int:
    return check_int(where, name, tokens, 0, 2**31)


def _total(kind: str, total: int, name: str = "total") -> int:
    return check_int(f"SequenceLayout.{kind}", name, total, 0, 2**63 - 1)
