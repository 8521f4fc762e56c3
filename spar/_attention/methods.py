# SPDX-License-Identifier: Apache-2.0
"""The ways in which ranks share an attention. Inputs and outputs have the caller's order of dims.

What follows from shapes, layouts and options is decided once: functions return what then attends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._checks import digest
from .._control.state import ALONE, Place
from .._exchange.arguments import Arguments, ranks_of
from .._exchange.exchange import GATHER, Exchange
from .._exchange.gather_plan import GatherPlan
from .._exchange.gathering import gather_pieces
from .._exchange.graph_ops import run_decided
from .._exchange.layouts import Layout, Piece, even, pieces, shards_pair
from .._group.group import Group
from ..ops.heads import HeadExchange
from ..sequence_layout import SequenceLayout, numbers_of
from .blocks import BlocksMaker, blocks_before
from .local import (
    Compute,
    Outs,
    Tensors,
    blocks_by_runs,
    by_blocks,
    by_graph_op,
    by_runs,
    by_spans,
    by_steps,
    in_ring,
    nothing,
    over_sequence,
    scores_and_blocks,
    spans_of,
)
from .problem import Problem
from .request import Request
from .ring import Ring, backward_exchanges, round_of
from .scores import Scores
from .sending import Gathering
from .travel import Shifts, gathered_by_documents, gathered_by_spans, shifts_by_runs, shifts_by_spans

Run = Callable[[Request], Outs]
# Returns the keys and values [B, K, T, ..] that this rank needs, of its own in the caller's order of dims.
Bring = Callable[[Tensor, Tensor], Sequence[Tensor]]


def permuted(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    """Return q, k and v as [B, H, S, D]."""
    order = problem.shapes.by_heads
    return q.permute(order), k.permute(order), v.permute(order)


def as_given(problem: Problem, outs: Outs) -> Outs:
    """Return outputs in the caller's order of dims, of which a log-sum-exp has all but the last."""
    order = problem.shapes.as_given
    out = outs[0].permute(order)
    return (out,) if len(outs) == 1 else (out, outs[1].permute(order[:3]))


def _with_own_keys(problem: Problem, compute: Compute) -> Run:
    """Attend to the keys that this rank passes, and to those that come meanwhile."""

    def run(request: Request) -> Outs:
        return as_given(problem, compute(permuted(problem, *request[:3]), request))

    return run


# ---- ulysses ----


def ulysses(problem: Problem) -> Run:
    """Exchange tokens for heads, attend over the whole sequence, and exchange back."""
    if problem.keys is None:
        raise problem.error("method", '"ulysses" and k and v have no layout', '"gather"')
    layouts = problem.queries, problem.keys, problem.keys
    exchange = _exchange_of_heads(problem, problem.group, [(problem.shapes.seq, *x[1:]) for x in layouts])
    return _by_heads(problem, exchange, over_sequence(problem, *exchange.own))


def hybrid(problem: Problem, inner: Any, outer: Any) -> Run:
    """Exchange tokens for heads in the ulysses group, and let K and V go round the ring group."""
    place = ranks_of(outer, "attention")
    layout = SequenceLayout.zigzag(problem.total, outer)
    sequence = even(problem.shapes.seq, layout.sizes[place.rank])
    exchange = _exchange_of_heads(problem, ranks_of(inner, "attention"), [sequence] * 3)
    first, heads = exchange.own
    if heads == 0:  # all ranks of this ring group have none
        return _by_heads(problem, exchange, functools.partial(nothing, problem))
    return _by_heads(problem, exchange, _ring(problem, numbers_of(layout, 0), place, first))


def _exchange_of_heads(problem: Problem, group: Group | Place, sequences: Sequence[Layout]) -> HeadExchange:
    heads, key_heads = problem.shapes.heads, problem.shapes.key_heads
    counts, results = (heads, key_heads, key_heads), 1 + problem.returns_lse
    dim = problem.shapes.head
    return HeadExchange("attention", group, counts, heads, dim, sequences, results, problem.note)


def _by_heads(problem: Problem, exchange: HeadExchange, compute: Compute) -> Run:
    has_some = exchange.own[1] < problem.shapes.heads

    def run(request: Request) -> Outs:
        tensors = permuted(problem, *exchange.scatter(request[:3]))
        if has_some and not (request.mask is request.spans is request.sinks is None):
            request = of_heads(request, *exchange.own)
        return tuple(exchange.gather(as_given(problem, compute(tensors, request))))

    return run


