# SPDX-License-Identifier: Apache-2.0
"""One attention with its arguments checked: errors name the argument, its value, and what to pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .._checks import digest
from .._exchange.arguments import Arguments
from .._exchange.layouts import extent, total_of
from .._group.registry import place_of
from ..sequence_layout import SequenceLayout, numbers_of
from .kernels import NAMES, reason_against
from .masks import checked_mask

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Inputs:
    """This rank's tensors, in the caller's order of dims, and how they lie on the ranks.

    Attributes:
        q: `[B, S_local, H, D]` by default.
        k, v: `[B, T_local, K, D]` and `[B, T_local, K, E]`; K divides H.
        queries, keys: the layouts of q, and of k and v; None: every rank holds the whole k and v.
        heads, key_heads: H and K.
        seq, head: the dims of S and H.
        by_heads, as_given: permute a tensor to `[B, H, S, D]`, and back.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    queries: SequenceLayout
    keys: SequenceLayout | None
    heads: int
    key_heads: int
    seq: int
    head: int
    by_heads: tuple[int, ...]
    as_given: tuple[int, ...]

    @property
    def packed(self) -> bool:
        return self.queries.kind == "packed"

    @property
    def total_keys(self) -> int:
        return self.k.size(self.seq) if self.keys is None else self.keys.total


@dataclass(frozen=True)
class Weights:
    """How scores `[B, H, S, T]` become weights.

    Attributes:
        causal: whether a query attends to no key behind it.
        mask: over the whole sequence; once checked `[B, H, S, T]`, of which dims of size 1 broadcast.
        dropout_p: the probability that a weight is dropped.
        attend: the caller's kernel, which applies all this itself.
        kernel: the name of one of spar's kernels; None chooses one.
    """

    causal: bool
    mask: Tensor | None
    dropout_p: float
    attend: Attend | None
    kernel: str | None


@dataclass(frozen=True)
class Problem:
    """One checked call. note: what ranks compare besides shapes and layouts."""

    call: Arguments
    inputs: Inputs
    weights: Weights
    scale: float
    note: str


# The layouts of q, and of k and v.
Layouts = tuple[SequenceLayout, SequenceLayout | None]
# seq_dim and head_dim.
Dims = tuple[int, int]


def checked(
    call: Arguments, k: Any, v: Any, layouts: Layouts, dims: Dims, weights: Weights, scale: float | None
) -> Problem:
    """Check an attention of which the call's input is q."""
    q, device = call.input, call.input.device.type
    if torch.is_autocast_enabled(device):
        q, k, v, mask = (_autocast(x, device) for x in (q, k, v, weights.mask))
        weights = replace(weights, mask=mask)
    inputs = _checked_inputs(call, (q, k, v), layouts, dims)
    _check_shapes(call, inputs)
    weights = _checked_weights(call, inputs, weights, scale)
    note = _note(weights, scale)
    # Scores of no width are 0.
    factor = max(inputs.q.size(3), 1) ** -0.5 if scale is None else float(scale)
    return Problem(call, inputs, weights, factor, note)


def _autocast(x: Any, device: str) -> Any:
    """Cast what torch's autocast casts of the arguments of scaled_dot_product_attention."""
    if not isinstance(x, Tensor) or x.device.type != device:
        return x
    casts = x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if casts else x


def _checked_inputs(call: Arguments, tensors: tuple[Any, Any, Any], layouts: Layouts, dims: Dims) -> Inputs:
    """Check what each tensor is, and which dims are the sequence and the heads."""
    q, k, v = tensors
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise call.type_error(name, f"a {type(x).__name__}", "a tensor")
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise call.type_error(name, f"of {x.dtype} on {x.device}", f"{q.dtype} on {q.device}, as q")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise call.error(name, f"of shape {list(x.shape)}", "four dims, [B, S, H, D] by default")
    if not q.dtype.is_floating_point:
        raise call.type_error("q", f"a tensor of {q.dtype}", "a floating dtype")
    seq, head = call.dim("seq_dim", dims[0]), call.dim("head_dim", dims[1])
    if seq == head or 3 in (seq, head):
        expected = "two different dims before the last"
        raise call.error("seq_dim", f"{dims[0]} and head_dim is {dims[1]}", expected)
    batch, as_given = 3 - seq - head, [3, 3, 3, 3]
    as_given[batch], as_given[head], as_given[seq] = 0, 1, 2
    orders = (batch, head, seq, 3), tuple(as_given)
    return Inputs(q, k, v, *layouts, q.size(head), k.size(head), seq, head, *orders)


