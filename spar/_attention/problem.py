# SPDX-License-Identifier: Apache-2.0
"""One attention with its arguments checked: errors name the argument, its value, and what to pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import _C
from .._checks import digest
from .._exchange.arguments import Arguments
from .._exchange.layouts import extent, total_of
from .._exchange.observers import is_fake
from .._group.registry import place_of
from ..sequence_layout import SequenceLayout, numbers_of
from ..sizes import as_int
from .kernels import NAMES, reason_against
from .kernels.kernel import Needs
from .masks import checked_mask
from .pairs import Function
from .spans import Spans, with_keywords
from .strips import strips_of

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
        return self.queries.is_packed

    @property
    def listed(self) -> bool:
        """Whether any runs of documents lie on a rank, which then needs keys of few other ranks."""
        return self.queries.kind in ("balanced", "documents")

    @property
    def total_keys(self) -> int:
        return self.k.size(self.seq) if self.keys is None else self.keys.total


@dataclass(frozen=True)
class Weights:
    """How scores `[B, H, S, T]` become weights.

    Attributes:
        causal: whether a query attends to no key behind it.
        mask: over the whole sequence; once checked `[B, H, S, T]`, of which dims of size 1 broadcast.
        spans: which keys each query attends to. Once checked: what causality, documents, a window and the
            caller's spans leave together, if there are spans, a window or a bias; else None.
        window: how many keys before and behind its place a query attends to; None on a side: all.
        sinks: `[H]`, the score of a key of value 0 that each query of a head attends to besides.
        softcap: what limits the scores; 0: nothing.
        bias: what is added to the scores.
        dropout_p: the probability that a weight is dropped.
        attend: the caller's kernel, which applies all this itself.
        kernel: the name of one of spar's kernels; None chooses one.
        returns_lse: whether the caller asks for the log-sum-exp.
    """

    causal: bool
    mask: Tensor | None
    spans: Spans | None
    window: tuple[int | None, int | None] | None
    sinks: Tensor | None
    softcap: float
    bias: Function | None
    dropout_p: float
    attend: Attend | None
    kernel: str | None
    returns_lse: bool

    @property
    def uses_spans(self) -> bool:
        """Whether spans say which blocks there are."""
        return self.spans is not None or self.window is not None or self.bias is not None

    @property
    def blockwise(self) -> bool:
        """Whether blocks can be computed apart and merged."""
        return self.attend is None and self.dropout_p == 0.0

    @property
    def by_blocks(self) -> bool:
        """Whether torch's scaled_dot_product_attention cannot compute it, or the caller named a kernel."""
        changes = self.sinks is not None or self.softcap > 0 or self.returns_lse
        return changes or self.uses_spans or self.kernel is not None


@dataclass(frozen=True)
class Problem:
    """One checked call.

    Attributes:
        note: what ranks compare besides shapes and layouts.
        varied: as in Needs.
        computes: False: make the exchanges, but compute nothing, as `spar plan` does to count them.
    """

    call: Arguments
    inputs: Inputs
    weights: Weights
    scale: float
    note: str
    varied: bool
    computes: bool = True


# The layouts of q, and of k and v.
Layouts = tuple[SequenceLayout, SequenceLayout | None]
# seq_dim and head_dim.
Dims = tuple[int, int]


