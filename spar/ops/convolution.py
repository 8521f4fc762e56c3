# SPDX-License-Identifier: Apache-2.0
"""Run a causal convolution on a rank's tokens where they are, and correct the first results of each fragment.

A fragment is a run of one document on one rank. Only its first results, fewer than taps, need tokens of other
ranks. With a halo, all tokens would be copied to a longer tensor, and so would their gradients.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._exchange.arguments import Arguments
from .._exchange.gather_plan import ZEROS, Fragment, GatherPlan, Interval, fragments, plan_pieces, within
from .._exchange.gathering import gather_pieces
from .._exchange.layouts import Layout, shards
from .._exchange.observers import is_any_traced, is_transformed, must_record
from ..sequence_layout import SequenceLayout, checked_numbers
from .tree_branches import places_of
from .tree_fragments import fragments_of_tree, plan_ancestors
from .tree_row import TreeRow
from .unused import on_rows

_DIM = 2  # of tokens, in [B, C, S]


class Windows(NamedTuple):
    """The first tokens of each fragment behind the tokens before them.

    Twice: the tokens of its document, zeros before it begins, as is right; and those before it in the shard.
    The difference of both results corrects that of the shard.

    Attributes:
        plan: gathers the windows, one behind the other, from the shard's tokens at `places`.
        places: what windows and peers need of the shard.
        first: the places of results that are wrong in the shard.
        right, wrong: the places of the same results in that of the windows.
    """

    plan: GatherPlan
    places: Tensor
    first: Tensor
    right: Tensor
    wrong: Tensor


def _windows(
    layout: Layout, lengths: tuple[int, ...], before: int, world: int, rank: int, device: Any
) -> Windows:
    """Return the windows of a rank."""
    of_ranks = [fragments(layout, lengths, world, peer) for peer in range(world)]
    lows = list(itertools.accumulate(lengths, initial=0))
    # The exchange is that of a halo, which ranks in a graph make.
    wanted = [
        [part for x in listed for part in _window(x, x.start, lows[x.document], before)]
        for listed in of_ranks
    ]
    plan, own = plan_pieces(shards(layout, world), wanted, rank), of_ranks[rank]
    in_shard = [part for x in own for part in _window(x, x.begin, 0, before)]
    plan = plan._replace(order=(*plan.order, *in_shard))
    plan, places = _of_used(plan, sum([x.size for x in own]))
    first: list[int] = []
    right: list[int] = []
    at = 0
    for x in own:
        count = min(before, x.size)
        first += range(x.begin, x.begin + count)
        right += range(at + before, at + before + count)
        at += before + count
    wrong = [at + place for place in right]
    with torch.inference_mode(False):
        tensors = [torch.tensor(x, dtype=torch.int64, device=device) for x in (places, first, right, wrong)]
    return Windows(plan, *tensors)


def _window(x: Fragment, start: int, low: int, before: int) -> list[Interval]:
    """Return the window of a fragment that begins at `start`: zeros stand for tokens below `low`."""
    end = start + min(before, x.size)
    return [part for part in within(start - before, end - start + before, low, end) if part[1]]


def _of_used(plan: GatherPlan, shard: int) -> tuple[GatherPlan, list[int]]:
    """Return the same plan of the shard's tokens that it uses alone, and where these are in the shard."""
    used = [part for part in (*plan.sent, *plan.order) if part[0] != ZEROS and part[0] < shard]
    places = sorted({place for first, count in used for place in range(first, first + count)})
    moved = {ZEROS: ZEROS} | {place: i for i, place in enumerate(places)}

    def of_used(part: Interval) -> Interval:
        first, count = part
        return moved[first] if first < shard else first - shard + len(places), count

    return GatherPlan(tuple(map(of_used, plan.sent)), plan.sizes, tuple(map(of_used, plan.order))), places


_remembered = functools.lru_cache(256)(_windows)


