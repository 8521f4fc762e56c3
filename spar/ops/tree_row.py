# SPDX-License-Identifier: Apache-2.0
"""A row of a prefix tree: tokens that samples share are once, over the ranks of a group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._checks import digest
from .._exchange.arguments import Arguments
from .._exchange.layouts import shards
from .._group.registry import place_of
from ..errors import MismatchError
from ..sequence_layout import SequenceLayout, numbers_of
from .gather import all_gather
from .tree_branches import Branch, places_of, segments_of
from .tree_cut import cut_by_work

_NAME = "PrefixTree"
_IGNORED = -100  # the label of a token that has no next one
LayoutOf = Callable[[Any], SequenceLayout]  # of a Tree
Result = TypeVar("Result")


class TreeRow:
    """What operations use of a `Tree`, a row of a `PrefixTree`: all but its attention."""

    def __init__(
        self,
        ids: Sequence[Tensor],
        branches: Sequence[Branch],
        layout: str | LayoutOf,
        group: dist.ProcessGroup,
    ) -> None:
        """Make the tree of samples `[length]`, and of their branches in depth-first order."""
        self.branches = branches
        new = [ids[each.sample][each.depth :] for each in branches]
        self.input_ids = torch.cat(new)[None]
        depths = [torch.arange(each.depth, each.depth + each.size, device="cpu") for each in branches]
        self.position_ids = torch.cat(depths)[None]
        total = self.input_ids.size(1)
        self.parents = torch.arange(-1, total - 1, device="cpu")
        self.labels = self.input_ids.roll(-1, 1)
        begun = [each for each in branches if each.size]
        for each in begun:
            self.parents[each.first] = each.parent
            self.labels[0, each.first + each.size - 1] = _IGNORED
        for each in begun:  # once all ends are marked: a sample may go on where another one ends
            if each.parent >= 0:
                self.labels[0, each.parent] = self.input_ids[0, each.first]
        self.segments = segments_of(self.parents)
        by_sample = sorted(branches)
        self.places = [places_of(each.runs) for each in by_sample]
        self.is_first = [
            torch.arange(each.depth + each.size, device="cpu") >= each.depth for each in by_sample
        ]
        self.counts = torch.cat(self.places).bincount(minlength=total)
        self.layout = self._laid_out(layout, group)
        # The rank of each place, and the number of its token among those of that rank.
        self.owner, self._local = torch.zeros_like(self.parents), torch.zeros_like(self.parents)
        for rank, held in enumerate(shards(numbers_of(self.layout, 0), group.size())):
            index = places_of([(start, size) for start, size, _ in held])
            self.owner[index] = rank
            self._local[index] = torch.arange(len(index), device="cpu")
        places = torch.cat(self.places)
        self.samples, self._index = self.select(places, [len(each) for each in self.places])
        self._made: dict[Any, Any] = {}  # of this tree, by layers
        self.is_compared = False  # by the ranks

    def _laid_out(self, layout: str | LayoutOf, group: dist.ProcessGroup) -> SequenceLayout:
        total = self.input_ids.size(1)
        if layout == "even":
            return SequenceLayout.even(total, group)
        if layout == "zigzag":
            return SequenceLayout.zigzag(total, group)
        if layout == "balanced":  # a token attends to its ancestors and itself
            return SequenceLayout.of_runs(cut_by_work(self.position_ids[0] + 1, group.size()), group)
        if isinstance(layout, str) or not callable(layout):
            raise ValueError(
                f'{_NAME}: layout is {layout!r:.200}; expected "even", "zigzag", "balanced" or a function '
                "from a Tree to a SequenceLayout"
            )
        found = layout(self)
        fits = isinstance(found, SequenceLayout) and not found.is_packed and found.total == total
        if not fits or found.group is not group:
            raise ValueError(
                f"{_NAME}: the function layout= returned {found!r:.200}; expected a SequenceLayout of its "
                f"group, without documents, of {total} tokens"
            )
        return found

    def select(self, places: Tensor, lengths: Sequence[int]) -> tuple[SequenceLayout, Tensor]:
        """Lay out documents of tokens that have places of this tree, each token on its place's rank.

        Returns:
            The layout, and for each of this rank's tokens the number of its place among those of this rank.
        """
        owner, ranks = self.owner[places], place_of(self.layout.group)
        is_end = torch.zeros(len(places) + 1, dtype=torch.bool, device="cpu")
        is_end[1:-1] = owner[1:] != owner[:-1]
        is_end[torch.tensor([0, *lengths], device="cpu").cumsum(0)] = True
        cuts = is_end.nonzero()[:, 0]
        runs = zip(owner[cuts[:-1]].tolist(), cuts.diff().tolist(), strict=True)
        sizes = owner.bincount(minlength=ranks.world).tolist()
        numbers = len(lengths), *lengths, *chain.from_iterable(runs), *sizes
        layout = SequenceLayout("documents", numbers, self.layout.group)
        return layout, self._local[places[owner == ranks.rank]]

    def remember(self, key: Any, make: Callable[[], Result]) -> Result:
        """Return what was made of this tree by this key, or make it: all layers ask for the same."""
        if key not in self._made:
            self._made[key] = make()
        made: Result = self._made[key]
        return made

    def expand(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return for this rank's tokens of `samples` what x has for their places. Nothing is exchanged.

        Its gradient adds up those of a place's samples. Expand what is a number for each token, such as
        log-probabilities; hidden states would take as much memory as without a tree.

        x: `[..., S/P, ...]`, of this rank's tokens of `layout`, which are along `dim`.
        """
        _check_own(f"{_NAME}.expand", x, dim, self.layout)
        return x.index_select(dim, self._index.to(x.device))

    def shard_labels(self) -> Tensor:
        """Return this rank's labels, `[1, S/P]`."""
        return self.layout.shard(self.labels, 1)

    @functools.cached_property
    def digest(self) -> int:
        """63 bits of the tokens and the tree, by which ranks compare it."""
        return digest(torch.stack([self.input_ids[0], self.parents]))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_made": {}, "is_compared": False}

    def __repr__(self) -> str:
        tokens = sum([len(each) for each in self.places])
        return f"Tree({len(self.places)} samples, {tokens} tokens in {self.input_ids.size(1)} places)"


