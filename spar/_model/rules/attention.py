# SPDX-License-Identifier: Apache-2.0
"""Attention over parts: exchanged by `spar.attention` where queries and keys are of sharded sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._attention.attention import attention
from ..._attention.spans import Spans
from ...random import rank_seed
from ..call import FunctionCall, Plan, moves_to, rule
from ..moving import moved
from ..part import Part, Parts, mark, part_of, whole_numel, whole_shape
from ..spans_mask import dense_of, spans_of
from .pointwise import aligned
from .products import shared

_EVEN_ENOUGH = (
    1.25  # the largest share of a rank, in equal shares, of an attention that is not exchanged by heads
)


class _Attention(NamedTuple):
    """The arguments of scaled_dot_product_attention; and those of `spar.attention` that it has not."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    softcap: float | None = None
    sinks: Tensor | None = None


@rule("scaled_dot_product_attention", uneven=True)
def scaled_dot_product_attention(call: FunctionCall) -> Plan | None:
    asked = _Attention(*call.args, **call.kwargs)
    q = asked.query
    part, dims = part_of(q), q.dim()
    if part is None:
        keys = part_of(asked.key)
        if keys is None or asked.key.dim() != dims:
            return None
        if keys.dim < dims - 2:
            return _of_samples(call, asked, keys)
        if keys.dim > dims - 2:
            return None
        part = call.parts.part(dims - 2, (q.size(-2),))  # shards few queries rather than gathers many keys
    if part.dim < dims - 2:
        return _of_samples(call, asked, part) or _of_exchanged(call, asked, part)
    is_own = part.dim == dims - 2 and part_of(asked.key) is part_of(asked.value) is part_of(q)
    if is_own and asked.attn_mask is None and sum(size > 0 for size in part.sizes) < 2:
        return _on_one_rank(call, asked, part)
    if call.has_uneven and not is_own:
        return None  # on even parts
    plan = _of_tokens(call, asked, part.plain) if part.dim == dims - 2 else None
    return plan if plan is None or part is part.plain else _moved_back(plan, part)


def _moved_back(plan: Plan, part: Part) -> Plan:
    """Let the result be the queries' part, as what it is added to is."""
    run, found = plan.run, plan.part
    assert isinstance(found, Part)

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        return moved(mark(run(*args, **kwargs), found), part)

    return plan._replace(part=part, run=attend)


def _of_exchanged(call: FunctionCall, asked: _Attention, part: Part) -> Plan | None:
    """Attend by tokens where queries alone are parts of heads, which are as many."""
    keys = part_of(asked.key)
    if keys is None or keys.dim != asked.query.dim() - 2 or whole_shape(asked.query)[-2] != keys.whole:
        return None
    plan = _of_tokens(call, asked, keys.plain)
    return plan and _moved_back(plan, part)


def _of_samples(call: FunctionCall, asked: _Attention, part: Part) -> Plan | None:
    """Attend without an exchange: each rank has other samples or heads."""
    operands = [x for x in asked[:4] if x is not None]
    if asked.enable_gqa and part.dim == asked.query.dim() - 3 and asked.key.size(-3) != asked.query.size(-3):
        return None
    moves = aligned(operands, asked.query.dim(), part)
    if moves is None or any(i and operands[i].dim() != asked.query.dim() for i, to in moves if to):
        return None
    wanted = [(operands[i], to) for i, to in moves]
    amount = 2 * whole_numel(asked.query) * whole_shape(asked.key)[-2]
    function = call.function

    def run(*args: Any, **kwargs: Any) -> Tensor:
        given = _Attention(*args, **kwargs)
        with drawing(part.parts, given.dropout_p):
            return _connected(function(*args, **kwargs), given)

    return Plan(part, moves_to(call, wanted), run=run, work=shared(amount, part))


def _on_one_rank(call: FunctionCall, asked: _Attention, part: Part) -> Plan:
    """Attend without an exchange to a piece of a sequence that lies on one rank: an image, or a window."""
    function = call.function

    def run(*args: Any, **kwargs: Any) -> Tensor:
        given = _Attention(*args, **kwargs)
        with drawing(part.parts, given.dropout_p):
            if given.query.numel():
                attended: Tensor = function(*args, **kwargs)
                return attended
            out = given.query.new_zeros((*given.query.shape[:-1], given.value.size(-1)))
            return _connected(out, given)

    return Plan(part, run=run, work=shared(2 * whole_numel(asked.query) * part.whole, part))


