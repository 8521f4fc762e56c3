# SPDX-License-Identifier: Apache-2.0
"""One call of spar.attention, as its caller passes it, and what ranks compare of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import _C
from .._checks import digest
from .._exchange.observers import is_fake
from ..sequence_layout import SequenceLayout
from .pairs import Function
from .spans import Spans

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Window = tuple[int | None, int | None]


class Request(NamedTuple):
    """One call, as its caller passes it. Tensors and functions decide by what they are, not by their values.

    Attributes:
        q: `[B, S_local, H, D]` by default.
        k, v: `[B, T_local, K, D]` and `[B, T_local, K, E]`; K divides H.
        queries, keys: the layouts of q, and of k and v; None: every rank holds the whole k and v.
        mask: over the whole sequence; once it was checked `[B, H, S, T]`, of which dims of size 1 broadcast.
        spans: which keys each query attends to.
        sinks: `[H]`, the score of a key of value 0 that each query of a head attends to besides.
        bias: what is added to the scores.
        attend: the caller's kernel, which applies all this itself.
        grid: the rows and columns of ranks, for methods that have them; None chooses them.
        float8: whether rows of heads travel as float8: "forward", "backward", "both" or None.
        kernel: the name of one of spar's kernels; None chooses one.
        seq_dim, head_dim: those of S and H; None: 1 and 2.
        computes: False: make the exchanges, but compute nothing, as `spar plan` does to count them.
    """

    q: Any
    k: Any
    v: Any
    queries: SequenceLayout
    keys: SequenceLayout | None
    mask: Any
    spans: Spans | None
    sinks: Any
    bias: Function | None
    attend: Attend | None
    causal: bool
    window: Window | None
    grid: Any
    float8: Any
    softcap: float | None
    scale: float | None
    dropout_p: float
    method: str | None
    kernel: str | None
    seq_dim: int | None
    head_dim: int | None
    returns_lse: bool
    computes: bool = True


def note_of(request: Request, window: Window | None, softcap: float, hashes: Sequence[str]) -> str:
    """Return what ranks compare besides shapes and layouts, which are the same in compiled code."""
    parts = ["causal True"] if request.causal else []
    if request.mask is not None:
        parts.append(f"mask of {request.mask.dtype}")
    if window is not None:
        parts.append(f"window {window}")
    if request.sinks is not None:
        parts.append(f"sinks of {request.sinks.dtype}")
    if softcap:
        parts.append(f"softcap {softcap}")
    if request.bias is not None:
        parts.append("a bias")
    if request.scale is not None:
        # -0.0 equals 0.0, by which an attention is remembered.
        parts.append(f"scale {float(request.scale) + 0.0}")
    if request.dropout_p:
        parts.append(f"dropout_p {request.dropout_p}")
    if request.spans is not None:
        parts.append("spans")
    if request.float8 is not None:
        parts.append(f"float8 {request.float8}")
    return ", ".join([*parts, *hashes])


def hashes_of(request: Request) -> tuple[str, ...]:
    """Return the hashes of a call's values that ranks compare, as the caller passes them."""
    mask, spans, sinks = request.mask, request.spans, request.sinks
    if mask is spans is sinks is None or torch.compiler.is_compiling():
        return ()
    hashes, checks = [], _C.env("check") == "1"
    if (
        isinstance(mask, Tensor)
        and not is_fake(mask)
        and (checks or (mask.is_cpu and not mask.requires_grad))
    ):
        hashes.append(f"hash of the mask {_digest_of(mask):x}")
    if checks and isinstance(sinks, Tensor) and not is_fake(sinks):
        hashes.append(f"hash of the sinks {digest(sinks):x}")
    if spans is not None:
        hashes.append(f"hash of the spans {spans.digest:x}")
    return tuple(hashes)


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
