# SPDX-License-Identifier: Apache-2.0
"""Branches of a prefix tree: what each sample adds to those before it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Run = tuple[int, int]  # its first place, and its size


class Branch(NamedTuple):
    """What one sample adds to a tree.

    Attributes:
        sample: its number.
        first, size: the run of places that it adds, which may be empty.
        above: the runs of places that it shares with samples before it, from the root on.
    """

    sample: int
    first: int
    size: int
    above: tuple[Run, ...]

    @property
    def depth(self) -> int:
        """The number of tokens that are shared."""
        return sum([size for _, size in self.above])

    @property
    def parent(self) -> int:
        """The place of the last token that is shared, or -1."""
        return sum(self.above[-1]) - 1 if self.above else -1

    @property
    def runs(self) -> tuple[Run, ...]:
        """All places of the sample."""
        if not self.size:
            return self.above
        if self.parent + 1 == self.first and self.above:
            place, size = self.above[-1]
            return *self.above[:-1], (place, size + self.size)
        return *self.above, (self.first, self.size)


class Segment(NamedTuple):
    """A run of places of which only the last one may have several children.

    Attributes:
        first, size: its places.
        parent: the number of the segment before it, or -1.
    """

    first: int
    size: int
    parent: int


def segments_of(parents: Tensor) -> tuple[Segment, ...]:
    """Return a tree's segments in the order of its places: one begins behind each fork. parents: `[S]`."""
    total = len(parents)
    begins = parents != torch.arange(-1, total - 1, device="cpu")
    forks = parents[begins & (parents >= 0)] + 1
    begins[forks[forks < total]] = True
    begins[0] = True
    starts = begins.nonzero()[:, 0]
    before = parents[starts]
    number = torch.where(before >= 0, begins.cumsum(0)[before] - 1, -1)
    sizes = torch.cat([starts, starts.new_full((1,), total)]).diff()
    listed = zip(starts.tolist(), sizes.tolist(), number.tolist(), strict=True)
    return tuple([Segment(*each) for each in listed])


def merge(samples: Sequence[Tensor], order: Sequence[int]) -> list[Branch]:
    """Merge samples by their common prefixes.

    They part one token before they differ, so that each place has one next token.

    samples: int64 `[length]` or `[length, k]`, contiguous: tokens are equal where all k numbers are, and all
        tokens before them.
    order: the samples' numbers, as `sorted_by_tokens` returns them: each shares most with the one before it,
        and places are in depth-first order.
    """
    found: list[Branch] = []
    total = 0
    for i in order:
        above: tuple[Run, ...] = ()
        if found:
            last = found[-1]
            above = _beginning(last.runs, common(samples[last.sample], samples[i]))
        depth = sum([size for _, size in above])
        found.append(Branch(i, total, len(samples[i]) - depth, above))
        total += found[-1].size
    return found


def sorted_by_tokens(samples: Sequence[Tensor]) -> list[int]:
    """Return the samples' numbers in an order in which those with a common prefix are neighbours."""
    return sorted(range(len(samples)), key=lambda i: _bytes(samples[i]))


def _bytes(x: Tensor) -> bytes:
    return ctypes.string_at(x.data_ptr(), x.nbytes) if x.numel() else b""


def common(one: Tensor, other: Tensor) -> int:
    """Return how many tokens of a sample are places of the one that is sorted before it."""
    most = min(len(one), len(other))
    differs = one[:most] != other[:most]
    if differs.dim() > 1:
        differs = differs.any(1)
    if not bool(differs.any()):
        return most  # The earlier one ends there: its last token has no next one of its own.
    return max(int(differs.to(torch.uint8).argmax()) - 1, 0)


def _beginning(runs: Sequence[Run], tokens: int) -> tuple[Run, ...]:
    found: list[Run] = []
    for place, size in runs:
        if tokens == 0:
            break
        found.append((place, min(size, tokens)))
        tokens -= found[-1][1]
    return tuple(found)


def places_of(runs: Sequence[Run]) -> Tensor:
    """Return the places of runs, one run after the other: int64, on the CPU."""
    starts, sizes = torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(-1, 2).unbind(1)
    ends = sizes.cumsum(0)
    total = int(ends[-1]) if len(runs) else 0
    offsets = (starts - ends + sizes).repeat_interleave(sizes, output_size=total)
    return offsets + torch.arange(total, device="cpu")


def ends_of(branches: Sequence[Branch], of_depths: Tensor) -> Tensor:
    """Return the intervals of a tree's tokens, as `Spans` takes them: int32 `[1, 1, S, 2n]`.

    branches: of the whole tree, in order.
    of_depths: int32 `[depths, 2m]`, the intervals of depths that a token of each depth attends to.
    """
    total = sum([branch.size for branch in branches])
    own = of_depths.unflatten(1, (-1, 2))
    runs = [(*branch.above, (branch.first, branch.size)) for branch in branches]
    ends = torch.zeros(total, max(map(len, runs)), own.size(1), 2, dtype=torch.int32, device="cpu")
    for branch, listed in zip(branches, runs, strict=True):
        end = branch.depth + branch.size
        depths = own[branch.depth : end]
        own_end = torch.arange(branch.depth + 1, end + 1, dtype=torch.int32, device="cpu")
        wanted = torch.stack([depths[..., 0], torch.minimum(depths[..., 1], own_end[:, None])], -1)
        begun = 0
        rows = ends[branch.first : branch.first + branch.size]
        for i, (place, size) in enumerate(listed):
            rows[:, i] = (wanted - begun).clamp(0, size) + place
            begun += size
    return ends.flatten(1)[None, None]