def _of_tokens(call: FunctionCall, asked: _Attention, part: Part) -> Plan | None:
    q, k, v, mask = asked[:4]
    (keys, values), dims = [part and part.plain for part in (part_of(k), part_of(v))], q.dim()
    length = whole_shape(k)[-2]
    if keys is not None and keys.dim != dims - 2:
        if length != part.whole:
            return None
        keys = values = part  # of heads, as a transpose of as many tokens makes them
    amount = shared(2 * whole_numel(q) * length, part)
    rows = whole_shape(mask)[-2] if mask is not None and mask.dim() > 1 else 1
    if rows not in (1, part.whole):
        return None
    wanted: list[tuple[Tensor, Part | None]] = [(q, part)]
    if mask is not None:
        wanted.append((mask, None))
    like = dims == k.dim() == v.dim() and q.size(0) == k.size(0) == v.size(0)
    heads = dims == 3 or (q.size(1) == k.size(1) or asked.enable_gqa)
    causal = asked.is_causal and keys is not part
    if keys is not None and values is keys and dims in (3, 4) and like and heads and not causal:
        run = exchanged(part, keys, call.function)
        return Plan(part, moves_to(call, [*wanted, (k, keys), (v, keys)]), run=run, work=amount)
    if q is k or q is v:
        return None
    wanted += [(k, None), (v, None)]
    return Plan(part, moves_to(call, wanted), run=_rows(part, length, call.function), work=amount)


def method_of(part: Part, keys: Part | None) -> str | None:
    """Return the method by which queries and keys are exchanged; None lets `spar.attention` choose."""
    if keys is None:
        return None
    # Gathering so few keys moves less than exchanging the queries.
    few = keys.tokens * (part.parts.world - 1) < part.tokens
    return part.parts.method or ("gather" if few else None)


def _method_of_spans(part: Part, keys: Part, spans: Spans, heads: tuple[int, int]) -> str | None:
    """Return the method for spans: gather where a rank needs few keys of others, and ranks do like work.

    heads: of the queries, and of the keys.
    """
    method = method_of(part, keys)
    if method is not None or keys is not part or len(part.lengths) > 1 or not part.parts.is_in_order:
        return method
    most_keys, excess = spans.remember(("reach", part.sizes), lambda: reach_of(spans, part.sizes))
    moved_by_heads = part.tokens / part.parts.world * (1 - 1 / part.parts.world) * (heads[0] / heads[1] + 1)
    return "gather" if most_keys < moved_by_heads and excess < _EVEN_ENOUGH else None


def reach_of(spans: Spans, sizes: Sequence[int]) -> tuple[int, float]:
    """Return how many keys of others a rank needs at most, and the largest share of pairs, in equal shares.

    sizes: of the ranks' runs, of queries and of keys.
    """
    first, end = spans.on_cpu.unflatten(3, (-1, 2)).unbind(-1)
    counts = (end - first).sum((0, 1, 3), dtype=torch.int64)
    lows = first.masked_fill(first >= end, spans.keys).amin((0, 1, 3))
    needed, pairs, begin = 0, [], 0
    for size in sizes:
        own = slice(begin, begin + size)
        begin += size
        pairs.append(int(counts[own].sum()))
        if pairs[-1]:
            before, behind = own.start - int(lows[own].min()), int(end[:, :, own].max()) - own.stop
            needed = max(needed, max(before, 0) + max(behind, 0))
    return needed, max(pairs) * len(pairs) / max(sum(pairs), 1)


