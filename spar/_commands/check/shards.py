# SPDX-License-Identifier: Apache-2.0
"""Where each rank's elements lie in the whole, and trials of operations on these shards, in plain torch.

An index lists, for each rank, the places of its elements along one dim. A reference must not share code with
what it checks: nothing here calls spar.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .trial import NO_GRADIENT, OWN, SUMMED, Setting, Tensors, Trial, numbers

Index = list[Tensor]
Places = Callable[[Setting], Index]  # computes an index
Run = Callable[..., Any]  # calls spar with this rank's inputs

DOCUMENTS = (5, 0, 9, 1)  # lengths of packed sequences: an empty one, and one shorter than most groups
LARGE, WIDE = 1 << 20, 64  # elements of the whole tensor where a transfer is large, and an all_to_all's width


# ---- indices ----


def _places(
    split: Callable[[Tensor, int], Sequence[Tensor]] = torch.tensor_split,
    total: Callable[[int], int] = lambda world: 5 * world + 3,
    ring: bool = False,
) -> Places:
    """Split a total for the number of ranks. ring: over the ring, and its parts evenly over ulysses."""

    def index(s: Setting) -> Index:
        whole = torch.arange(total(s.world))
        if not ring:
            return list(split(whole, s.world))
        parts = [part.tensor_split(s.ulysses) for part in split(whole, s.ring)]
        return [part[place] for place in range(s.ulysses) for part in parts]  # a ring's ranks are neighbours

    return index


def _sizes_with_0(world: int) -> list[int]:
    """Return a size for each rank; that of the last of several is 0."""
    return [3 + 2 * (rank % 2) for rank in range(world - 1)] + [0 if world > 1 else 3]


def _zigzag(x: Tensor, world: int) -> Index:
    chunks = x.tensor_split(2 * world)
    return [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(world)]


def _segments(*starts: int) -> Callable[[Tensor, int], Index]:
    """Split each segment of the sequence over all ranks."""
    return lambda x, world: [
        torch.cat(parts)
        for parts in zip(*(segment.tensor_split(world) for segment in x.tensor_split(starts)), strict=True)
    ]


def long_and_short(world: int) -> tuple[int, ...]:
    """Return lengths of which balanced ranks without tolerance cut the first one, and have one other each."""
    return 6 * world, *[3] * world


def _balanced(x: Tensor, world: int) -> Index:
    """The long document lies on the ranks from both ends inwards."""
    long, *short = x.split(long_and_short(world))
    return [torch.cat(parts) for parts in zip(_zigzag(long, world), short, strict=True)]


def _documents_in_zigzag(x: Tensor, world: int) -> Index:
    """Each document in zigzag order, as thd of Megatron and Transformer Engine."""
    parts = zip(*(_zigzag(document, world) for document in x.split(DOCUMENTS)), strict=True)
    return [torch.cat(part) for part in parts]


def _multiple(world: int) -> int:
    return 6 * world


_documents = _segments(*accumulate(DOCUMENTS[:-1])), lambda world: sum(DOCUMENTS)
PLACES = {
    "uneven": _places(),
    "even": _places(total=_multiple),
    "large": _places(total=lambda world: LARGE // 6),
    "large tokens": _places(total=lambda world: LARGE // (2 * WIDE * (2 * world + 1))),
    "heads": _places(total=lambda world: 2 * world + 1),
    "one 0": _places(lambda x, world: x.split(_sizes_with_0(world)), lambda world: sum(_sizes_with_0(world))),
    "zigzag": _places(_zigzag),
    "even zigzag": _places(_zigzag, _multiple),
    "packed": _places(*_documents),
    "balanced": _places(_balanced, lambda world: sum(long_and_short(world))),
    "documents": _places(_documents_in_zigzag, lambda world: sum(DOCUMENTS)),
    "joint": _places(_segments(5)),
    "hybrid": _places(_zigzag, ring=True),
    "even hybrid": _places(_zigzag, _multiple, ring=True),
    "packed hybrid": _places(*_documents, ring=True),
}


# By the name of a layout, the lengths of its documents for a number of ranks.
DOCUMENTS_OF: dict[str, Callable[[int], Sequence[int]]] = {
    "packed": lambda world: DOCUMENTS,
    "balanced": long_and_short,
    "of_runs": lambda world: DOCUMENTS,
}


def total(index: Index) -> int:
    return sum(map(len, index))


def chosen(wholes: Tensors, index: Index, dim: int = 1) -> list[Tensors]:
    """Return each rank's part of the whole tensors."""
    return [[x.index_select(dim, indices) for x in wholes] for indices in index]


def joined(inputs: Sequence[Tensors], index: Index) -> Tensors:
    """Return the whole tensors of all ranks' parts of dim 1."""
    order = torch.cat(index).argsort()
    return [torch.cat(parts, 1).index_select(1, order) for parts in zip(*inputs, strict=True)]


