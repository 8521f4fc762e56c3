# SPDX-License-Identifier: Apache-2.0
"""The ways in which ranks share an attention. Inputs and outputs have the caller's order of dims."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .._control.state import ALONE, Place
from .._exchange.arguments import ranks_of
from .._exchange.cut_and_join import selected
from .._exchange.gathering import gather_pieces
from .._exchange.layouts import Layout, Piece, even, pieces
from .._exchange.observers import is_fake
from .._group.group import Group
from .._group.registry import place_of
from ..ops.gather import transpose_for
from ..ops.heads import Dims, gather_heads, scatter_heads
from ..ops.items import as_items, from_items
from ..sequence_layout import SequenceLayout, numbers_of
from ..sizes import share
from . import tiles
from .blocks import blocks_before, blocks_of, own_block
from .documents import gathered_of
from .graph_op import Description, in_graph
from .halo import BlocksMaker, halo_of, round_by, within
from .kernels import can_compute, flash_instead_of_cudnn
from .kernels.kernel import Needs
from .long_blocks import long_blocks, suits
from .masks import causal_mask, joined, sliced
from .parts import Outs, Part, Tensors, nothing, part_of
from .problem import Inputs, Problem
from .ring import Ring, Round, attend_round, backward_exchanges
from .rounds import cached_round, round_of
from .strips import strip_blocks, strips_of

# So many keys has a block at most for which a bias function is called.
MOST_KEYS = 1024


def _documents(inputs: Inputs) -> list[Piece]:
    """Return the runs of keys that may attend to each other: the documents, or the whole."""
    if not inputs.packed:
        return [Piece(0, inputs.total_keys, 0)]
    lengths = inputs.queries.lengths
    ends = enumerate(itertools.accumulate(lengths))
    return [Piece(end - length, length, i) for (i, end), length in zip(ends, lengths, strict=True)]


# ---- ulysses ----


def ulysses(problem: Problem) -> Outs:
    """Exchange tokens for heads, attend over the whole sequence, and exchange back."""
    inputs = problem.inputs
    if inputs.keys is None:
        raise problem.call.error("method", '"ulysses" and k and v have no layout', '"gather"')
    head, seq, group = inputs.head, inputs.seq, inputs.queries.group
    dims = head, seq, group, None
    return _gathered_heads(problem, _whole(problem, _scattered(problem, dims)), dims, inputs.queries)


def _gathered_heads(problem: Problem, outs: Outs, dims: Dims, layout: SequenceLayout | None) -> Outs:
    """Exchange outputs of this rank's heads for its tokens of all heads, in the caller's order of dims."""
    heads, order = problem.inputs.heads, problem.inputs.as_given
    if len(outs) == 1:
        return (gather_heads("attention", outs[0].permute(order), heads, dims, layout),)
    given = [x.permute(order[: x.dim()]) for x in outs]
    received = gather_heads("attention", as_items(given), heads, dims, layout)
    return tuple([from_items(x, y) for x, y in zip(received, given, strict=True)])


def _scattered(problem: Problem, dims: Dims) -> Part:
    """Exchange tokens for this rank's heads: of the whole sequence, or of the dims' number of tokens.

    Query heads of the result follow the key heads evenly.
    """
    inputs, (_, _, group, size) = problem.inputs, dims
    layouts = [inputs.queries, inputs.keys, inputs.keys] if size is None else None
    tensors = scatter_heads(
        "attention", [inputs.q, inputs.k, inputs.v], inputs.heads, dims, layouts, problem.note
    )
    q, k, v = (x.permute(inputs.by_heads) for x in tensors)
    if problem.weights.attend is not None and k.size(1) not in (0, q.size(1)):
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    place = place_of(group)
    first = sum([share(inputs.heads, place.world, rank) for rank in range(place.rank)])
    return part_of(problem, (q, k, v), first)


def _whole(problem: Problem, part: Part) -> Outs:
    """Return the attention [B, H, S, E] of this rank's heads over the whole sequence."""
    inputs, weights = problem.inputs, problem.weights
    if _is_empty(problem, *part.tensors):
        return nothing(problem, part)
    if weights.uses_spans:
        if torch.compiler.is_compiling():
            return _in_graph(problem, part, ALONE, even(0, inputs.queries.total), 1, 0)
        return _by_spans(problem, part, [Piece(0, inputs.queries.total, 0)], [Piece(0, inputs.total_keys, 0)])
    if weights.by_blocks:
        runs = _documents(inputs) if inputs.packed else [Piece(0, inputs.queries.total, 0)]
        return _by_blocks(problem, part, runs)
    if not inputs.packed:
        return (_kernel(problem, part.tensors, part.mask, weights.causal),)
    return (_by_runs(problem, part, _documents(inputs), [Piece(0, inputs.total_keys, 0)]),)


