# SPDX-License-Identifier: Apache-2.0
"""One attention with its arguments checked: errors name the argument, its value, and what to pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._control.state import Place
from .._exchange.arguments import Arguments
from .._exchange.layouts import Layout, extent, total_of
from .._exchange.observers import is_fake
from .._group.group import Group
from .._group.registry import place_of
from ..sequence_layout import SequenceLayout, numbers_of
from ..sizes import as_int
from .kernels import NAMES, blocks_of_spans, reason_against, takes_parts
from .kernels.kernel import Needs
from .masks import shape_of_mask
from .request import Request, Window, note_of
from .scores import Scores
from .spans import Keywords, Spans, with_keywords


class Shapes(NamedTuple):
    """What the shapes of q, k and v say.

    Attributes:
        batch, heads, key_heads, width, value_width: B, H, K, D and E.
        tokens, key_tokens: how many of q, and of k and v, this rank holds.
        seq, head: the dims of S and H.
        by_heads, as_given: permute a tensor to `[B, H, S, D]`, and back.
    """

    batch: int
    heads: int
    key_heads: int
    width: int
    value_width: int
    tokens: int
    key_tokens: int
    seq: int
    head: int
    by_heads: tuple[int, ...]
    as_given: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """One checked attention, without its tensors and process groups: what remembers it keeps none of them.

    Attributes:
        where: the operation and the rank, for messages.
        dtype: of q, k and v.
        queries, keys: the layouts along dim 0, as in Request.
        total, total_keys: the numbers of queries and keys of the whole sequence.
        packed, lengths: whether there are documents, and how long they are.
        listed: whether any runs of documents lie on a rank, which then needs keys of few other ranks.
        mask: the shape of the mask as in Request; None: there is none.
        softcap: what limits the scores; 0: nothing.
        note: what ranks compare besides shapes and layouts.
        uses_spans: whether spans say which blocks there are.
        blockwise: whether blocks can be computed apart and merged.
        by_blocks: whether torch's scaled_dot_product_attention cannot compute it, or a kernel was named.
        varied: as in Needs.
        joins: whether the documents of a rank are parts of one block.
        grid: the rows and columns of ranks; None: the method has none.
        float8: whether rows travel as float8, in forward and in backward.
    """

    group: Group | Place
    where: str
    dtype: torch.dtype
    shapes: Shapes
    queries: Layout
    keys: Layout | None
    total: int
    total_keys: int
    packed: bool
    lengths: tuple[int, ...]
    listed: bool
    mask: tuple[int, ...] | None
    causal: bool
    window: Window | None
    softcap: float
    scale: float
    dropout_p: float
    kernel: str | None
    returns_lse: bool
    computes: bool
    note: str
    uses_spans: bool
    blockwise: bool
    by_blocks: bool
    varied: bool
    joins: bool
    grid: tuple[int, int] | None = None
    float8: tuple[bool, bool] = (False, False)

    @property
    def keywords(self) -> Keywords:
        """The arguments of `closed` for what causality, the window and documents leave."""
        return self.total, self.total_keys, self.causal, self.window, self.lengths

    def is_empty(self, heads: int, queries: int, keys: int) -> bool:
        """Whether nothing is to be computed of so many: there are no items, or exchanges alone are wanted.

        q and k may have no width.
        """
        is_wanted = self.shapes.value_width > 0 or self.returns_lse
        return not self.computes or not is_wanted or 0 in (self.shapes.batch, heads, queries, keys)

    def scores(self, first: int = 0) -> Scores:
        """Return how scores change, of the heads from `first` on, without spans and bias."""
        changes = self.softcap, None, None, first, self.kernel, self.varied, self.returns_lse
        return Scores(self.scale, *changes)

    def error(self, name: str, value: object, expected: str) -> ValueError:
        return ValueError(f"{self.where}: {name} is {value}; expected {expected}")


def checked(call: Arguments, request: Request, hashes: Sequence[str]) -> Problem:
    """Check a request of which the call's input is q; hashes: of `hashes_of`."""
    shapes, queries, keys = _checked_shapes(call, request), request.queries, request.keys
    total, total_keys = queries.total, shapes.key_tokens if keys is None else keys.total
    _check_function(call, request, total, total_keys)
    mask = shape_of_mask(call, request.mask, (shapes.batch, shapes.heads, total, total_keys))
    _check_dropout(call, request)
    window = _checked_window(call, request.window, total, total_keys)
    softcap = _checked_softcap(call, request.softcap)
    _check_sinks(call, request.sinks, shapes.heads)
    _check_exclusive(call, request)
    _check_spans(call, request.spans, shapes, total, total_keys)
    uses_spans = request.spans is not None or window is not None or request.bias is not None
    changes = request.sinks is not None or softcap > 0 or request.returns_lse
    problem = Problem(
        group=call.group,
        where=call.where,
        dtype=call.input.dtype,
        shapes=shapes,
        queries=numbers_of(queries, 0),
        keys=None if keys is None else numbers_of(keys, 0),
        total=total,
        total_keys=total_keys,
        packed=queries.is_packed,
        lengths=queries.lengths if queries.is_packed else (),
        listed=queries.kind in ("balanced", "documents"),
        mask=mask,
        causal=bool(request.causal),
        window=window,
        softcap=softcap,
        # Scores of no width are 0.
        scale=max(call.input.size(3), 1) ** -0.5 if request.scale is None else float(request.scale),
        dropout_p=float(request.dropout_p),
        kernel=request.kernel,
        returns_lse=request.returns_lse,
        computes=request.computes,
        note=note_of(request, window, softcap, hashes),
        uses_spans=uses_spans,
        blockwise=request.attend is None and request.dropout_p == 0.0,
        by_blocks=changes or uses_spans or request.kernel is not None,
        varied=queries.is_packed or uses_spans,
        joins=mask is None and not uses_spans and _joins(request),
    )
    _check_kernel(call, problem, request)
    return problem


