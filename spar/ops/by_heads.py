# SPDX-License-Identifier: Apache-2.0
"""`by_heads`: run a function on whole sequences of this rank's heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .._exchange.arguments import Arguments, not_empty
from .._exchange.layouts import Layout
from ..sequence_layout import SequenceLayout, checked_numbers, numbers_of
from .heads import HeadExchange
from .tree_row import TreeRow, agree, check_tree
from .unused import depending_on

_NAME = "by_heads"


def by_heads(
    fn: Callable[..., Any],
    tensors: Sequence[Tensor],
    layout: SequenceLayout,
    *,
    parameters: Sequence[Tensor | None] = (),
    like: int | Sequence[int] = 0,
    cu_seqlens: bool = False,
    seq_dim: int = 1,
    head_dim: int = 2,
    tree: TreeRow | None = None,
    state: Sequence[int] = (),
) -> Any:
    """Exchange tokens for heads, run a function on the whole sequence of own heads, and exchange back.

    For functions that mix tokens, head by head: linear attention, state spaces, any attention. One exchange
    moves all tensors, of any dtypes, and one the results. Gradients are exact: those of parameters, also of
    `parameters`, are to be summed over the ranks.

    Args:
        fn: called as fn(*tensors, *parameters) with the whole sequence in natural order, `[B, S, H_r, ...]`
            for this rank's share H_r of the heads. In a packed layout it is called for each document by
            itself. It returns a tensor `[B, S, H_r, ...]`, or a tuple of such. Not called on a rank without
            heads.
        tensors: this rank's tokens, `[B, S_local, H_i, ...]`. H is the largest H_i, and each H_i divides H:
            head h goes with head h // (H / H_i). Where a rank's heads do not follow its H_i evenly, these are
            repeated, so that fn may rely on its tensors' own numbers of heads.
            With fewer heads than ranks one of them, or of `parameters`, must require a gradient where results
            of fn do: a rank without heads does not call it.
        layout: how the sequence lies on the ranks.
        parameters: tensors `[H, ...]`, the same on all ranks, of which fn receives the own heads; or None.
        like: for each result, the tensor whose shape behind the heads, and dtype, it has: on a rank without
            heads nothing else says it.
        cu_seqlens: whether fn keeps packed documents apart itself: it is then called once, with
            cu_seqlens=, int32 `[documents + 1]` on the tensors' device.
        seq_dim: the dim of S in the tensors and results.
        head_dim: the dim of H in them.
        tree: of a `PrefixTree`, whose layout is `layout`. fn is then called for each segment, as
            fn(*tensors, *parameters, state) with the state behind the token before it, and returns its output
            and the state behind it.
        state: with a tree, the shape of the state, `[B, H, ...]`. Roots have zeros, float32, or float64 if
            the first tensor is.

    Returns:
        What fn returns, `[B, S_local, H, ...]`, contiguous.

    Raises:
        ValueError, TypeError: a tensor does not fit the layout or the heads, or a result has another shape.
        MismatchError: calls differ between ranks. Every rank raises.
    """
    tensors = not_empty(_NAME, tensors, layout.group)
    agree(_NAME, tree)
    with Arguments(_NAME, tensors[0], layout.group, "tensors[0]", 3) as call:
        seq, head = _dims(call, tensors, layout, seq_dim, head_dim)
        heads = max([x.size(head) for x in tensors])
        for i, x in enumerate(tensors):
            if x.size(head) == 0 or heads % x.size(head):
                raise call.error(
                    f"tensors[{i}]", f"of {x.size(head)} heads", f"a number that divides {heads}"
                )
        if tree is not None:
            check_tree(call, tree, layout)
            if len(state) < 2 or state[1] != heads:
                raise call.error("state", list(state), f"a shape [B, {heads}, ...], with a tree")
        of_results = [like] if isinstance(like, int) else list(like)
        for index in of_results:
            if not 0 <= index < len(tensors) or tensors[index].size(head) != heads:
                raise call.error("like", like, f"the index of a tensor of {heads} heads, for each result")
        counts = tuple([x.size(head) for x in tensors])
        exchange = _exchange(call, counts, heads, head, numbers_of(layout, seq), len(of_results))
        own = exchange.scatter(tensors)
        first, count = exchange.own
        if count:
            narrowed = _narrowed(call, parameters, heads, first, count)
            if tree is None:
                results = _called(fn, own, narrowed, layout, cu_seqlens, seq)
            else:
                results = _along(fn, own, narrowed, tree, [state[0], count, *state[2:]], seq)
            shape = [*own[of_results[0]].shape[:3]]
            results = _checked(call, results, len(of_results), shape, isinstance(like, int))
        else:
            # Without heads, but with the gradients of all tensors, which the peers exchange.
            results = [
                depending_on(own[index].narrow(head, 0, 0), (*own, *parameters)) for index in of_results
            ]
        outputs = [x.contiguous() for x in exchange.gather(results)]
        return outputs[0] if isinstance(like, int) else tuple(outputs)


def _exchange(
    call: Arguments, counts: tuple[int, ...], heads: int, head: int, sequence: Layout, results: int
) -> HeadExchange:
    """Return the exchange of tokens for heads, which the group remembers."""

    def make() -> HeadExchange:
        return HeadExchange(_NAME, call.group, counts, heads, head, [sequence] * len(counts), results)

    return call.group.remember((_NAME, counts, head, sequence, results), make)


def _dims(
    call: Arguments, tensors: Sequence[Tensor], layout: SequenceLayout, seq_dim: int, head_dim: int
) -> tuple[int, int]:
    """Check the dims of S and H, and that each tensor has this rank's tokens."""
    seq, head = call.dim("seq_dim", seq_dim), call.dim("head_dim", head_dim)
    if seq == head or max(seq, head) > 2:
        raise call.error("seq_dim", f"{seq_dim} and head_dim is {head_dim}", "two of the first three dims")
    shape = None
    for i, x in enumerate(tensors):
        other = call.beside(x, f"tensors[{i}]")
        if x.dim() < 3:
            raise call.error(f"tensors[{i}]", f"of shape {list(x.shape)}", "[B, S_local, H, ...]")
        checked_numbers(other, "layout", layout, seq, False)
        batch = x.size(3 - seq - head)
        if shape is not None and (batch, x.device) != shape:
            raise call.error(f"tensors[{i}]", f"of batch {batch} on {x.device}", f"{shape[0]} on {shape[1]}")
        shape = batch, x.device
    return seq, head


