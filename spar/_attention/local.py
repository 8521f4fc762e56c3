# SPDX-License-Identifier: Apache-2.0
"""What a rank computes of an attention, once it has the keys that its queries need.

What follows from shapes, layouts and options is decided once: functions return what then attends.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .._control.state import ALONE, Place
from .._exchange.cut_and_join import selected
from .._exchange.gather_plan import placed
from .._exchange.layouts import Layout, Piece, even
from .._exchange.observers import is_fake
from .._group.group import Group
from ..ops.unused import depending_on
from . import tiles
from .blocks import Block, BlocksMaker, blocks_of, no_blocks
from .graph_op import Description, in_graph
from .kernel_blocks import in_parts
from .kernels import blocks_of_spans, flash_instead_of_cudnn
from .kernels.kernel import Needs, accumulated, readable
from .masks import causal_mask, joined, sliced
from .problem import Problem
from .request import Request
from .ring import Ring, Round, attend_round
from .scores import Blocks, Scores
from .sending import Gathering
from .spans import Spans, with_keywords

# q [B, H, S, D], k [B, K, T, D] and v [B, K, T, E].
Tensors = tuple[Tensor, Tensor, Tensor]
# The output [B, H, S, E], and the log-sum-exp [B, H, S] if the caller asks for it.
Outs = tuple[Tensor, ...]
# So many keys has a block at most for which a bias function is called.
MOST_KEYS = 1024


# Attends with q of some heads to k and v, then to gathered keys and values: of (tensors, request, *gathered).
# The request's mask, spans and sinks are those of these heads.
Compute = Callable[..., Outs]


def nothing(problem: Problem, tensors: Tensors, request: Request) -> Outs:
    """Return the outputs of queries without keys, which depend on all inputs, as the peers' outputs do."""
    q, k, v = tensors
    outs = [q.new_zeros(*q.shape[:-1], v.size(3))]
    if problem.returns_lse:
        outs.append(q.new_full(q.shape[:-1], -torch.inf, dtype=accumulated(q.dtype)))
    return tuple([depending_on(x, (q, k, v, request.mask, request.sinks)) for x in outs])


def over_sequence(problem: Problem, first: int, heads: int) -> Compute:
    """Attend over the whole sequence, which this rank holds, with heads from `first` on."""
    whole, keys = [Piece(0, problem.total, 0)], [Piece(0, problem.total_keys, 0)]
    if problem.is_empty(heads, problem.total, problem.total_keys):
        return functools.partial(nothing, problem)
    if problem.uses_spans and torch.compiler.is_compiling():
        return by_graph_op(problem, ALONE, even(0, problem.total), 1, 0, first)
    if problem.uses_spans:
        return functools.partial(by_spans, problem, first, whole, keys)
    runs = documents_of(problem) if problem.packed else whole
    if problem.joins and not problem.by_blocks:
        return _by_parts(problem, blocks_by_runs(problem)(runs, runs))
    return by_blocks(problem, first, runs) if problem.by_blocks else by_runs(problem, runs, keys)


# ---- by blocks ----


def documents_of(problem: Problem) -> list[Piece]:
    """Return the runs of keys that may attend to each other: the documents, or the whole."""
    if not problem.packed:
        return [Piece(0, problem.total_keys, 0)]
    ends = enumerate(itertools.accumulate(problem.lengths))
    return [Piece(end - length, length, i) for (i, end), length in zip(ends, problem.lengths, strict=True)]


def blocks_by_runs(problem: Problem) -> BlocksMaker:
    """Return what finds the blocks that causality and documents leave."""
    if not problem.computes:
        return no_blocks
    causal, documents, joined = problem.causal, problem.packed, problem.mask is None
    found = functools.partial(blocks_of, causal=causal, documents=documents, joined=joined)
    return (lambda queries, keys: in_parts(found(queries, keys))) if problem.joins else found


def by_blocks(problem: Problem, first: int, runs: Sequence[Piece]) -> Compute:
    """Attend with runs of queries to all keys, which this rank holds; skip blocks without any."""
    return by_steps(problem, problem.scores(first), blocks_by_runs(problem)(runs, documents_of(problem)))


