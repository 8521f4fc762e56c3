# SPDX-License-Identifier: Apache-2.0
"""`PrefixTree`: the samples of a batch in rows that have each common prefix once, and their attention."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._checks import check_int, check_ints
from ..ops.packing import PackedSamples
from ..ops.tree_branches import common, ends_of, merge, sorted_by_tokens
from ..ops.tree_row import Edges, LayoutOf, TreeRow
from ..topology.resolve import Group, process_group
from .spans import Spans

_NAME = "PrefixTree"
_INTS = torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8


class Tree(TreeRow):
    """A row of a `PrefixTree`: samples whose common prefixes are one.

    Places number its tokens in depth-first order. A token's ancestors are those before it in its samples, and
    its depth is their number. Tensors are whole, and on the CPU.

    Attributes:
        input_ids: int64 `[1, S]`.
        position_ids: int64 `[1, S]`, the depths.
        labels: int64 `[1, S]`, the next token, which is that of all samples that have one; else -100.
        parents: int64 `[S]`, the place of the token before; -1 of a root.
        segments: the runs of places between forks, `(first, size, parent)`: a recurrence begins each one with
            the state behind its parent, the number of another segment, or -1.
        counts: int64 `[S]`, how many samples have the token.
        places: for each sample int64 `[length]`, the places of its tokens.
        is_first: for each sample bool `[length]`, whether its token is the first copy of its place: as a mask
            it trains each place once.
        layout: how the S tokens lie on the ranks.
        samples: how the samples' tokens lie: each sample is a document, and each token on its place's rank.
    """

    def batch(self) -> dict[str, Tensor | Spans]:
        """Return the arguments of a transformers model, to which `use_cache=False` is to be added."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": self.spans(),
        }

    def spans(self, left: int | None = None) -> Spans:
        """Return which tokens each one attends to: its ancestors and itself, for all `method`s of attention.

        left: so many of the nearest ancestors, as by `Spans.window(S, left, 0)` in each sample; None: all.
            A window of `spar.attention` counts places instead, so it is no window of the samples.
        """
        depths = int(self.position_ids.max()) + 1
        most = None if left is None else check_int(f"{_NAME}.spans", "left", left, 0)
        return self.along(Spans.window(depths, most, 0))

    def along(self, spans: Spans) -> Spans:
        """Return which tokens each one attends to, where spans say which depths a depth attends to.

        spans: of one sample that is as long as the deepest path. What is behind a token is left out.

        Raises:
            ValueError: spans are of another length, or differ between samples or heads.
        """
        depths = int(self.position_ids.max()) + 1
        if spans.shape != (1, 1, depths, depths):
            raise ValueError(
                f"{_NAME}.along: spans is {spans}; expected Spans of one sample of {depths} tokens, the "
                "deepest path"
            )
        return self.remember(("spans", spans.digest), lambda: SpansOfTree(self, spans))


class SpansOfTree(Spans):
    """Spans of a tree's tokens, by which layers with a mask of their own find the tree."""

    def __init__(self, tree: Tree, of_depths: Spans) -> None:
        super().__init__(ends_of(tree.branches, of_depths.on_cpu[0, 0]))
        self.tree, self.layout, self._of_depths = tree, tree.layout, of_depths

    # They never change: a copy is the same.

    def __deepcopy__(self, memo: object) -> SpansOfTree:
        return self

    def __copy__(self) -> SpansOfTree:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SpansOfTree, (self.tree, self._of_depths)