def agree(name: str, tree: Any) -> None:
    """Let the ranks compare a tree, in its first call: an exchange of 8 bytes.

    Raises:
        MismatchError: they have other trees. Every rank raises.
    """
    if not isinstance(tree, TreeRow) or tree.is_compared:
        return
    own = torch.tensor([tree.digest], device="cpu")
    digests = all_gather(own, tree.layout.group).tolist()
    if len(set(digests)) > 1:
        groups = [[rank for rank, x in enumerate(digests) if x == each] for each in dict.fromkeys(digests)]
        raise MismatchError(
            f"{name}: ranks {groups[0]} and {groups[1]} have other samples in the tree; expected the same"
        )
    tree.is_compared = True


def _check_own(where: str, x: Tensor, dim: int, layout: SequenceLayout) -> None:
    """Check that a tensor has this rank's tokens: of the whole row others would be selected, in silence."""
    rank = place_of(layout.group).rank
    if x.size(dim) != layout.sizes[rank]:
        raise ValueError(
            f"{where} on rank {rank}: x is of shape {list(x.shape)}; expected {layout.sizes[rank]} in dim "
            f'{dim}, this rank\'s tokens in {layout}: parallelize with outputs="parts"'
        )


def check_tree(call: Arguments, tree: Any, layout: SequenceLayout) -> None:
    """Check that a layout is that of a tree."""
    if not isinstance(tree, TreeRow):
        raise call.type_error("tree", f"a {type(tree).__name__}", "a Tree of spar.data.PrefixTree, or None")
    if layout is not tree.layout:
        raise call.error("layout", f"{layout}", f"that of the tree, {tree.layout}")


class Edges:
    """The places of a tree whose next token counts, each once: the head of a model computes these alone.

        edges = samples.edges(completion_mask)
        logprobs, entropy = spar.token_logprobs((edges.of(hidden), weight), edges.labels, edges.layout)
        logprobs = edges.expand(logprobs)  # in place of tree.expand

    Attributes:
        labels: int64 `[1, E/P]`, of this rank's edges.
        layout: of the edges, each on the rank of its place.
    """

    def __init__(self, tree: TreeRow, counted: Tensor) -> None:
        """Take the places that have a token which is counted: bool, of all samples' tokens, one by one."""
        places = torch.cat(tree.places)
        is_edge = torch.zeros_like(tree.parents, dtype=torch.bool)
        is_edge[places[counted]] = True
        chosen = is_edge.nonzero()[:, 0]
        self._of_tree = tree.layout
        self.layout, self._index = tree.select(chosen, [len(chosen)])
        self.labels = self.layout.shard(tree.labels[:, chosen], 1)
        rank = place_of(tree.layout.group).rank
        number = (is_edge & (tree.owner == rank)).cumsum(0) - 1
        number[~is_edge] = len(self._index)  # behind the edges
        self._expand = number[places[tree.owner[places] == rank]]

    def of(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return what this rank's edges have of what its tokens of the tree have: `[1, E/P, ...]`."""
        _check_own("Edges.of", x, dim, self._of_tree)
        return x.index_select(dim, self._index.to(x.device))

    def expand(self, x: Tensor) -> Tensor:
        """Return `[1, T/P]` for this rank's tokens of the samples: what x has for their edges, else 0."""
        _check_own("Edges.expand", x, 1, self.layout)
        return torch.nn.functional.pad(x, (0, 1)).index_select(1, self._expand.to(x.device))