def can_correct(x: Tensor) -> bool:
    """Whether `convolve` serves: not in graphs and transforms, which see no operation in place."""
    return not (is_any_traced((x,)) or is_transformed() or forward_ad._current_level >= 0)


def convolve(
    fn: Callable[[Tensor], Tensor], x: Tensor, layout: SequenceLayout, before: int, keeps_result: bool
) -> Tensor:
    """Apply a causal function of `before` tokens and one more to [B, C, S_local], each document by itself.

    Args:
        fn: called with this rank's tokens, and with the windows. Before the first token it assumes zeros.
        x: at least one token.
        keeps_result: whether fn's backward needs its result, which is then copied, not modified.
    """
    with Arguments("SequenceLayout.halo", x, layout.group) as call:
        numbers = checked_numbers(call, "layout", layout, _DIM, False)[1:]
        place = call.world, call.rank, x.device
        windows = _remembered((0, *numbers), layout.lengths, before, *place)
        # Storage of the gradient of fn's result: see _Tap.
        shared = SimpleNamespace(upper=0)
        own, tokens = _Tap.apply(x, windows.places, shared)  # type: ignore[no-untyped-call]
        gathered = gather_pieces(call, windows.plan, [tokens], _DIM, f"offset {-before}, {before} more")[0]
    corrections, y = fn(gathered), fn(own)
    if keeps_result or y._is_view() or _storage(y) == _storage(x):
        y = y.clone()
    result: Tensor = _Corrected.apply(y, corrections, windows, shared)  # type: ignore[no-untyped-call]
    return result


def convolve_tree(fn: Callable[[Tensor], Tensor], x: Tensor, tree: TreeRow, before: int) -> Tensor:
    """Apply a causal function of `before` tokens and one more to [B, C, S_local], along each path of a tree.

    Each of this rank's fragments stands behind its own ancestors, in a copy: one exchange.

    fn: assumes zeros before the first token.
    """
    with Arguments("SequenceLayout.halo", x, tree.layout.group) as call:
        checked_numbers(call, "layout", tree.layout, _DIM, False)
        plan = plan_ancestors(tree, before, call.world, call.rank)
        wide = gather_pieces(call, plan, [x], _DIM, f"tree, {before} before")[0]
    own, _ = fragments_of_tree(tree, call.world, call.rank)
    kept = places_of([(f.begin + (i + 1) * before, f.size) for i, f in enumerate(own)])
    return on_rows(fn, wide, _DIM).index_select(_DIM, kept.to(x.device))


class _Tap(torch.autograd.Function):
    """Return x, and its tokens at some places, whose gradients are added to that of x in place.

    As two operations, the second gradient would be a whole tensor of zeros. That of x is fn's, new and nobody
    else's, unless fn passed on the gradient of its result.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, shared: Any) -> tuple[Tensor, Tensor]:
        ctx.call = places, shared
        return x.view_as(x), x.index_select(_DIM, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_tokens: Tensor) -> Any:
        places, shared = ctx.call
        records = torch.is_grad_enabled() and must_record((grad, of_tokens))
        if records or _storage(grad) == shared.upper or 0 in grad.stride():
            grad = grad.index_add(_DIM, places, of_tokens)
        else:
            grad.index_add_(_DIM, places, of_tokens)
        return grad, None, None


class _Corrected(torch.autograd.Function):
    """Replace the first results of fragments in place.

    y + right - wrong has the same value, as y is wrong there, and a gradient that needs no copy of y's.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, corrections: Tensor, windows: Windows, shared: Any) -> Tensor:
        ctx.mark_dirty(y)
        ctx.call = windows, corrections.size(_DIM), shared
        return y.index_copy_(_DIM, windows.first, corrections.index_select(_DIM, windows.right))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        windows, size, shared = ctx.call
        shared.upper = _storage(grad)
        first = grad.index_select(_DIM, windows.first)
        corrections = grad.new_zeros(*grad.shape[:_DIM], size).index_copy(_DIM, windows.right, first)
        return grad, corrections.index_copy(_DIM, windows.wrong, -first), None, None


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
