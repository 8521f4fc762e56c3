# SPDX-License-Identifier: Apache-2.0
"""Where each rank's elements lie in the whole, and the trials of operations that move them, in plain torch.

An index lists, for each rank, the places of its elements along one dim. A reference must not share code with
what it checks: nothing here calls spar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .trial import OWN, SUMMED, Setting, Tensors, Trial, numbers

Index = list[Tensor]
Indexed = Callable[[int, Setting], Index]  # computes the index of a total
Call = Callable[..., Any]  # calls spar with the setting, the total and this rank's inputs
Make = Callable[[Setting], Trial]
Total = Callable[[int], int]  # chooses a total for the number of ranks

DOCUMENTS = (5, 0, 9, 1)  # lengths of packed sequences: an empty one, and one shorter than most groups


# ---- indices ----


def even(total: int, s: Setting) -> Index:
    return list(torch.arange(total).tensor_split(s.world))


def uneven_sizes(world: int) -> list[int]:
    """Return a size for each rank; that of the last of several is 0."""
    return [3 + 2 * (rank % 2) for rank in range(world - 1)] + [0 if world > 1 else 3]


def uneven(total: int, s: Setting) -> Index:
    return list(torch.arange(total).split(uneven_sizes(s.world)))


def zigzag(total: int, s: Setting) -> Index:
    return _zigzag(total, s.world)


def packed(total: int, s: Setting) -> Index:
    return _packed(DOCUMENTS, s.world)


def hybrid(total: int, s: Setting) -> Index:
    """Zigzag over the ring, even over ulysses."""
    return _among(_zigzag(total, s.ring) if s.ring > 1 else [torch.arange(total)], s.ulysses)


def packed_hybrid(total: int, s: Setting) -> Index:
    return _among(_packed(DOCUMENTS, s.ring), s.ulysses)


def _zigzag(total: int, world: int) -> Index:
    chunks = torch.arange(total).tensor_split(2 * world)
    return [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(world)]


def _packed(lengths: Sequence[int], world: int) -> Index:
    parts = [document.tensor_split(world) for document in torch.arange(sum(lengths)).split(list(lengths))]
    return [torch.cat([part[rank] for part in parts]) for rank in range(world)]


def _among(rings: Index, ulysses: int) -> Index:
    """Split the part of each ring rank among the ulysses ranks. The ranks of one ring are neighbours."""
    parts = [part.tensor_split(ulysses) for part in rings]
    return [part[place] for place in range(ulysses) for part in parts]


def any_total(world: int) -> int:
    return 5 * world + 3


def multiple(world: int) -> int:
    return 6 * world


def documents(world: int) -> int:
    return sum(DOCUMENTS)


def joined(parts: Sequence[Tensor], index: Index, dim: int) -> Tensor:
    """Return the whole of all ranks' parts."""
    return torch.cat(list(parts), dim).index_select(dim, torch.cat(index).argsort())


# ---- trials ----


def split(call: Call, index: Indexed, total: Total = any_total, scaled: bool = True) -> Make:
    """All ranks hold the whole, and each keeps its part. scaled: the gathered gradient is divided by P."""

    def make(s: Setting) -> Trial:
        size = total(s.world)
        places, x = index(size, s), numbers(2, size, 3)
        return Trial(
            [[x]] * s.world,
            partial(call, s, size),
            lambda inputs: [[own[0].index_select(1, i)] for own, i in zip(inputs, places, strict=True)],
            SUMMED,
            (lambda g: g / s.world) if scaled else None,
        )

    return make


def gather(
    call: Call, index: Indexed, total: Total = any_total, scaled: bool = True, gradient: str = OWN
) -> Make:
    """Each rank holds its part, and gathers the whole. scaled: its own gradient is multiplied by P."""

    def make(s: Setting) -> Trial:
        size = total(s.world)
        places, x = index(size, s), numbers(2, size, 3)

        def reference(inputs: list[Tensors]) -> list[Tensors]:
            return [[joined([own[0] for own in inputs], places, 1)]] * s.world

        return Trial(
            [[x.index_select(1, i)] for i in places],
            partial(call, s, size),
            reference,
            gradient,
            (lambda g: g * s.world) if scaled else None,
        )

    return make


def exact_gather(call: Call, index: Indexed, total: Total = any_total) -> Make:
    """Each rank's gradient sums those of all ranks."""
    return gather(call, index, total, scaled=False, gradient=SUMMED)


def add(call: Call, index: Indexed, total: Total = any_total, dtype: torch.dtype = torch.float32) -> Make:
    """Each rank holds a summand of the whole, and keeps its part of the sum."""

    def make(s: Setting) -> Trial:
        size = total(s.world)
        places = index(size, s)

        def reference(inputs: list[Tensors]) -> list[Tensors]:
            summed = torch.stack([own[0] for own in inputs]).sum(0, dtype=torch.float32).to(dtype)
            return [[summed.index_select(1, i)] for i in places]

        inputs = [[numbers(2, size, 3, seed=rank, dtype=dtype)] for rank in range(s.world)]
        return Trial(inputs, partial(call, s, size), reference)

    return make


def swap(
    call: Call,
    before: Indexed = even,
    after: Indexed = even,
    tokens: Total = any_total,
    heads: Total = lambda world: 2 * world + 1,
    width: int = 3,
    count: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Make:
    """Each rank holds its part of dim 1 of `count` tensors, and receives its part of dim 2."""

    def make(s: Setting) -> Trial:
        size, across = tokens(s.world), heads(s.world)
        held, received = before(size, s), after(across, s)
        wholes = [numbers(2, size, across, width, seed=n, dtype=dtype) for n in range(count)]

        def reference(inputs: list[Tensors]) -> list[Tensors]:
            full = [joined(parts, held, 1) for parts in zip(*inputs, strict=True)]
            return [[x.index_select(2, i) for x in full] for i in received]

        inputs = [[x.index_select(1, i) for x in wholes] for i in held]
        return Trial(inputs, partial(call, s, size), reference)

    return make