def exchanged(part: Part, keys: Part, function: Any = None) -> Callable[..., Tensor]:
    """Return what attends over the sharded sequences of queries and keys.

    function: torch's, for masks that learn.
    """
    layouts = part.parts.layout(part.lengths), part.parts.layout(keys.lengths)
    method = method_of(part, keys)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        q, k, v, mask, dropout_p, causal, scale, grouped, softcap, sinks = _Attention(*args, **kwargs)
        if mask is not None and mask.requires_grad and torch.is_grad_enabled():
            rows, whole = _rows(part, keys.tokens, function), (part.parts.gather(k), part.parts.gather(v))
            return rows(q, *whole, mask, dropout_p, causal, scale, grouped)
        single = q.dim() == 3
        spans = None if single else spans_of(mask)
        chosen = method
        given = part.parts.mask
        if given is not None and spans is None and keys is part and _are_tokens_of(given, part):
            raise ValueError(
                f"a layer's attention on rank {part.parts.rank} of {part.parts.world} did not get the mask "
                "of the prefix tree, so branches would attend to each other; expected a model that passes it "
                'to all layers: attn_implementation="sdpa"'
            )
        if spans is not None:
            chosen = _method_of_spans(part, keys, spans, (q.size(1), k.size(1)))
        elif mask is not None:
            mask = _mask(dense_of(mask), q.size(0), part.tokens, keys.tokens, single)
        layout = layouts[0] if keys is part else layouts
        options: dict[str, Any] = {"causal": causal, "scale": scale, "method": chosen}
        options |= {"mask": mask if spans is None else spans, "softcap": softcap, "sinks": sinks}
        options |= {"seq_dim": 1, "head_dim": 2}
        # In memory it is [B, S, H, D], like that of torch's fused kernels: models flatten it without a copy.
        q, k, v = (x.unsqueeze(2) if single else x.transpose(1, 2) for x in (q, k, v))
        with drawing(part.parts, dropout_p):
            out: Tensor = attention(q, k, v, layout, dropout_p=dropout_p, **options)
        return out.squeeze(2) if single else out.transpose(1, 2)

    return run


def _are_tokens_of(given: Spans, part: Part) -> bool:
    """Whether a part is of the tokens of the tree whose mask the caller passed."""
    return part.is_sequence and part.lengths == (given.keys,)


def _mask(mask: Tensor, batch: int, queries: int, keys: int, single: bool) -> Tensor:
    """Return torch's mask as one of `spar.attention`: [B, S] where it has no rows, else [.., S, S]."""
    mask = mask[:, None] if single and mask.dim() == 3 else mask[(None,) * (4 - mask.dim())]
    if mask.size(1) == mask.size(2) == 1 and batch != queries:  # [S, S] could be one of rows for all samples
        return mask[:, 0, 0].expand(batch, keys)
    return mask.expand(*mask.shape[:2], queries, keys)


def _rows(part: Part, length: int, function: Any) -> Callable[..., Tensor]:
    """Attend from own queries to whole keys, without an exchange."""
    layout = part.parts.layout(part.lengths)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        q, k, v, mask, dropout_p, causal, scale, grouped, *_ = _Attention(*args, **kwargs)
        spans = spans_of(mask)
        if spans is not None and q.dim() == 4 and q.size(0) == k.size(0):
            with drawing(part.parts, dropout_p):
                options: dict[str, Any] = {"mask": spans, "dropout_p": dropout_p, "scale": scale}
                out: Tensor = attention(q, k, v, (layout, None), seq_dim=2, head_dim=1, **options)
                return out
        if causal:
            places = torch.arange(length, device=q.device)
            mask = part.parts.shard(torch.arange(part.tokens, device=q.device), part.at(0))[:, None] >= places
        elif mask is not None and mask.dim() > 1 and mask.size(-2) == part.tokens:
            mask = part.parts.shard(mask, part.at(mask.dim() - 2))
        options = {"enable_gqa": True} if grouped else {}
        with drawing(part.parts, dropout_p):
            out = function(q, k, v, mask, dropout_p, scale=scale, **options)
        return _connected(out, _Attention(q, k, v, mask))

    return run


def _connected(out: Tensor, asked: _Attention) -> Tensor:
    """Let an empty result, which torch does not derive from keys and mask, reach the exchanges behind them.

    Ranks with elements reach those in backward, and would wait for this one.
    """
    if not out.numel():
        for x in asked[:4]:
            if x is not None and x.requires_grad:
                out = out + x.sum().to(out.dtype) * 0
    return out


@contextlib.contextmanager
def drawing(parts: Parts, dropout_p: float) -> Iterator[None]:
    """Let the ranks draw other numbers for their tokens, and leave their generators alike."""
    if not dropout_p:
        yield
        return
    with rank_seed(int(torch.randint(2**31, (), device="cpu")), parts.group):
        yield