def _by_blocks(problem: Problem, part: Part, runs: Sequence[Piece]) -> Outs:
    """Attend with the runs of queries to all keys, which this rank holds; skip blocks without any."""
    inputs, causal = problem.inputs, problem.weights.causal
    blocks = blocks_of(runs, _documents(inputs), causal, inputs.packed, part.mask is None)
    return _attend_locally(problem, part, Round((tuple(blocks),)))


def _by_spans(problem: Problem, part: Part, runs: Sequence[Piece], keys: Sequence[Piece]) -> Outs:
    """Attend with the runs of queries to the keys, runs that this rank holds, as the spans say."""
    if problem.weights.dropout_p:
        return (_by_tiles(problem, part, runs, keys),)
    return _attend_locally(problem, part, Round((_blocks_maker(part)(runs, keys),)))


def _blocks_maker(part: Part) -> BlocksMaker:
    """Return what finds the blocks of runs of queries and keys by the part's spans."""
    spans, scores, (q, _, v) = part.scores.spans, part.scores, part.tensors
    assert spans is not None
    kernel, softcap = scores.kernel, scores.softcap > 0
    if part.mask is None and scores.bias is None:
        windowed = can_compute(kernel, q, v, Needs(softcap=softcap, window=True))
        if windowed and (strips := strips_of(spans)) is not None:
            return functools.partial(strip_blocks, strips)
        if suits(spans, kernel, q) and can_compute(kernel, q, v, Needs(softcap=softcap, spans=True)):
            return functools.partial(long_blocks, spans)
    # A bias is a tensor of all scores of a block.
    most = 2**31 if scores.bias is None else MOST_KEYS
    return functools.partial(tiles.blocks_by, spans, most_keys=most)


def _attend_locally(problem: Problem, part: Part, blocks: Round, *gathered: Tensor) -> Outs:
    """Attend by blocks to keys that this rank holds: those of the part, then the gathered ones."""
    waiting = ALONE if problem.inputs.keys is None else problem.call.group
    ring = Ring(ALONE, blocks, part.scores, waiting, 1)
    return attend_round(ring, *part.tensors, part.mask, part.sinks, *gathered)


def _by_tiles(problem: Problem, part: Part, runs: Sequence[Piece], keys: Sequence[Piece]) -> Tensor:
    """Attend with each tile of queries to the keys of its spans, in one call: blocks cannot drop weights."""
    spans, (q, k, v) = part.scores.spans, part.tensors
    assert spans is not None
    outs = []
    for query, begin, size, first, end in tiles.tile_of_keys(spans, runs):
        allowed, held = [], []
        for at, start, count in tiles.joined_runs(keys):
            low, high = max(first, start), min(end, start + count)
            if low < high:
                held.append((at + low - start, high - low))
                if not is_fake(q):
                    allowed.append(spans.dense(begin, size, low, high - low).to(q.device))
                else:
                    allowed.append(q.new_ones(*spans.shape[:2], size, high - low, dtype=torch.bool))
                if part.mask is not None:
                    allowed[-1] = joined(sliced(part.mask, begin, size, low, high - low), allowed[-1])
        of_tile = q.narrow(2, query, size), selected(k, held, 2), selected(v, held, 2)
        if held:
            outs.append(_kernel(problem, of_tile, torch.cat(allowed, 3), False).nan_to_num(0.0))
        else:
            outs.append(nothing(problem, part._replace(tensors=of_tile))[0])
    return torch.cat(outs, 2)


