# SPDX-License-Identifier: Apache-2.0
"""Attention over spans as one op of torch.compile's graphs.

Which blocks there are, and which keys travel, follow from the spans' values, which tracers do not know. So
the op has the spans as a tensor, and runs what eager code runs: blocks of keys that a rank holds, or a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._control.state import ALONE, Place
from .._exchange.autocast import no_autocast
from .._exchange.dispatch import chained, define, implement, number_of_newest
from .._exchange.graph_ops import code
from .._exchange.layouts import Piece, pieces, total_of
from .._exchange.observers import must_record
from .._group.group import Call, Group
from .._group.registry import group_at
from .kernels.kernel import accumulated
from .ring import Backward, Ring, Round, backward_exchanges, forward_exchanges, forward_of, round_of
from .scores import Scores
from .spans import Spans, with_keywords
from .tiles import blocks_by
from .travel import shifts_by_spans


class Description(NamedTuple):
    """All that the op must know besides its tensors, as the arguments of its schema.

    Attributes:
        place: of this rank, as ints: among those whose keys go round; `ALONE` if it holds all keys.
        world, rank: of the layout of the queries.
        queries: that layout; its dim is 0.
        keys: the number of keys of the sequence.
        heads: the number of the first head, and of all heads.
        keywords: of `closed`: causal, left and right, -1 for all, then the documents' lengths.
        scale, softcap, kernel, returns_lse: as in Scores; an empty kernel is None.
        note: what ranks compare.
    """

    place: Sequence[int]
    world: int
    rank: int
    queries: Sequence[int]
    keys: int
    heads: Sequence[int]
    keywords: Sequence[int]
    scale: float
    softcap: float
    kernel: str
    note: str
    returns_lse: bool


_NUMBERS = len(Description._fields)
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor? ends"
_DESCRIPTION = (
    "int[] place, int world, int rank, SymInt[] queries, SymInt keys, SymInt[] heads, SymInt[] keywords,"
    " float scale, float softcap, str kernel, str note, bool returns_lse"
)
# By the tensor of a caller's spans: the object that remembers their blocks.
_spans = WeakTensorKeyDictionary()


def _place(description: Description) -> Group | Place:
    handle, world, _ = description.place
    return group_at(handle) if world > 1 else ALONE


def _ring(description: Description, place: Group | Place, q: Tensor, ends: Tensor | None) -> Ring:
    """Return what eager code makes of the description."""
    given = _given(ends, description.keys)
    spans = _joined(description, given)
    first, heads = description.heads
    if q.size(1) < heads:
        spans = spans.of_heads(first, q.size(1))
    kernel = description.kernel or None
    softcap, returns_lse = description.softcap, description.returns_lse
    scores = Scores(description.scale, softcap, spans, None, first, kernel, True, returns_lse)
    if place.world == 1:
        runs = pieces(tuple(description.queries), description.world, description.rank)
        blocks = blocks_by(spans, runs, [Piece(0, description.keys, 0)])
        return Ring(ALONE, Round((blocks,)), scores, ALONE, 0)
    queries = tuple(description.queries)
    shifts = shifts_by_spans(spans, queries, place.world, place.rank)
    round_ = round_of(queries, shifts, partial(blocks_by, spans))
    # As eager code compares the caller's spans.
    note = description.note + (f", hash of the spans {given.digest:x}" if given is not None else "")
    return Ring(place, round_, scores, place, backward_exchanges(round_), note)


def _given(ends: Tensor | None, keys: int) -> Spans | None:
    """Return the caller's spans."""
    if ends is None:
        return None
    spans = _spans.get(ends)
    if spans is None:
        spans = _spans[ends] = Spans(ends, keys)
    return cast(Spans, spans)


def _joined(description: Description, given: Spans | None) -> Spans:
    causal, left, right, *documents = description.keywords
    window = (None if left < 0 else left, None if right < 0 else right) if left >= 0 or right >= 0 else None
    queries, keys = total_of(tuple(description.queries)), description.keys
    return with_keywords(given, (queries, keys, bool(causal), window, tuple(documents)))


def _number(ring: Ring) -> Tensor:
    return torch.tensor(ring.place.count() if isinstance(ring.place, Group) else 0, device="cpu")