def _narrowed(
    call: Arguments, parameters: Sequence[Tensor | None], heads: int, first: int, count: int
) -> list[Tensor | None]:
    for i, x in enumerate(parameters):
        if x is not None and (x.dim() == 0 or x.size(0) != heads):
            raise call.error(f"parameters[{i}]", f"of shape {list(x.shape)}", f"[{heads}, ...] or None")
    return [None if x is None else x.narrow(0, first, count) for x in parameters]


def _called(
    fn: Callable[..., Any],
    own: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
    layout: SequenceLayout,
    cu_seqlens: bool,
    seq: int,
) -> Any:
    """Call fn for the sequence, or for each packed document."""
    if cu_seqlens:
        return fn(*own, *parameters, cu_seqlens=layout.cu_seqlens().to(own[0].device))
    lengths = layout.lengths
    if len(lengths) == 1:
        return fn(*own, *parameters)
    results = [
        fn(*[x.narrow(seq, end - length, length) for x in own], *parameters)
        for end, length in zip(accumulate(lengths), lengths, strict=True)
        if length
    ]
    if not results or isinstance(results[0], Tensor):
        return torch.cat(results, seq)
    return tuple([torch.cat(parts, seq) for parts in zip(*results, strict=True)])


def _along(
    fn: Callable[..., Any],
    own: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
    tree: TreeRow,
    state: Sequence[int],
    seq: int,
) -> Tensor:
    """Call fn for each segment of a tree, with the state behind its parent."""
    dtype = torch.float64 if own[0].dtype == torch.float64 else torch.float32
    zeros = torch.zeros(state, dtype=dtype, device=own[0].device)
    results: list[Tensor] = []
    states: list[Tensor] = []
    for first, size, parent in tree.segments:
        part = [x.narrow(seq, first, size) for x in own]
        result, after = fn(*part, *parameters, states[parent] if parent >= 0 else zeros)
        results.append(result)
        states.append(after)
    return torch.cat(results, seq)


def _checked(call: Arguments, results: Any, count: int, shape: list[int], one: bool) -> list[Tensor]:
    """Check what fn returned: tensors that begin with the shape."""
    listed = [results] if one else list(results) if isinstance(results, (tuple, list)) else []
    if len(listed) != count:
        raise call.error("the result of fn", f"a {type(results).__name__}", f"{count} tensors")
    for x in listed:
        if not isinstance(x, Tensor) or list(x.shape[:3]) != shape:
            value = f"of shape {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise call.error("the result of fn", value, f"a tensor of shape {shape} and more")
    return listed