def _joins(request: Request) -> bool:
    """Whether a kernel computes all documents of a rank in one call."""
    q, v, is_eager = request.q, request.v, not torch.compiler.is_compiling() and not is_fake(request.q)
    if not request.queries.is_packed or request.attend is not None or request.dropout_p or not is_eager:
        return False
    return takes_parts(request.kernel, q, v, Needs(softcap=bool(request.softcap), wider=request.returns_lse))


def _checked_shapes(call: Arguments, request: Request) -> Shapes:
    """Check what each tensor is, which dims are the sequence and the heads, and the shapes."""
    q, k, v, queries, keys, *_ = request
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise call.type_error(name, f"a {type(x).__name__}", "a tensor")
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise call.type_error(name, f"of {x.dtype} on {x.device}", f"{q.dtype} on {q.device}, as q")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise call.error(name, f"of shape {list(x.shape)}", "four dims, [B, S, H, D] by default")
        call.beside(x, name)
    if not q.dtype.is_floating_point:
        raise call.type_error("q", f"a tensor of {q.dtype}", "a floating dtype")
    seq = call.dim("seq_dim", 1 if request.seq_dim is None else request.seq_dim)
    head = call.dim("head_dim", 2 if request.head_dim is None else request.head_dim)
    if seq == head or 3 in (seq, head):
        raise call.error("seq_dim", f"{seq} and head_dim is {head}", "two different dims before the last")
    batch, as_given = 3 - seq - head, [3, 3, 3, 3]
    as_given[batch], as_given[head], as_given[seq] = 0, 1, 2
    _check_tokens(call, "q", q, (seq, head), queries)
    heads, key_heads, shape = q.size(head), k.size(head), list(k.shape)
    if list(v.shape[:3]) != shape[:3]:
        raise call.error("v", f"of shape {list(v.shape)}", f"{shape[:3]} and a width, as k of shape {shape}")
    if (k.size(batch), k.size(3)) != (q.size(batch), q.size(3)):
        raise call.error("k", f"of shape {shape}", f"the batch and width of q, of shape {list(q.shape)}")
    if key_heads == 0 or heads % key_heads:
        raise call.error("k", f"of {key_heads} heads", f"a number that divides the {heads} heads of q")
    if keys is not None:
        if keys.group is not queries.group:
            raise call.error("layout", f"{(queries, keys)}, of two groups", "layouts of one group")
        if keys != queries or k.size(seq) != q.size(seq):
            _check_tokens(call, "k", k, (seq, head), keys)
    if keys != queries and (queries.is_packed or (keys is not None and keys.is_packed)):
        raise call.error("layout", f"{(queries, keys)}", "one packed layout for q, k and v")
    sizes = q.size(batch), heads, key_heads, q.size(3), v.size(3), q.size(seq), k.size(seq)
    return Shapes(*sizes, seq, head, (batch, head, seq, 3), tuple(as_given))


def _check_tokens(
    call: Arguments, name: str, x: Tensor, dims: tuple[int, int], layout: SequenceLayout
) -> None:
    """Check that this rank's number of tokens is what the layout says; dims: of tokens and heads."""
    place, numbers, (seq, head) = place_of(layout.group), numbers_of(layout, 0), dims
    expected, tokens = extent(numbers, place.world, place.rank), x.size(seq)
    if tokens != expected:
        hint = ". Is it the whole sequence?" if tokens == total_of(numbers) else ""
        if x.size(head) == expected:
            hint = f". Are the tokens in dim {head}, as in [B, H, S, D]? Pass seq_dim={head}, head_dim={seq}"
        shard = f"{expected}, rank {place.rank}'s shard in {layout}"
        raise call.error(name, f"of {tokens} tokens", f"{shard}{hint}")


def _check_function(call: Arguments, request: Request, queries: int, keys: int) -> None:
    """Check the caller's kernel."""
    if request.attend is not None and not callable(request.attend):
        raise call.type_error("kernel", f"{request.attend!r:.200}", "a function, a kernel's name or None")
    if request.causal and request.attend is not None and keys != queries:
        raise call.error("the number of keys", keys, f"{queries} for a function as kernel, with causal=True")