def _is_empty(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing is to be computed: no items, no keys, exchanges alone; q and k may have no width."""
    is_wanted = v.size(3) > 0 or problem.weights.returns_lse
    return not problem.computes or not is_wanted or 0 in (*q.shape[:3], k.size(2))


def _called(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call the caller's kernel with `[B, S, H, D]`, and check what it returns."""
    assert problem.weights.attend is not None
    out: Any = problem.weights.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    expected = [q.size(0), q.size(2), q.size(1), v.size(3)]
    if not isinstance(out, Tensor) or list(out.shape) != expected:
        value = f"of shape {list(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise problem.call.error("the result of attend", value, f"a tensor of shape {expected}")
    return out.transpose(1, 2)


def _kernel(problem: Problem, tensors: Tensors, mask: Tensor | None, causal: bool, first: int = 0) -> Tensor:
    """Attend with the caller's kernel, or torch's; first: the key in whose place the first query is."""
    weights, (q, k, v) = problem.weights, tensors
    if weights.attend is not None:
        return _called(problem, q, k, v)
    if causal and (mask is not None or first > 0):
        lower, causal = causal_mask(q.size(2), k.size(2), first, q.device), False
        mask = lower if mask is None else joined(mask, lower)
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(q.dtype)
    if mask is None and problem.varied and (flash := flash_instead_of_cudnn(q, v)):
        return flash.attend(q, k, v, weights.dropout_p, causal, problem.scale)
    # torch takes no symbolic bool.
    grouped = {"enable_gqa": True} if q.size(1) != k.size(1) else {}
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=weights.dropout_p,
        is_causal=causal,
        scale=problem.scale,
        **grouped,
    )


# ---- gather ----


def gathered(problem: Problem) -> Outs:
    """Gather K and V on every rank, and attend with this rank's queries."""
    inputs = problem.inputs
    q, k, v = (x.permute(inputs.by_heads) for x in (inputs.q, inputs.k, inputs.v))
    by_spans, compiles = problem.weights.uses_spans, torch.compiler.is_compiling()
    if by_spans and not compiles:
        return _as_given(problem, _by_halo(problem, part_of(problem, (q, k, v))))
    if inputs.listed and not compiles and problem.call.world > 1:
        return _as_given(problem, _by_documents(problem, part_of(problem, (q, k, v))))
    in_ring = by_spans or (inputs.listed and problem.weights.blockwise)
    if in_ring and problem.call.world > 1 and inputs.keys == inputs.queries:
        # The number of keys that a rank needs follows from values that a graph does not know.
        return round_the_ring(problem)
    if inputs.keys is not None:
        among, note = inputs.keys.group, problem.note
        given = [inputs.k, inputs.v]
        k, v = transpose_for("attention", False, given, among, inputs.seq, None, inputs.keys, note=note)
        k, v = k.permute(inputs.by_heads), v.permute(inputs.by_heads)
    return _as_given(problem, _by_queries(problem, part_of(problem, (q, k, v))))


def _as_given(problem: Problem, outs: Outs) -> Outs:
    """Return outputs in the caller's order of dims, of which a log-sum-exp has all but the last."""
    order = problem.inputs.as_given
    return tuple([x.permute(order[: x.dim()]) for x in outs])


def _by_halo(problem: Problem, part: Part) -> Outs:
    """Gather the keys that spans leave this rank's queries, and attend to them and to its own."""
    call, inputs, (q, k, v) = problem.call, problem.inputs, part.tensors
    runs = pieces(numbers_of(inputs.queries, 0), call.world, call.rank)
    if inputs.keys is None:
        held = [Piece(0, inputs.total_keys, 0)]
    else:
        assert part.scores.spans is not None
        halo = halo_of(part.scores.spans, inputs.queries, inputs.keys, call.world, call.rank)
        k, v = gather_pieces(call, halo.plan, (k, v), 2, problem.note)
        held = list(halo.held)
    if _is_empty(problem, q, k, v):
        return nothing(problem, part._replace(tensors=(q, k, v)))
    return _by_spans(problem, part._replace(tensors=(q, k, v)), runs, held)


