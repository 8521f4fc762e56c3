"""The ways in which ranks share an attention. Inputs and outputs have the caller's order of dims."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.nn.functional import scaled_dot_product_attention

from .._C import MOST_TENSORS
from .._control.state import ALONE, Place
from .._exchange.arguments import Arguments, ranks_of
from .._exchange.layouts import Layout, Piece, by_sizes, pair, pieces, rotated
from .._group.group import Group, place_of
from ..ops.all_to_all import How, all_to_all_for
from ..ops.gather import transpose_for
from ..sequence_layout import SequenceLayout, numbers_of
from .blocks import Block, blocks_before, blocks_of, keys_before, own_block
from .heads import Heads, heads_of_ranks, is_uniform, key_of_each, layers_of
from .masks import causal_mask, joined, sliced
from .ring import Ring, Shift, attend_round, exchanges_of

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Problem(NamedTuple):
    """One checked call. `order`: the batch, head and sequence dims; a kernel is the caller's or named."""

    call: Arguments
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    queries: SequenceLayout
    keys: SequenceLayout | None  # None: every rank has the whole
    causal: bool
    mask: torch.Tensor | None  # [B, H, S, S], dims of size 1 broadcast
    scale: float
    dropout_p: float
    attend: Attend | None
    kernel: str | None  # by name
    order: tuple[int, int, int]
    note: str  # what must be equal on all ranks besides the exchanges: see Operation

    @property
    def heads(self) -> int:
        return self.q.size(self.order[1])

    @property
    def packed(self) -> bool:
        return self.queries.kind == "packed"