def _check_dropout(call: Arguments, request: Request) -> None:
    """Check dropout, and that nothing is asked for that has no log-sum-exp."""
    attend, dropout_p = request.attend, request.dropout_p
    if not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        raise call.error("dropout_p", f"{dropout_p!r:.200}", "at least 0 and below 1")
    if request.returns_lse and (attend is not None or dropout_p):
        other = "a function is passed as kernel" if attend is not None else f"dropout_p is {dropout_p}"
        raise call.error("return_lse", f"True, and {other}", "a kernel's name or None, and no dropout")


def _check_exclusive(call: Arguments, request: Request) -> None:
    """Check the bias, and that what the caller's kernel, or dropout, excludes is not passed with it."""
    dropout_p = request.dropout_p
    if request.bias is not None and not callable(request.bias):
        raise call.type_error("bias", f"{request.bias!r:.200}", "a function of index tensors, or None")
    changes = {"sinks": request.sinks, "softcap": request.softcap, "bias": request.bias}
    if request.attend is not None:
        mask = request.spans if request.mask is None else request.mask
        others = {"mask": mask, "window": request.window, "scale": request.scale, **changes}
        for name, value in {**others, "dropout_p": dropout_p or None}.items():
            if value is not None:
                raise call.error(name, "passed, and kernel too", "a kernel that applies it itself")
    for name, value in changes.items() if dropout_p else ():
        if value is not None:
            raise call.error("dropout_p", f"{dropout_p}, and {name} is passed", "0 with it")


def _check_kernel(call: Arguments, problem: Problem, request: Request) -> None:
    """Check that a kernel that is named can compute this."""
    q, v, kernel = request.q, request.v, request.kernel
    if kernel is None:
        return
    if kernel not in NAMES:
        expected = f"a function, None or the name of a kernel: {', '.join(NAMES)}"
        raise call.error("kernel", repr(kernel), expected)
    dense, softcap = problem.mask is not None or request.bias is not None, problem.softcap > 0
    why = reason_against(kernel, q, v, Needs(dense or problem.uses_spans, softcap))
    if why and problem.uses_spans and not dense and not torch.compiler.is_compiling():
        spans = with_keywords(request.spans, problem.keywords)
        needs = Needs(softcap=softcap, wider=problem.returns_lse)
        if blocks_of_spans(kernel, q, v, needs, spans) is not None:
            # It needs no masks.
            why = ""
    if why:
        expected = f"a kernel that can compute this; {kernel} cannot, as {why}"
        raise call.error("kernel", repr(kernel), expected)
    if problem.dropout_p:
        raise call.error("dropout_p", f"{problem.dropout_p}", f"0 with the kernel {kernel}")


def _checked_window(call: Arguments, window: Any, queries: int, keys: int) -> Window | None:
    """Check how many keys on each side a query attends to."""
    if window is None:
        return None
    expected = "(left, right): how many keys before and behind a query's place; None: all on that side"
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
        raise call.type_error("window", f"{window!r:.200}", expected)
    try:
        left, right = (None if side is None else as_int(side) for side in window)
    except TypeError:
        raise call.type_error("window", f"{window!r:.200}", expected) from None
    if min(left or 0, right or 0) < 0:
        raise call.error("window", f"{window!r:.200}", f"ints of at least 0 in {expected}")
    if keys != queries:
        value = f"{window!r}, of {queries} queries and {keys} keys"
        raise call.error("window", value, "as many keys as queries, or Spans as mask")
    return left, right


def _checked_softcap(call: Arguments, softcap: Any) -> float:
    if softcap is None:
        return 0.0
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise call.type_error("softcap", f"{softcap!r:.200}", "a positive number, or None")
    if not 0 < softcap < float("inf"):
        raise call.error("softcap", softcap, "a positive number, or None for scores without a cap")
    return float(softcap)


def _check_sinks(call: Arguments, sinks: Any, heads: int) -> None:
    if sinks is None:
        return
    device = call.input.device
    expected = f"a floating tensor [{heads}] on {device}, a score for each head of q"
    if not isinstance(sinks, Tensor):
        raise call.type_error("sinks", f"a {type(sinks).__name__}", expected)
    if not sinks.dtype.is_floating_point or sinks.device != device:
        raise call.type_error("sinks", f"of {sinks.dtype} on {sinks.device}", expected)
    if list(sinks.shape) != [heads]:
        raise call.error("sinks", f"of shape {list(sinks.shape)}", expected)


def _check_spans(call: Arguments, spans: Spans | None, shapes: Shapes, queries: int, keys: int) -> None:
    if spans is None:
        return
    batch, heads, shape = shapes.batch, shapes.heads, spans.shape
    fits = shape[2] == queries and shape[3] == keys
    if not fits or shape[0] not in (1, batch) or shape[1] not in (1, heads):
        expected = f"Spans of [{batch} or 1, {heads} or 1, {queries}, {keys}]"
        raise call.error("mask", f"Spans of {list(shape)}", expected)