def by_steps(
    problem: Problem, scores: Scores, *steps: Sequence[Block], gather: Gathering | None = None
) -> Compute:
    """Attend by blocks of keys that this rank holds: its own or all, and in a second step gathered ones.

    gather: what brings these; None: the caller of the result.
    """
    reports_to, blocks = ALONE if problem.keys is None else problem.group, [tuple(step) for step in steps]
    return in_ring(Ring(ALONE, Round(tuple(blocks)), scores, reports_to, 1, gather=gather))


def in_ring(ring: Ring) -> Compute:
    def compute(tensors: Tensors, request: Request, *gathered: Tensor) -> Outs:
        return attend_round(ring, *tensors, request.mask, request.sinks, *gathered)

    return compute


# ---- by spans ----


def spans_of(problem: Problem, request: Request) -> Spans:
    """Return what causality, documents, the window and the caller's spans leave together."""
    return with_keywords(request.spans, problem.keywords)


def by_spans(
    problem: Problem,
    first: int,
    runs: Sequence[Piece],
    keys: Sequence[Piece],
    tensors: Tensors,
    request: Request,
) -> Outs:
    """Attend with the runs of queries to the keys, runs that this rank holds, as the spans say."""
    if problem.dropout_p:
        return (_by_tiles(problem, runs, keys, tensors, request),)
    scores, blocks = scores_and_blocks(problem, first, tensors, request)
    return by_steps(problem, scores, blocks(runs, keys))(tensors, request)


def scores_and_blocks(
    problem: Problem, first: int, tensors: Tensors, request: Request
) -> tuple[Scores, BlocksMaker]:
    """Return how spans change scores, and what finds the blocks of runs of queries and keys by them."""
    spans, (q, _, v) = spans_of(problem, request), tensors
    scores = replace(problem.scores(first), spans=spans, bias=request.bias)
    if not problem.computes:
        return scores, no_blocks
    if request.mask is None and request.bias is None:
        needs = Needs(softcap=problem.softcap > 0, wider=problem.returns_lse)
        read = blocks_of_spans(problem.kernel, q, v, needs, spans)
        if read is not None:
            return scores, read
    # A bias is a tensor of all scores of a block.
    most = 2**31 if request.bias is None else MOST_KEYS
    return scores, functools.partial(tiles.blocks_by, spans, most_keys=most)


def _by_tiles(
    problem: Problem, runs: Sequence[Piece], keys: Sequence[Piece], tensors: Tensors, request: Request
) -> Tensor:
    """Attend with each tile of queries to the keys of its spans, in one call: blocks cannot drop weights."""
    spans, (q, k, v) = spans_of(problem, request), tensors
    outs, of_keys = [], tiles.held_runs(keys)
    for query, begin, size, first, end in tiles.tile_of_keys(spans, runs):
        allowed, held = [], []
        for _, at, (start, count, _) in of_keys.parts(first, end - first):
            held.append((at, count))
            if not is_fake(q):
                allowed.append(spans.dense(begin, size, start, count).to(q.device))
            else:
                allowed.append(q.new_ones(*spans.shape[:2], size, count, dtype=torch.bool))
            if request.mask is not None:
                allowed[-1] = joined(sliced(request.mask, begin, size, start, count), allowed[-1])
        of_tile = q.narrow(2, query, size), selected(k, held, 2), selected(v, held, 2)
        if held:
            out = _kernel(problem, of_tile, request, torch.cat(allowed, 3), False)
            outs.append(out.nan_to_num(0.0))
        else:
            outs.append(nothing(problem, of_tile, request)[0])
    return torch.cat(outs, 2)


def by_graph_op(
    problem: Problem, place: Group | Place, queries: Layout, world: int, rank: int, first: int
) -> Compute:
    """Put one op into the graph for spans, whose values a graph does not know: see `graph_op`.

    place: as of a Ring. queries, world, rank: the layout of the queries, and this rank's place in it.
    """

    def compute(tensors: Tensors, request: Request) -> Outs:
        if request.bias is not None or problem.dropout_p:
            name, value = ("dropout_p", problem.dropout_p) if request.bias is None else ("bias", "a function")
            raise problem.error(name, f"{value} in compiled code, with spans or a window", "none")
        left, right = problem.window or (None, None)
        sides = (-1 if left is None else left, -1 if right is None else right)
        description = Description(
            (place.handle, place.world, place.rank),
            world,
            rank,
            queries,
            problem.total_keys,
            (first, problem.shapes.heads),
            (int(problem.causal), *sides, *problem.lengths),
            problem.scale,
            problem.softcap,
            problem.kernel or "",
            problem.note,
            problem.returns_lse,
        )
        ends = None if request.spans is None else request.spans.ends
        return in_graph(description, *tensors, request.mask, request.sinks, ends)

    return compute