def _by_token(x: Tensor) -> Tensor:
    """Return [B, H, S, E] in the memory of [B, S, H, E], which callers have."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Any, ends: Any, *arguments: Any
) -> list[Tensor]:
    described, (records, *_chain) = arguments[:_NUMBERS], arguments[_NUMBERS:]
    description = Description(*described)
    place, device = _place(description), q.device.type
    # What fails before the first exchange, too, is reported to the peers, which wait for it.
    with Call(place, "attention", forward_exchanges(place.world) + 1, device), no_autocast(device):
        ring = _ring(description, place, q, ends)
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = forward_of(ring, q, k, v, mask, sinks, [], records)
    return [_by_token(out), lse.contiguous(), _number(ring)]


def _attend_backward(grad: Tensor, grad_lse: Tensor | None, *arguments: Any) -> list[Tensor]:
    (q, k, v, mask, sinks, ends, out, lse), described = arguments[:8], arguments[8 : 8 + _NUMBERS]
    # torch leaves out trailing arguments that are None.
    _after, forward = (*arguments[8 + _NUMBERS :], None, None)[:2]
    description = Description(*described)
    place, device = _place(description), q.device.type
    call, most = 0 if forward is None else int(forward), max(place.world - 1, 2)
    with Call(place, "backward of attention", most, device), no_autocast(device):
        ring = _ring(description, place, q, ends)
        q, k, v = (x.contiguous() for x in (q, k, v))
        gradients = Backward(ring, call, grad, (q, k, v, out, lse, mask, sinks), grad_lse).run()
    return [*(x.contiguous() for x in gradients), _number(ring)]


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[Tensor]:
    batch, heads, queries, _width = q.shape
    out = q.new_empty(batch, queries, heads, v.size(3)).transpose(1, 2)
    lse = q.new_empty(batch, heads, queries, dtype=accumulated(q.dtype))
    return [out, lse, torch.empty((), dtype=torch.int64, device="cpu")]


def _fake_backward(
    grad: Tensor, grad_lse: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Any, *_: Any
) -> list[Tensor]:
    tensors = (q, k, v) if sinks is None else (q, k, v, sinks)
    number = torch.empty((), dtype=torch.int64, device="cpu")
    return [*(x.new_empty(x.shape) for x in tensors), number]


implement("attend", f"({_TENSORS}, {_DESCRIPTION}, bool records{{}}) -> Tensor[]", _attend, _fake)
implement(
    "attend_backward",
    f"(Tensor grad, Tensor? grad_lse, {_TENSORS}, Tensor out, Tensor lse, {_DESCRIPTION}{{}}) -> Tensor[]",
    _attend_backward,
    _fake_backward,
)


class SparSpans(torch.autograd.Function):
    """`SparAttention` as ops of a graph."""

    @staticmethod
    def forward(
        ctx: Any,
        description: Description,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        ends: Tensor | None,
    ) -> Any:
        tensors = q, k, v, mask, sinks, ends
        out, lse = chained(torch.ops.spar.attend, *tensors, *description, True)
        ctx.description, ctx.number = description, number_of_newest()
        ctx.save_for_backward(*tensors, out, lse)
        return (out, lse) if description.returns_lse else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None = None) -> Any:
        number = ctx.number if isinstance(ctx.number, Tensor) else None
        dq, dk, dv, *of_sinks = chained(
            torch.ops.spar.attend_backward,
            grad,
            grad_lse,
            *ctx.saved_tensors,
            *ctx.description,
            forward=number,
        )
        return None, dq, dk, dv, None, of_sinks[0] if of_sinks else None, None


def _run(q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Any, ends: Any, *arguments: Any) -> list[Tensor]:
    *described, _code = arguments
    description = Description(*described)
    if must_record([x for x in (q, k, v, sinks) if x is not None]):
        outs = SparSpans.apply(description, q, k, v, mask, sinks, ends)  # type: ignore[no-untyped-call]
        return list(outs) if description.returns_lse else [outs]
    outs = chained(torch.ops.spar.attend, q, k, v, mask, sinks, ends, *description, False)
    return list(outs[: 1 + description.returns_lse])


define(f"attention({_TENSORS}, {_DESCRIPTION}, str code) -> Tensor[]", _run)


def in_graph(
    description: Description,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    ends: Tensor | None,
) -> tuple[Tensor, ...]:
    """Put one op into Dynamo's graph: the attention [B, H, S, E] that is described; see `attend_round`."""
    return tuple(torch.ops.spar.attention(q, k, v, mask, sinks, ends, *description, code()))