def _by_documents(problem: Problem, part: Part) -> Outs:
    """Gather the keys of documents that this rank shares with others, and attend to them and to its own."""
    call, inputs, weights, (q, k, v) = problem.call, problem.inputs, problem.weights, part.tensors
    place = numbers_of(inputs.queries, 0), call.world, call.rank
    found = gathered_of(*place, weights.causal, part.mask is None, not weights.blockwise)
    note = f"{problem.note}, {found.note}" if problem.note else found.note
    gathered = gather_pieces(call, found.plan, (k, v), 2, note)
    whole = part._replace(tensors=(q, gathered[0], gathered[1]))
    if _is_empty(problem, q, k, v):
        return nothing(problem, whole)
    if weights.blockwise:
        return _attend_locally(problem, part, found.round, *gathered)
    return (_by_runs(problem, _of_kernel(problem, whole), pieces(*place), found.held),)


def _of_kernel(problem: Problem, part: Part) -> Part:
    """Return the part for a caller's kernel, which takes equal heads."""
    if problem.weights.attend is None:
        return part
    q, k, v = part.tensors
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    return part._replace(tensors=(q, k, v))


def _by_queries(problem: Problem, part: Part) -> Outs:
    """Return the attention [B, H, S, E] of this rank's queries to all keys."""
    call, inputs, weights = problem.call, problem.inputs, problem.weights
    q, k, v = part.tensors
    if _is_empty(problem, q, k, v):
        return nothing(problem, part)
    if weights.uses_spans:
        return _in_graph(problem, part, ALONE, numbers_of(inputs.queries, 0), call.world, call.rank)
    runs = pieces(numbers_of(inputs.queries, 0), call.world, call.rank)
    blockwise = weights.blockwise
    skips = weights.causal or inputs.packed or weights.mask is not None
    only_causal = weights.causal and not inputs.packed and weights.mask is None
    if blockwise and only_causal and call.world > 1 and inputs.keys == inputs.queries:
        # One block of this rank's own keys covers all queries: its output and gradients are not copied.
        blocks = Round((tuple(own_block(runs)), tuple(blocks_before(runs))))
        own_k, own_v = inputs.k.permute(inputs.by_heads), inputs.v.permute(inputs.by_heads)
        return _attend_locally(problem, part._replace(tensors=(q, own_k, own_v)), blocks, k, v)
    if blockwise and (skips or weights.by_blocks):
        return _by_blocks(problem, part, runs)
    runs = runs if skips else [Piece(0, q.size(2), 0)]
    return (_by_runs(problem, _of_kernel(problem, part), runs, [Piece(0, inputs.total_keys, 0)]),)


def _by_runs(problem: Problem, part: Part, runs: Sequence[Piece], held: Sequence[Piece]) -> Tensor:
    """Attend with each run of queries to the keys that it may attend to.

    held: the keys that this rank has, all that a document's run may attend to one behind the other.
    """
    inputs, causal, (q, k, v) = problem.inputs, problem.weights.causal, part.tensors
    documents, runs = _documents(inputs), [run for run in runs if run.size]
    places, counts, firsts = [], [], []
    for start, size, document in runs:
        first, keys, _ = documents[document if inputs.packed else 0]
        counts.append(min(first + keys, start + size) - first if causal else keys)
        places.append(within([(first, first + 1)], held)[0][0])
        firsts.append(first)
    queries = q.split([run.size for run in runs], 2)
    keys_at, values_at = _cut_at(k, places), _cut_at(v, places)
    outs = []
    for (start, size, _), own, place, keys, first in zip(runs, queries, places, counts, firsts, strict=True):
        mask = None if part.mask is None else sliced(part.mask, start, size, first, keys)
        of_run = own, keys_at[place].narrow(2, 0, keys), values_at[place].narrow(2, 0, keys)
        outs.append(_kernel(problem, of_run, mask, causal, start - first))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def _cut_at(x: Tensor, places: Sequence[int]) -> dict[int, Tensor]:
    """Cut `[B, H, S, E]` where documents begin: with one gradient, where each slice has one as long as x."""
    starts = sorted({0, *places})
    ends = [*starts[1:], x.size(2)]
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    return dict(zip(starts, x.split(sizes, 2), strict=True)) if len(starts) > 1 else {0: x}


# ---- ring ----