def of_heads(request: Request, first: int, count: int) -> Request:
    """Return a request with what of the mask, the spans and the sinks belongs to some heads."""
    mask, spans, sinks = request.mask, request.spans, request.sinks
    mask = mask.narrow(1, first, count) if mask is not None and mask.size(1) > 1 else mask
    sinks = None if sinks is None else sinks.narrow(0, first, count)
    if spans is not None and not torch.compiler.is_compiling():
        spans = spans.of_heads(first, count)
    return request._replace(mask=mask, spans=spans, sinks=sinks)


# ---- gather ----


def gather(problem: Problem) -> Run:
    """Gather the keys that this rank's queries need, all or a part, and attend with these queries."""
    decide, is_shared = _by_lengths, problem.group.world > 1
    if torch.compiler.is_compiling():
        # The number of keys that a rank needs follows from values that a graph does not know.
        by_values = problem.uses_spans or (problem.listed and problem.blockwise)
        if by_values and is_shared and problem.keys == problem.queries:
            decide = ring
    elif problem.uses_spans:
        decide = _by_spans
    elif problem.listed and is_shared:
        decide = _by_documents
    return decide(problem)


def _gathering(problem: Problem, bring: Bring, compute: Compute, own_first: bool) -> Run:
    """Gather keys, and attend to them; own_first: to this rank's own before."""

    def run(request: Request) -> Outs:
        gathered = bring(request.k, request.v)
        if own_first:
            return as_given(problem, compute(permuted(problem, *request[:3]), request, *gathered))
        q = request.q.permute(problem.shapes.by_heads)
        return as_given(problem, compute((q, gathered[0], gathered[1]), request))

    return run


def _by_lengths(problem: Problem) -> Run:
    """Gather all keys, unless this rank holds them."""
    if problem.keys is None:
        return _with_own_keys(problem, over_keys(problem))
    exchange, order, own_first = exchange_of_keys(problem), problem.shapes.by_heads, _is_own_first(problem)
    if own_first and not torch.compiler.is_compiling():
        gather = Gathering(exchange, problem.shapes.as_given, order)
        return _with_own_keys(problem, _own_first(problem, gather))

    def bring(k: Tensor, v: Tensor) -> Sequence[Tensor]:
        return [x.permute(order) for x in run_decided(exchange, (k, v))]

    return _gathering(problem, bring, (_own_first if own_first else over_keys)(problem), own_first)


def exchange_of_keys(problem: Problem) -> Exchange:
    """Return the exchange that gathers all of k and v, in the caller's order of dims."""
    assert problem.keys is not None
    args = shards_pair((problem.shapes.seq, *problem.keys[1:]), problem.group.world, False)
    return Exchange("attention", problem.group, (args, args), kind=GATHER, note=problem.note)


def over_keys(problem: Problem) -> Compute:
    """Attend with this rank's queries to all keys, which it holds."""
    place, shapes = (problem.queries, problem.group.world, problem.group.rank), problem.shapes
    if problem.is_empty(shapes.heads, shapes.tokens, problem.total_keys):
        return functools.partial(nothing, problem)
    if problem.uses_spans:
        return by_graph_op(problem, ALONE, *place, 0)
    skips = problem.causal or problem.packed or problem.mask is not None
    if problem.blockwise and (skips or problem.by_blocks):
        return by_blocks(problem, 0, pieces(*place))
    runs = pieces(*place) if skips else [Piece(0, shapes.tokens, 0)]
    return by_runs(problem, runs, [Piece(0, problem.total_keys, 0)])


def _is_own_first(problem: Problem) -> bool:
    """Whether keys are gathered, and causality, which blocks can skip, is all that is asked for."""
    shapes, is_shared = problem.shapes, problem.group.world > 1 and problem.keys == problem.queries
    is_causal_alone = problem.causal and problem.blockwise and problem.mask is None
    is_causal_alone = is_causal_alone and not (problem.packed or problem.uses_spans)
    # As the same on all ranks, of which some may have no tokens.
    is_empty = problem.is_empty(shapes.heads, problem.total, problem.total_keys)
    return is_causal_alone and is_shared and not is_empty