class PrefixTree(PackedSamples):
    """Samples packed into rows in which each common prefix is computed once: those of a prompt, or of turns.

        spar.parallelize(model, cp, outputs="parts")
        samples = spar.data.PrefixTree(input_ids, group=cp)
        tree = samples.trees[0]
        logits = model(**tree.batch(), use_cache=False).logits
        logprobs, entropy = spar.token_logprobs(logits, tree.shard_labels(), tree.layout)
        logprobs = tree.expand(logprobs)  # of this rank's tokens of the samples
        mask = samples.shard(completion_mask, shift=1)
        loss = spar.masked_mean(-advantages * logprobs, mask, tree.samples, by="sample", averaged_by=cp)

    It is a `PackedSamples` of the same samples, whose tokens lie where those of the tree lie: `pack`, `shard`
    and `unpack` take what the batch has for each token of a sample. A model runs over a row's `Tree`.

    Attributes:
        trees: the `Tree` of each row.
        layouts: `trees[row].samples` of each row.
        rows: the numbers of the samples of each row, ascending.
    """

    def __init__(
        self,
        samples: Tensor | Sequence[Tensor] | Sequence[Sequence[int]],
        group: Group = None,
        *,
        mask: Tensor | None = None,
        same: Tensor | Sequence[Tensor] | Sequence[Sequence[int]] | None = None,
        max_tokens: int | None = None,
        rows: int = 1,
        layout: str | LayoutOf = "even",
    ) -> None:
        """Merge the samples' prefixes, and decide which samples share a row.

        Args:
            samples: the token ids of N samples, a list of lists or of int tensors `[length]`; or `[N, T]`
                with `mask`.
            group: the ranks that share a row, as those of `PackedSamples`.
            mask: the attention mask `[N, T]`, whose ones are the samples' tokens.
            same: for each token another int, in the form of samples, that must be equal where tokens are
                merged: what the model computes besides the ids, such as a hash of an image or an adapter.
            max_tokens: how many places a row may have. None: no limit.
            rows: make at least so many rows, of about equal numbers of places. A prefix that two rows share
                is in both.
            layout: of the tokens of a tree: "even"; "zigzag"; "balanced", by which ranks have equal work by
                "gather" and "ring", too; or a function from a `Tree` to a `SequenceLayout`.

        Raises:
            ValueError: there are no tokens, shapes do not fit each other, one sample is longer than
                max_tokens, or rows are more than samples.
            TypeError: samples or same are no ints.
        """
        self._ids = _listed("samples", samples, mask)
        self._keys = self._ids
        if same is not None:
            others = _listed("same", same, mask)
            if list(map(len, others)) != list(map(len, self._ids)):
                raise ValueError(
                    f"{_NAME}: same has lengths {list(map(len, others))!r:.200}; expected those of samples, "
                    f"{list(map(len, self._ids))!r:.200}"
                )
            self._keys = [torch.stack(pair, 1) for pair in zip(self._ids, others, strict=True)]
        if not sum(map(len, self._ids)):
            raise ValueError(f"{_NAME}: samples have no tokens; expected at least one")
        real = process_group(group, _NAME)
        self._sorted = sorted_by_tokens(self._keys)
        super().__init__(
            list(map(len, self._ids)) if mask is None else mask, group, max_tokens=max_tokens, rows=rows
        )
        self.trees = []
        for numbers in self.rows:
            chosen = set(numbers)
            order = [numbers.index(i) for i in self._sorted if i in chosen]
            branches = merge([self._keys[i] for i in numbers], order)
            self.trees.append(Tree([self._ids[i] for i in numbers], branches, layout, real))
        self.layouts = [tree.samples for tree in self.trees]

    def edges(self, mask: Tensor | Sequence[Tensor], row: int = 0) -> Edges:
        """Return the places of a row whose next token counts, for a head that computes no others.

        mask: what `shard` takes: whether each token counts as a label. It is shifted here.
        """
        counted = self.pack(mask, row, shift=1)[0] != 0
        return Edges(self.trees[row], counted)

    def _grouped(self, rows: int, max_tokens: int | None) -> list[list[int]]:
        """Return the samples of each row: neighbours by their tokens, which share most."""
        order = [i for i in self._sorted if len(self._ids[i])]
        if rows > len(order):
            raise ValueError(
                f"{_NAME}: rows is {rows}; expected at most {len(order)}, the number of samples with tokens"
            )
        lengths = [len(self._ids[i]) for i in order]
        pairs = pairwise(order)
        shared = [0, *[common(self._keys[i], self._keys[j]) for i, j in pairs]]
        if max_tokens is not None:
            most = self._check_longest(max_tokens)
            rows = max(rows, len(_divide(lengths, shared, most)))
        low, high = max(lengths) - 1, sum(lengths)  # the least limit by which there are as few rows
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if len(_divide(lengths, shared, middle)) <= rows else (middle, high)
        found = _divide(lengths, shared, high)
        while len(found) < rows:
            largest = max(found, key=len)
            at, half = found.index(largest), len(largest) // 2
            found[at : at + 1] = [largest[:half], largest[half:]]
        chosen = [[order[i] for i in row] for row in found]
        chosen[0] += [i for i in self._sorted if not len(self._ids[i])]
        return [sorted(row) for row in chosen]


def _divide(lengths: Sequence[int], shared: Sequence[int], most: int) -> list[range]:
    """Divide sorted samples into rows of at most so many places, each as full as it can be.

    shared: how many tokens each sample shares with the one before it.
    """
    found, begin, places = [], 0, 0
    for i, (length, known) in enumerate(zip(lengths, shared, strict=True)):
        if places and places + length - known > most:
            found.append(range(begin, i))
            begin, places = i, 0
        places += length - known if i > begin else length
    return [*found, range(begin, len(lengths))]


def _listed(name: str, given: Any, mask: Tensor | None) -> list[Tensor]:
    """Return the ints of each sample, on the CPU."""
    if mask is not None:
        shapes = [x.shape if isinstance(x, Tensor) else None for x in (given, mask)]
        if shapes[0] is None or shapes[0] != shapes[1] or len(shapes[0]) != 2:
            raise ValueError(
                f"{_NAME}: {name} is {_told(given)}, and mask {_told(mask)}; expected two tensors [N, T]"
            )
        given = [row[kept] for row, kept in zip(given.cpu(), mask.cpu() != 0, strict=True)]
    if not isinstance(given, (list, tuple)):
        expected = "a list of lists of ints, or a tensor [N, T] and mask"
        raise TypeError(f"{_NAME}: {name} is {_told(given)}; expected {expected}")
    return [_ints(f"{name}[{i}]", each) for i, each in enumerate(given)]


def _ints(name: str, given: Any) -> Tensor:
    if not isinstance(given, Tensor):
        return torch.tensor(check_ints(_NAME, name, given, -(2**63)), dtype=torch.int64, device="cpu")
    if given.dim() != 1 or given.dtype not in _INTS:
        raise TypeError(f"{_NAME}: {name} is {_told(given)} of {given.dtype}; expected ints [length]")
    return given.to("cpu", torch.int64).contiguous()


def _told(x: Any) -> str:
    return f"of shape {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