# ---- by the caller's kernel, or torch's ----


def _by_parts(problem: Problem, blocks: Sequence[Block]) -> Compute:
    """Attend to all documents by one call, of which torch has gradients."""
    (block,) = blocks

    def compute(tensors: Tensors, request: Request) -> Outs:
        q, k, v = readable(*tensors)
        kernel, inputs = Blocks(problem.scores(), q, v, None).of(block, q, k, v)
        return (kernel.forward(inputs)[0],)

    return compute


def by_runs(problem: Problem, runs: Sequence[Piece], held: Sequence[Piece]) -> Compute:
    """Attend with each run of queries to the keys that it may attend to, by one call for each.

    held: the keys that this rank has, all that a document's run may attend to one behind the other.
    """
    documents, causal, runs = documents_of(problem), problem.causal, [run for run in runs if run.size]
    # Of each run: where its keys begin in the local tensor and in the sequence, and how many they are.
    places, firsts, counts = [], [], []
    for start, size, document in runs:
        first, keys, _ = documents[document if problem.packed else 0]
        (place,) = [at + first - run.start for at, run in placed(held) if 0 <= first - run.start < run.size]
        places.append(place)
        firsts.append(first)
        counts.append(min(first + keys, start + size) - first if causal else keys)
    sizes, is_whole = [run.size for run in runs], counts == [sum([piece.size for piece in held])]

    def compute(tensors: Tensors, request: Request) -> Outs:
        q, k, v = tensors
        queries = (q,) if is_whole else q.split(sizes, 2)
        keys_at, values_at = ({}, {}) if is_whole else (_cut_at(k, places), _cut_at(v, places))
        outs = []
        for run, own, place, first, keys in zip(runs, queries, places, firsts, counts, strict=True):
            of_run = tensors
            if not is_whole:
                of_run = own, keys_at[place].narrow(2, 0, keys), values_at[place].narrow(2, 0, keys)
            mask = None if request.mask is None else sliced(request.mask, run.start, run.size, first, keys)
            outs.append(_kernel(problem, of_run, request, mask, causal, run.start - first))
        return (outs[0] if len(outs) == 1 else torch.cat(outs, 2),)

    return compute


def _cut_at(x: Tensor, places: Sequence[int]) -> dict[int, Tensor]:
    """Cut `[B, H, S, E]` where documents begin: with one gradient, where each slice has one as long as x."""
    starts = sorted({0, *places})
    ends = [*starts[1:], x.size(2)]
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    return dict(zip(starts, x.split(sizes, 2), strict=True)) if len(starts) > 1 else {0: x}


def _kernel(
    problem: Problem, tensors: Tensors, request: Request, mask: Tensor | None, causal: bool, first: int = 0
) -> Tensor:
    """Attend with the caller's kernel, or torch's; first: the key in whose place the first query is."""
    q, k, v = tensors
    if request.attend is not None:
        return _called(problem, request.attend, q, k, v)
    if causal and (mask is not None or first > 0):
        lower, causal = causal_mask(q.size(2), k.size(2), first, q.device), False
        mask = lower if mask is None else joined(mask, lower)
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(q.dtype)
    if mask is None and problem.varied and (flash := flash_instead_of_cudnn(q, v)):
        return flash.attend(q, k, v, problem.dropout_p, causal, problem.scale)
    # torch takes no symbolic bool.
    grouped = {"enable_gqa": True} if q.size(1) != k.size(1) else {}
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=problem.dropout_p,
        is_causal=causal,
        scale=problem.scale,
        **grouped,
    )


def _called(problem: Problem, attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call the caller's kernel with `[B, S, H, D]` of equal heads, and check what it returns."""
    if q.size(1) != k.size(1):
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    out: Any = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    expected = [q.size(0), q.size(2), q.size(1), v.size(3)]
    if not isinstance(out, Tensor) or list(out.shape) != expected:
        value = f"of shape {list(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise problem.error("the result of kernel", value, f"a tensor of shape {expected}")
    return out.transpose(1, 2)