# ---- trials: of the setting, spar's call on this rank's inputs, and where the shards lie ----


def split(s: Setting, run: Run, index: Index, scaled: bool = True) -> Trial:
    """All ranks hold the whole, and each keeps its part. scaled: the gathered gradient is divided by P."""
    x, scale = numbers(2, total(index), 3), operator.truediv if scaled else None
    return Trial([[x]] * s.world, run, lambda inputs: chosen(inputs[0], index), SUMMED, scale)


def gather(s: Setting, run: Run, index: Index, scaled: bool = True, gradient: str = OWN) -> Trial:
    """Each rank holds its part, and gathers the whole. scaled: its own gradient is multiplied by P."""
    parts, scale = chosen([numbers(2, total(index), 3)], index), operator.mul if scaled else None
    return Trial(parts, run, lambda inputs: [joined(inputs, index)] * s.world, gradient, scale)


# each rank's gradient sums those of all ranks
exact_gather = partial(gather, scaled=False, gradient=SUMMED)


def add(s: Setting, run: Run, index: Index, dtype: torch.dtype = torch.float32) -> Trial:
    """Each rank holds a summand of the whole, and keeps its part of the sum."""

    def reference(inputs: list[Tensors]) -> list[Tensors]:
        summed = torch.stack([tensors[0] for tensors in inputs]).sum(0, dtype=torch.float32).to(dtype)
        return chosen([summed], index)

    summands = [[numbers(2, total(index), 3, seed=rank, dtype=dtype)] for rank in range(s.world)]
    return Trial(summands, run, reference)


def swap(
    s: Setting,
    run: Run,
    index: Index,
    after: str = "heads",
    width: int = 3,
    count: int = 1,
    dtype: torch.dtype = torch.float32,
    gradient: str = SUMMED,
) -> Trial:
    """Each rank holds its part of dim 1 of `count` tensors, and receives its part of dim 2."""
    received = PLACES[after](s)
    shape = (2, total(index), total(received), width)
    parts = chosen([numbers(*shape, seed=n, dtype=dtype) for n in range(count)], index)
    return Trial(parts, run, lambda inputs: chosen(joined(inputs, index), received, 2), gradient)


def indices(s: Setting, run: Run, index: Index) -> Trial:
    """Each rank computes where its elements lie."""
    return Trial([[]] * s.world, run, lambda inputs: [[rows] for rows in index], NO_GRADIENT)


# ---- attention ----

HEAD = 8  # a head's size
TOLERANCE = 1e-4  # kernels compute in float32, the reference in float64


def plain_attention(qkv: Tensors, forbidden: Tensor) -> Tensor:
    """Attend over [B, S, H, D] in float64; a query without keys receives zeros."""
    q, k, v = (x.double().repeat_interleave(qkv[0].size(2) // x.size(2), 2) for x in qkv)
    scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(HEAD)
    weights = scores.masked_fill(forbidden, -1e30).softmax(-1).masked_fill(forbidden, 0.0)
    return torch.einsum("bhst,bthd->bshd", weights, v).float()


def accumulate_tokens(s: Setting, run: Run, index: Index) -> Trial:
    """Each token becomes the sum of those up to it, of each head."""
    parts = chosen([numbers(2, total(index), 2 * s.world + 1, HEAD)], index)
    return Trial(parts, run, lambda inputs: chosen([joined(inputs, index)[0].cumsum(1)], index))


def attend(
    s: Setting,
    run: Run,
    index: Index,
    causal: bool,
    masked: bool,
    documents: Callable[[int], Sequence[int]] | None,
    window: int | None = None,
) -> Trial:
    """run: also of the mask of keys. documents: their lengths; each attends to itself alone.

    window: so many keys before.
    """
    query_heads, key_heads = 2 * s.world + 2, s.world + 1
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, total(index), heads, HEAD) for heads in (query_heads, key_heads, key_heads)]
    parts = chosen([torch.randn(shape, generator=generator) for shape in shapes], index)
    position, mask = torch.arange(total(index)), None
    forbidden = ((position > position[:, None]) & causal)[None, None]  # [B or 1, 1, S, S]
    if window is not None:
        forbidden = forbidden | (position < position[:, None] - window)
    if documents is not None:
        lengths = torch.tensor(documents(s.world))
        document = torch.arange(len(lengths)).repeat_interleave(lengths)
        forbidden = forbidden | (document != document[:, None])
    if masked:
        mask = position.expand(2, -1) % 4 != 1
        forbidden = forbidden | ~mask[:, None, None]
        mask = mask.to(s.device)

    def reference(inputs: list[Tensors]) -> list[Tensors]:
        return chosen([plain_attention(joined(inputs, index), forbidden)], index)

    return Trial(parts, partial(run, mask), reference, tolerance=TOLERANCE)