def checked(
    call: Arguments, k: Any, v: Any, layouts: Layouts, dims: Dims, weights: Weights, scale: float | None
) -> Problem:
    """Check an attention of which the call's input is q."""
    q, device, given, spans = call.input, call.input.device.type, weights.mask, weights.spans
    if device != "meta" and torch.is_autocast_enabled(device):  # meta tensors have none
        q, k, v, mask = (_autocast(x, device) for x in (q, k, v, weights.mask))
        weights = replace(weights, mask=mask)
    inputs = _checked_inputs(call, (q, k, v), layouts, dims)
    _check_shapes(call, inputs)
    weights = _checked_weights(call, inputs, weights, scale)
    note = _note(weights, given, spans, scale)
    # Scores of no width are 0.
    factor = max(inputs.q.size(3), 1) ** -0.5 if scale is None else float(scale)
    varied = inputs.queries.is_packed or weights.spans is not None
    return Problem(call, inputs, weights, factor, note, varied)


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
    if keys != queries and (queries.is_packed or (keys is not None and keys.is_packed)):
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
    """Check what changes scores and weights, and what computes them; join all that is spans."""
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
    if weights.returns_lse and (attend is not None or dropout_p):
        other = "a function is passed as attend" if attend is not None else f"dropout_p is {dropout_p}"
        raise call.error("return_lse", f"True, and {other}", "a kernel's name or None, and no dropout")
    # Most calls have none of these.
    window = None if weights.window is None else _checked_window(call, inputs, weights.window)
    softcap = _checked_softcap(call, weights.softcap) if weights.softcap is not None else 0.0
    sinks = None if weights.sinks is None else _checked_sinks(call, inputs, weights.sinks)
    if weights.bias is not None and not callable(weights.bias):
        raise call.type_error("bias", f"{weights.bias!r:.200}", "a function of index tensors, or None")
    own = {"sinks": sinks, "softcap": softcap or None, "bias": weights.bias}
    if attend is not None:
        others = {"mask": mask, "mask ": weights.spans, "window": window, "scale": scale}
        for name, value in {**others, **own, "dropout_p": dropout_p or None}.items():
            if value is not None:
                raise call.error(name.strip(), "passed, and attend too", "attend to apply it itself")
    for name, value in own.items() if dropout_p else ():
        if value is not None:
            raise call.error("dropout_p", f"{dropout_p}, and {name} is passed", "0 with it")
    checked = replace(
        weights,
        causal=bool(weights.causal),
        mask=mask,
        window=window,
        sinks=sinks,
        softcap=softcap,
        dropout_p=float(dropout_p),
    )
    if checked.uses_spans:
        checked = replace(checked, spans=_joined_spans(call, inputs, checked))
    if kernel is not None:
        if kernel not in NAMES:
            expected = f"a function, None or the name of a kernel: {', '.join(NAMES)}"
            raise call.error("attend", repr(kernel), expected)
        if why := _reason_against(kernel, inputs, checked):
            expected = f"a kernel that can compute this; {kernel} cannot, as {why}"
            raise call.error("attend", repr(kernel), expected)
        if dropout_p:
            raise call.error("dropout_p", f"{dropout_p}", f"0 with the kernel {kernel}")
    return checked


def _reason_against(kernel: str, inputs: Inputs, weights: Weights) -> str:
    """Return why the named kernel cannot compute this; empty if it can."""
    dense, softcap = weights.mask is not None or weights.bias is not None, weights.softcap > 0
    why = reason_against(kernel, inputs.q, inputs.v, Needs(dense or weights.uses_spans, softcap))
    spans = None if dense or torch.compiler.is_compiling() else weights.spans
    if why and spans is not None and strips_of(spans) is not None:
        # A kernel that takes windows needs no masks.
        windowed = reason_against(kernel, inputs.q, inputs.v, Needs(softcap=softcap, window=True))
        return why if windowed else ""
    return why


def _checked_window(call: Arguments, inputs: Inputs, window: Any) -> tuple[int | None, int | None]:
    """Check how many keys on each side a query attends to."""
    expected = "(left, right): how many keys before and behind a query's place; None: all on that side"
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
        raise call.type_error("window", f"{window!r:.200}", expected)
    try:
        left, right = (None if side is None else as_int(side) for side in window)
    except TypeError:
        raise call.type_error("window", f"{window!r:.200}", expected) from None
    if min(left or 0, right or 0) < 0:
        raise call.error("window", f"{window!r:.200}", f"ints of at least 0 in {expected}")
    if inputs.total_keys != inputs.queries.total:
        value = f"{window!r}, of {inputs.queries.total} queries and {inputs.total_keys} keys"
        raise call.error("window", value, "as many keys as queries, or Spans as mask")
    return left, right