def round_the_ring(problem: Problem) -> Outs:
    """Let K and V go round while blocks are computed."""
    inputs, order = problem.inputs, problem.inputs.by_heads
    if inputs.keys is None:
        raise problem.call.error("method", '"ring" and k and v have no layout', '"gather"')
    if inputs.keys != inputs.queries:
        raise problem.call.error("method", '"ring" and q, k and v have two layouts', '"ulysses" or "gather"')
    tensors = inputs.q.permute(order), inputs.k.permute(order), inputs.v.permute(order)
    outs = _ring(problem, inputs.queries, problem.call.group, part_of(problem, tensors))
    # A small model's ring is as fast as its Python: most calls have one output, and enter no function for it.
    return (outs[0].permute(inputs.as_given),) if len(outs) == 1 else _as_given(problem, outs)


def _ring(problem: Problem, layout: SequenceLayout, place: Group | Place, part: Part) -> Outs:
    """Return the attention [B, H, S, E] of this rank's tokens in the layout to those of all ranks."""
    weights, compiles = problem.weights, torch.compiler.is_compiling()
    if weights.attend is not None:
        expected = 'a kernel\'s name with a ring; or pass method="ulysses" or "gather"'
        raise problem.call.error("attend", "a function", expected)
    if weights.dropout_p and not (weights.uses_spans and compiles):
        raise problem.call.error("dropout_p", "passed", 'none with a ring; pass method="ulysses" or "gather"')
    world, rank, numbers = place.world, place.rank, numbers_of(layout, 0)
    if compiles and (weights.uses_spans or problem.inputs.listed):
        return _in_graph(problem, part, place, numbers, world, rank)
    if part.scores.spans is not None:
        round_ = round_by(part.scores.spans, numbers, world, rank, _blocks_maker(part))
    else:
        # Symbolic ints have no hash.
        make = round_of if compiles else cached_round
        round_ = make(numbers, world, rank, weights.causal, layout.is_packed, part.mask is None)
    if not problem.computes:
        round_ = round_.without_blocks()
    ring = Ring(place, round_, part.scores, place, backward_exchanges(round_), problem.note)
    return attend_round(ring, *part.tensors, part.mask, part.sinks)


# ---- compiled ----


def _in_graph(
    problem: Problem, part: Part, place: Group | Place, queries: Layout, world: int, rank: int
) -> Outs:
    """Put one op into the graph for spans, whose values a graph does not know: see `graph_op`.

    place: as of a Ring. queries, world, rank: the layout of the queries, and this rank's place in it.
    """
    weights, inputs, scores = problem.weights, problem.inputs, part.scores
    if weights.bias is not None or weights.dropout_p:
        name, value = ("bias", "a function") if weights.bias is not None else ("dropout_p", weights.dropout_p)
        raise problem.call.error(name, f"{value} in compiled code, beside spans or a window", "none")
    left, right = weights.window or (None, None)
    documents = inputs.queries.lengths if inputs.packed else ()
    sides = (-1 if left is None else left, -1 if right is None else right)
    description = Description(
        (place.handle, place.world, place.rank),
        world,
        rank,
        queries,
        inputs.total_keys,
        (scores.first_head, inputs.heads),
        (int(weights.causal), *sides, *documents),
        scores.scale,
        scores.softcap,
        scores.kernel or "",
        problem.note,
        scores.returns_lse,
    )
    ends = None if weights.spans is None else weights.spans.ends
    return in_graph(description, *part.tensors, part.mask, part.sinks, ends)


# ---- hybrid ----


def hybrid(problem: Problem, inner: Any, outer: Any) -> Outs:
    """Exchange tokens for heads in the ulysses group, and let K and V go round the ring group."""
    inputs = problem.inputs
    head, seq = inputs.head, inputs.seq
    ring_place = ranks_of(outer, "attention")
    layout = SequenceLayout.zigzag(inputs.queries.total, outer)
    dims = head, seq, inner, layout.sizes[ring_place.rank]
    part = _scattered(problem, dims)
    # Without heads, all ranks of this ring group have none.
    outs = _ring(problem, layout, ring_place, part) if part.tensors[0].size(1) else nothing(problem, part)
    return _gathered_heads(problem, outs, dims, None)