def _check_shapes(call: Arguments, inputs: Inputs) -> None:
    """Check the shapes of q, k and v against each other, and against the layouts."""
    q, k, v, queries, keys, seq = inputs.q, inputs.k, inputs.v, inputs.queries, inputs.keys, inputs.seq
    _check_tokens(call, "q", q, inputs, queries)
    batch, shape = inputs.by_heads[0], list(k.shape)
    if list(v.shape[:3]) != shape[:3]:
        raise call.error("v", f"of shape {list(v.shape)}", f"{shape[:3]} and a width, as k of shape {shape}")
    if (k.size(batch), k.size(3)) != (q.size(batch), q.size(3)):
        raise call.error("k", f"of shape {shape}", f"the batch and width of q, of shape {list(q.shape)}")
    if inputs.key_heads == 0 or inputs.heads % inputs.key_heads:
        expected = f"a number that divides the {inputs.heads} heads of q"
        raise call.error("k", f"of {inputs.key_heads} heads", expected)
    if keys is not None:
        if keys.group is not queries.group:
            raise call.error("layout", f"{(queries, keys)}, of two groups", "layouts of one group")
        if keys != queries or k.size(seq) != q.size(seq):
            _check_tokens(call, "k", k, inputs, keys)
    if keys != queries and "packed" in (queries.kind, keys.kind if keys is not None else ""):
        raise call.error("layout", f"{(queries, keys)}", "one packed layout for q, k and v")


def _check_tokens(call: Arguments, name: str, x: Tensor, inputs: Inputs, layout: SequenceLayout) -> None:
    """Check that this rank's number of tokens is what the layout says."""
    place, numbers = place_of(layout.group), numbers_of(layout, 0)
    seq, head = inputs.seq, inputs.head
    expected, tokens = extent(numbers, place.world, place.rank), x.size(seq)
    if tokens != expected:
        hint = ". Is it the whole sequence?" if tokens == total_of(numbers) else ""
        if x.size(head) == expected:
            hint = f". Are the tokens in dim {head}, as in [B, H, S, D]? Pass seq_dim={head}, head_dim={seq}"
        shard = f"{expected}, rank {place.rank}'s shard in {layout}"
        raise call.error(name, f"of {tokens} tokens", f"{shard}{hint}")


def _checked_weights(call: Arguments, inputs: Inputs, weights: Weights, scale: float | None) -> Weights:
    """Check the mask, the dropout and the kernel."""
    mask, dropout_p, attend, kernel = weights.mask, weights.dropout_p, weights.attend, weights.kernel
    if attend is not None and not callable(attend):
        raise call.type_error("attend", f"{attend!r:.200}", "a function, a kernel's name or None")
    if weights.causal and attend is not None and inputs.total_keys != inputs.queries.total:
        expected = f"{inputs.queries.total} for attend with causal=True"
        raise call.error("the number of keys", inputs.total_keys, expected)
    if mask is not None:
        batch, total = inputs.q.size(inputs.by_heads[0]), inputs.queries.total
        mask = checked_mask(call, mask, (batch, inputs.heads, total, inputs.total_keys))
    if not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        raise call.error("dropout_p", f"{dropout_p!r:.200}", "at least 0 and below 1")
    if attend is not None:
        for name, value in (("mask", mask), ("scale", scale), ("dropout_p", dropout_p or None)):
            if value is not None:
                raise call.error(name, "passed, and attend too", "attend to apply it itself")
    if kernel is not None:
        if kernel not in NAMES:
            expected = f"a function, None or the name of a kernel: {', '.join(NAMES)}"
            raise call.error("attend", repr(kernel), expected)
        if why := reason_against(kernel, inputs.q, inputs.v, mask):
            expected = f"a kernel that can compute this; {kernel} cannot, as {why}"
            raise call.error("attend", repr(kernel), expected)
        if dropout_p:
            raise call.error("dropout_p", f"{dropout_p}", f"0 with the kernel {kernel}")
    return Weights(bool(weights.causal), mask, float(dropout_p), attend, kernel)


def _note(weights: Weights, scale: float | None) -> str:
    """Return what ranks compare besides shapes and layouts, which are the same in compiled code."""
    parts = ["causal True"] if weights.causal else []
    if weights.mask is not None:
        parts.append(f"mask of {weights.mask.dtype}")
        if not torch.compiler.is_compiling() and _C.env("check") == "1":
            parts.append(f"hash of the mask {digest(weights.mask):x}")
    if scale is not None:
        parts.append(f"scale {float(scale)}")
    if weights.dropout_p:
        parts.append(f"dropout_p {weights.dropout_p}")
    return ", ".join(parts)