def _checked_softcap(call: Arguments, softcap: Any) -> float:
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise call.type_error("softcap", f"{softcap!r:.200}", "a positive number, or None")
    if not 0 < softcap < float("inf"):
        raise call.error("softcap", softcap, "a positive number, or None for scores without a cap")
    return float(softcap)


def _checked_sinks(call: Arguments, inputs: Inputs, sinks: Any) -> Tensor:
    expected = f"a floating tensor [{inputs.heads}] on {inputs.q.device}, a score for each head of q"
    if not isinstance(sinks, Tensor):
        raise call.type_error("sinks", f"a {type(sinks).__name__}", expected)
    if not sinks.dtype.is_floating_point or sinks.device != inputs.q.device:
        raise call.type_error("sinks", f"of {sinks.dtype} on {sinks.device}", expected)
    if list(sinks.shape) != [inputs.heads]:
        raise call.error("sinks", f"of shape {list(sinks.shape)}", expected)
    return sinks


def _joined_spans(call: Arguments, inputs: Inputs, weights: Weights) -> Spans | None:
    """Return which keys causality, documents, the window and the caller's spans leave together.

    In compiled code those of the caller alone: `graph_op` joins them when it runs.
    """
    given, queries, keys = weights.spans, inputs.queries.total, inputs.total_keys
    if given is not None:
        batch = inputs.q.size(inputs.by_heads[0])
        shape = given.shape
        fits = shape[2] == queries and shape[3] == keys
        if not fits or shape[0] not in (1, batch) or shape[1] not in (1, inputs.heads):
            expected = f"Spans of [{batch} or 1, {inputs.heads} or 1, {queries}, {keys}]"
            raise call.error("mask", f"Spans of {list(shape)}", expected)
    if torch.compiler.is_compiling():
        return given
    documents = inputs.queries.lengths if inputs.packed else ()
    return with_keywords(given, (queries, keys, weights.causal, weights.window, documents))


def _note(weights: Weights, mask: Tensor | None, spans: Spans | None, scale: float | None) -> str:
    """Return what ranks compare besides shapes and layouts, which are the same in compiled code.

    mask, spans: the caller's own, by which their hashes are remembered.
    """
    parts = ["causal True"] if weights.causal else []
    if mask is not None:
        parts.append(f"mask of {mask.dtype}")
        compares = not is_fake(mask) and ((mask.is_cpu and not mask.requires_grad) or _C.env("check") == "1")
        if compares and not torch.compiler.is_compiling():
            parts.append(f"hash of the mask {_digest_of(mask):x}")
    if weights.window is not None:
        parts.append(f"window {weights.window}")
    if spans is not None:
        parts.append("spans")
        if not torch.compiler.is_compiling():
            parts.append(f"hash of the spans {spans.digest:x}")
    if weights.sinks is not None:
        parts.append(f"sinks of {weights.sinks.dtype}")
        if not torch.compiler.is_compiling() and _C.env("check") == "1" and not is_fake(weights.sinks):
            parts.append(f"hash of the sinks {digest(weights.sinks):x}")
    if weights.softcap:
        parts.append(f"softcap {weights.softcap}")
    if weights.bias is not None:
        parts.append("a bias")
    if scale is not None:
        parts.append(f"scale {float(scale)}")
    if weights.dropout_p:
        parts.append(f"dropout_p {weights.dropout_p}")
    return ", ".join(parts)


# By mask: its version, and its hash. Layers share a mask, and a hash reads all of it.
_digests = WeakTensorKeyDictionary()


def _digest_of(mask: Tensor) -> int:
    if mask.is_inference():
        # It has no version that shows a change.
        return digest(mask)
    version, value = _digests.get(mask, (-1, 0))
    if version != mask._version:
        value = digest(mask)
        _digests[mask] = mask._version, value
    return int(value)