def _by_heads(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    """View a tensor as [B, H, S, D]."""
    return x.permute(*problem.order, 3)


def _as_given(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    """View [B, H, S, D] in the caller's order."""
    return x.permute(*[problem.order.index(dim) for dim in range(3)], 3)


def _documents(problem: Problem) -> list[Piece]:
    """Return the runs of keys that may attend to each other: the documents, or the whole."""
    if not problem.packed:
        total = problem.k.size(problem.order[2]) if problem.keys is None else problem.keys.total
        return [Piece(0, total, 0)]
    found, begin = [], 0
    for i, length in enumerate(problem.queries.numbers[2:]):
        found.append(Piece(begin, length, i))
        begin += length
    return found


# ---- ulysses ----


def ulysses(problem: Problem) -> torch.Tensor:
    """Exchange tokens for heads, attend over the whole sequence, and exchange back."""
    if problem.keys is None:
        raise problem.call.error("method", '"ulysses" and k and v have no layout', '"gather"')
    _, head, seq = problem.order
    group = problem.queries.group
    plan = heads_of_ranks(problem.heads, problem.k.size(head), problem.call.world)
    q, k, v = _scattered(problem, plan, group, None)
    out = _whole(problem, q, k, v, plan, problem.call.rank)
    how = How(None, plan.queries, None, problem.queries)
    return cast(torch.Tensor, all_to_all_for("attention", out, group, (seq, head, None), how))


def _scattered(
    problem: Problem, plan: Heads, group: Any, held: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exchange tokens of q, k and v for this rank's heads: of the whole sequence, or of the `held` tokens."""
    _, head, seq = problem.order
    layers = layers_of(plan, (MOST_TENSORS - 1) // 2)
    keys = [layer.of(x, head) for x in (problem.k, problem.v) for layer in layers]
    layouts = [problem.queries, *[problem.keys] * len(keys)]
    sizes = [plan.queries, *[layer.sizes for layer in layers] * 2]
    how = How(sizes, None, layouts if held is None else None, None)
    found = all_to_all_for("attention", [problem.q, *keys], group, (head, seq, held), how, problem.note)
    rank, count = place_of(group).rank, len(layers)
    own = next((i for i, layer in enumerate(layers) if layer.sizes[rank]), 0)
    return found[0], found[1 + own], found[1 + count + own]


def _whole(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Heads, rank: int
) -> torch.Tensor:
    """Attend over the whole sequence with this rank's heads."""
    own, begin = plan.queries[rank], sum(plan.queries[:rank])
    seq = problem.order[2]
    if _is_empty(q, k, v, seq):
        return _nothing(problem, q, k, v)
    q, k, v = (_by_heads(problem, x) for x in (q, k, v))
    group = problem.heads // problem.k.size(problem.order[1])
    k, v = _matched(k, v, key_of_each(plan, group, rank), problem.attend is not None)
    mask = problem.mask
    if mask is not None and mask.size(1) > 1:
        mask = mask.narrow(1, begin, own)
    if problem.kernel is not None:
        return _as_given(problem, _by_blocks(problem, q, k, v, mask, _queries(problem)))
    if not problem.packed:
        return _as_given(problem, _kernel(problem, q, k, v, mask, problem.causal))
    outs = []
    for start, size, _ in _documents(problem):
        if size > 0:
            parts = [x.narrow(2, start, size) for x in (q, k, v)]
            part = None if mask is None else sliced(mask, start, size, start, size)
            outs.append(_kernel(problem, parts[0], parts[1], parts[2], part, problem.causal))
    return _as_given(problem, outs[0] if len(outs) == 1 else torch.cat(outs, 2))


def _queries(problem: Problem) -> list[Piece]:
    """Return the runs of the whole sequence's queries."""
    return _documents(problem) if problem.packed else [Piece(0, problem.queries.total, 0)]


def _by_blocks(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    own: Sequence[Piece],
) -> torch.Tensor:
    """Attend with the runs of queries `own` to all keys, which this rank holds; skip blocks without any."""
    blocks = blocks_of(own, _documents(problem), problem.causal, problem.packed, mask is None)
    told = ALONE if problem.keys is None else problem.call.group
    ring = Ring(ALONE, (tuple(blocks),), (), problem.scale, problem.kernel, told, 1)
    return attend_round(ring, q, k, v, mask)


def _is_empty(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq: int) -> bool:
    """Whether the output has no items, or there are no keys; q and k may have no width."""
    return 0 in (*q.shape[:3], v.size(3), k.size(seq))


def _nothing(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return zeros that depend on q, k, v and the mask.

    So this rank records a gradient, and makes the exchanges of it, as its peers do. The product saves a
    tensor: a checkpoint, which recomputes until the last one that was saved, makes the exchanges again.
    """
    zeros = q.new_zeros(*q.shape[:-1], v.size(3))
    for x in (q, k, v, problem.mask):
        if x is not None and x.is_floating_point():
            none = x.narrow(-1, 0, 0)
            zeros = zeros + (none * none).sum(dtype=q.dtype)  # autocast would sum in float32
    return zeros


def _matched(
    k: torch.Tensor, v: torch.Tensor, owners: Sequence[int], equal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat key heads [B, K, S, D] where query heads do not follow them evenly, or must be `equal`."""
    if list(owners) == list(range(k.size(1))) or (not equal and is_uniform(list(owners))):
        return k, v
    index = torch.tensor(owners, dtype=torch.int64, device=k.device)
    return k.index_select(1, index), v.index_select(1, index)


def _own_kernel(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Call the caller's kernel, which has [B, S, H, D], and check what it returns."""
    assert problem.attend is not None
    out: Any = problem.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    expected = [q.size(0), q.size(2), q.size(1), v.size(3)]
    if not isinstance(out, torch.Tensor) or list(out.shape) != expected:
        found = f"of shape {list(out.shape)}" if isinstance(out, torch.Tensor) else f"a {type(out).__name__}"
        raise problem.call.error("the result of attend", found, f"a tensor of shape {expected}")
    return out.transpose(1, 2)


def _kernel(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """Attend with the caller's kernel, or torch's."""
    if problem.attend is not None:
        return _own_kernel(problem, q, k, v)
    if mask is not None:
        if causal:
            mask, causal = joined(mask, causal_mask(q.size(2), k.size(2), 0, q.device)), False
        mask = mask if mask.dtype is torch.bool else mask.to(q.dtype)
    grouped = {"enable_gqa": True} if q.size(1) != k.size(1) else {}  # torch takes no symbolic bool
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


# ---- gather ----


def gathered(problem: Problem) -> torch.Tensor:
    """Gather K and V on every rank, and attend with this rank's queries."""
    call, seq = problem.call, problem.order[2]
    k, v = problem.k, problem.v
    if problem.keys is not None:
        among, note = problem.keys.group, problem.note
        k, v = transpose_for("attention", False, [k, v], among, seq, None, problem.keys, note=note)
    if _is_empty(problem.q, k, v, seq):
        return _nothing(problem, problem.q, k, v)
    q, k, v = (_by_heads(problem, x) for x in (problem.q, k, v))
    own = pieces(numbers_of(problem.queries, 0), call.world, call.rank)
    if _shares_runs(problem):
        # one block of this rank's own keys covers all queries: its output and gradients are not copied
        own_k, own_v = (_by_heads(problem, x) for x in (problem.k, problem.v))
        steps = tuple(own_block(own)), tuple(blocks_before(own))
        ring = Ring(ALONE, steps, (), problem.scale, problem.kernel, call.group, 1)
        return _as_given(problem, attend_round(ring, q, own_k, own_v, None, k, v))
    skips = problem.causal or problem.packed or problem.mask is not None
    if problem.kernel is not None or (skips and problem.attend is None and problem.dropout_p == 0.0):
        return _as_given(problem, _by_blocks(problem, q, k, v, problem.mask, own))
    group = problem.heads // k.size(1)
    if problem.attend is not None:
        k, v = _matched(k, v, [head // group for head in range(problem.heads)], True)
    return _as_given(problem, _by_runs(problem, q, k, v, own))


def _shares_runs(problem: Problem) -> bool:
    """Whether this rank's queries attend to its own keys by `causal` alone, in the kernel of blocks."""
    own = problem.attend is not None or problem.dropout_p > 0.0
    only_causal = problem.causal and problem.mask is None and not problem.packed
    return only_causal and not own and problem.call.world > 1 and problem.keys == problem.queries


def _by_runs(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: Sequence[Piece]
) -> torch.Tensor:
    """Attend with each run of queries to the keys that it may attend to."""
    documents = _documents(problem)
    if not problem.causal and not problem.packed and problem.mask is None:
        own = [Piece(0, q.size(2), 0)]
    outs, at = [], 0
    for run in own:
        document = documents[run.sequence if problem.packed else 0]
        end = document.start + document.size
        if problem.causal:
            end = min(end, run.start + run.size)
        keys = document.start, end - document.start
        part, at = q.narrow(2, at, run.size), at + run.size
        if run.size == 0:
            continue
        of = k.narrow(2, *keys), v.narrow(2, *keys)
        mask = None if problem.mask is None else sliced(problem.mask, run.start, run.size, *keys)
        if problem.causal and problem.attend is None:
            lower = causal_mask(run.size, keys[1], run.start - keys[0], q.device)
            mask = lower if mask is None else joined(mask, lower)
        outs.append(_kernel(problem, part, *of, mask, False))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


# ---- ring ----


def round_the_ring(problem: Problem) -> torch.Tensor:
    """Let K and V go round while blocks are computed."""
    if problem.keys != problem.queries:
        raise problem.call.error("method", '"ring" and q, k and v have two layouts', '"ulysses" or "gather"')
    return _ring(problem, problem.queries, problem.call.group, problem.q, problem.k, problem.v, problem.mask)


def _ring(
    problem: Problem,
    layout: SequenceLayout,
    place: Group | Place,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    if problem.attend is not None:
        expected = 'a kernel\'s name with a ring; or pass method="ulysses" or "gather"'
        raise problem.call.error("attend", "a function", expected)
    if problem.dropout_p:
        raise problem.call.error("dropout_p", "passed", 'none with a ring; pass method="ulysses" or "gather"')
    world, rank = place.world, place.rank
    make = _round if torch.compiler.is_compiling() else _known_round  # symbolic ints have no hash
    round_ = make(numbers_of(layout, 0), world, rank, problem.causal, problem.packed, mask is None)
    known = numbers_of(layout, 0), problem.note
    ring = Ring(place, *round_, problem.scale, problem.kernel, place, exchanges_of(world)[1], *known)
    q, k, v = (_by_heads(problem, x) for x in (q, k, v))
    return _as_given(problem, attend_round(ring, q, k, v, mask))


def _round(
    numbers: Layout, world: int, rank: int, causal: bool, packed: bool, plain: bool
) -> tuple[tuple[tuple[Block, ...], ...], tuple[Shift, ...]]:
    """Return the blocks of each step, and how the shard of each but the first comes from its owner.

    plain: whether there is no mask.
    """
    held = [pieces(numbers, world, peer) for peer in range(world)]
    steps = [
        tuple(blocks_of(held[rank], held[(rank - step) % world], causal, packed, plain))
        for step in range(world)
    ]
    if causal and plain and not packed:
        steps[0] = tuple(own_block(held[rank]))
    shifts = []
    for step in range(1, world):
        needed = [
            keys_before(held[peer], held[(peer + step) % world] if causal and not packed else None)
            for peer in range(world)
        ]
        found = [needed[(peer - step) % world] for peer in range(world)]
        shard = pair(by_sizes(2, needed), rotated(2, needed, step))
        gradient = pair(by_sizes(2, found), rotated(2, found, world - step))
        shifts.append(Shift(needed[rank], shard, gradient))
    return tuple(steps), tuple(shifts)


_known_round = functools.lru_cache(256)(_round)


# ---- hybrid ----


def hybrid(problem: Problem, inner: Any, outer: Any) -> torch.Tensor:
    """Exchange tokens for heads in the ulysses group, and let K and V go round the ring group."""
    _, head, seq = problem.order
    ring_place, place = ranks_of(outer, "attention"), place_of(inner)
    layout = SequenceLayout.zigzag(problem.queries.total, outer)
    held = layout.sizes[ring_place.rank]
    plan = heads_of_ranks(problem.heads, problem.k.size(head), place.world)
    q, k, v = _scattered(problem, plan, inner, held)
    own, begin = plan.queries[place.rank], sum(plan.queries[: place.rank])
    mask = problem.mask
    if mask is not None and mask.size(1) > 1:
        mask = mask.narrow(1, begin, own)
    if own:
        group = problem.heads // problem.k.size(head)
        k, v = (_by_heads(problem, x) for x in (k, v))
        k, v = _matched(k, v, key_of_each(plan, group, place.rank), False)
        out = _ring(problem, layout, ring_place, q, _as_given(problem, k), _as_given(problem, v), mask)
    else:  # all ranks of this ring group have no heads
        out = _nothing(problem, q, k, v)
    how = How(None, plan.queries, None, None)
    return cast(torch.Tensor, all_to_all_for("attention", out, inner, (seq, head, None), how))