def _own_first(problem: Problem, gather: Gathering | None = None) -> Compute:
    """Attend to this rank's keys, then to those before them, which `gather` brings meanwhile, or the caller.

    One block of this rank's own keys covers all queries: its output and gradients are not copied.
    """
    runs = pieces(problem.queries, problem.group.world, problem.group.rank)
    own = blocks_by_runs(problem)(runs, runs)
    return by_steps(problem, problem.scores(), own, blocks_before(runs), gather=gather)


def _planned_keys(problem: Problem, plan: GatherPlan, note: str, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    call, order = Arguments("attention", k, problem.group, "k", 0), problem.shapes.by_heads
    return gather_pieces(call, plan, (k.permute(order), v.permute(order)), 2, note)


def _by_documents(problem: Problem) -> Run:
    """Gather the keys of documents that this rank shares with others, and attend to them and to its own."""
    place, shapes = (problem.queries, problem.group.world, problem.group.rank), problem.shapes
    found = gathered_by_documents(*place, problem.causal, with_own=not problem.blockwise)
    # What ranks exchange does not show the layout.
    note = f"hash of the runs {digest(problem.queries):x}"
    note = f"{problem.note}, {note}" if problem.note else note
    bring, runs = functools.partial(_planned_keys, problem, found.plan, note), pieces(*place)
    is_empty = problem.is_empty(shapes.heads, shapes.tokens, shapes.key_tokens)
    if is_empty:
        compute: Compute = functools.partial(nothing, problem)
    elif problem.blockwise:
        blocks = blocks_by_runs(problem)
        compute = by_steps(problem, problem.scores(), blocks(runs, runs), blocks(runs, found.held))
    else:
        compute = by_runs(problem, runs, found.held)
    return _gathering(problem, bring, compute, problem.blockwise and not is_empty)


def _by_spans(problem: Problem) -> Run:
    """Gather the keys that spans leave this rank's queries, and attend to them and to its own."""
    world, rank, shapes = problem.group.world, problem.group.rank, problem.shapes
    runs = pieces(problem.queries, world, rank)

    def run(request: Request) -> Outs:
        q, k, v = permuted(problem, *request[:3])
        held: Sequence[Piece] = [Piece(0, problem.total_keys, 0)]
        if problem.keys is not None:
            spans = spans_of(problem, request)
            plan, held = gathered_by_spans(spans, problem.queries, problem.keys, world, rank)
            k, v = _planned_keys(problem, plan, problem.note, request.k, request.v)
        if problem.is_empty(shapes.heads, shapes.tokens, k.size(2)):
            return as_given(problem, nothing(problem, (q, k, v), request))
        return as_given(problem, by_spans(problem, 0, runs, held, (q, k, v), request))

    return run


# ---- ring ----


def ring(problem: Problem) -> Run:
    """Let K and V go round while blocks are computed."""
    if problem.keys is None:
        raise problem.error("method", '"ring" and k and v have no layout', '"gather"')
    if problem.keys != problem.queries:
        raise problem.error("method", '"ring" and q, k and v have two layouts', '"ulysses" or "gather"')
    return _with_own_keys(problem, _ring(problem, problem.queries, problem.group, 0))


def _ring(problem: Problem, layout: Layout, place: Group | Place, first: int) -> Compute:
    """Attend with this rank's tokens in the layout, and heads from `first` on, to the tokens of all ranks."""
    compiles, world, rank = torch.compiler.is_compiling(), place.world, place.rank
    if problem.dropout_p and not (problem.uses_spans and compiles):
        raise problem.error("dropout_p", "passed", 'none with a ring; pass method="ulysses" or "gather"')
    if not problem.blockwise and not problem.dropout_p:
        expected = 'a kernel\'s name with a ring; or pass method="ulysses" or "gather"'
        raise problem.error("kernel", "a function", expected)
    if compiles and (problem.uses_spans or problem.listed):
        return by_graph_op(problem, place, layout, world, rank, first)

    def made(shifts: Shifts, scores: Scores, blocks: BlocksMaker) -> Compute:
        steps = round_of(layout, shifts, blocks)
        return in_ring(Ring(place, steps, scores, place, backward_exchanges(steps), problem.note))

    def compute(tensors: Tensors, request: Request) -> Outs:
        shifts = shifts_by_spans(spans_of(problem, request), layout, world, rank)
        return made(shifts, *scores_and_blocks(problem, first, tensors, request))(tensors, request)

    if problem.uses_spans:
        return compute
    shifts = shifts_by_runs(layout, world, rank, problem.causal, problem.packed)
    return made(shifts, problem.scores(first), blocks_by_runs(problem))
