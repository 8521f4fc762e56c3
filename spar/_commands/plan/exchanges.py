# SPDX-License-Identifier: Apache-2.0
"""The exchanges of one attention on one rank, without ranks, data or kernels.

`spar.attention` runs on meta tensors and on process groups that have no backend. A dispatch mode sees the op
of each exchange, and the core plans it: so what is counted is what a training step exchanges.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ... import _C
from ..._attention.attention import exchanges_only
from ..._attention.grid_methods import SHAPES
from ..._exchange.dispatch import OpCall, call_of, layouts_of
from .layer import HYBRID, Layer, placed


@dataclass(frozen=True)
class Traffic:
    """What one rank exchanges in an attention.

    Attributes:
        forward, backward: bytes that it sends to other ranks.
        held: the most bytes of K and V that exchanges brought and that it holds at once in forward.
    """

    forward: int
    backward: int
    held: int


@dataclass
class _Received:
    """Memory that an exchange filled: its bytes, and between which two moments it lived."""

    bytes: int
    born: int
    died: int | None = None


class _Exchanges(TorchDispatchMode):
    """Sees the exchanges below it: the bytes that each sends, and what each receives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[int] = []
        self.received: list[list[_Received]] = []
        self.now = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func is torch.ops.spar.exchange.default:
            inputs, _, text, sizes = args[:4]
            self.sent.append(_sent(inputs, call_of(text), sizes))
            # The last output is the number of the call.
            self.received.append([self._watch(output) for output in outputs[:-1]])
        return outputs

    def _watch(self, output: torch.Tensor) -> _Received:
        memory = _Received(output.numel() * output.element_size(), self._tick())

        def ends() -> None:
            memory.died = self._tick()

        weakref.finalize(output.untyped_storage(), ends)
        return memory

    def _tick(self) -> int:
        self.now += 1
        return self.now


def _sent(inputs: list[torch.Tensor], call: OpCall, sizes: list[int]) -> int:
    """Return the bytes that a rank sends to others in an exchange, from its plan."""
    item, layouts = inputs[0].element_size(), layouts_of(call, sizes)
    core = _C.Exchange(call.op, "", call.world, call.rank, item, layouts, 0, False, 1.0, 0)
    # One item for all places: plans follow from shapes, and nothing is moved.
    like = [torch.empty(1, dtype=x.dtype, device="cpu").expand(x.shape) for x in inputs]
    return sum(core.plan(like, 0)[0].push_bytes)


def _peak(memory: list[_Received], until: int) -> int:
    """Return the most bytes that lived at once, until a moment."""
    changes = [(m.born, m.bytes) for m in memory if m.born <= until]
    changes += [(m.died, -m.bytes) for m in memory if m.died is not None and m.died <= until]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def exchanged(layer: Layer, method: str, kind: str, rank: int) -> Traffic:
    """Return what a rank exchanges in one layer's attention, forward and backward.

    Raises:
        ValueError: `spar.attention` refuses it.
    """
    at = placed(layer, kind, rank)
    tokens, dtype = at.layout.sizes[rank], layer.dtype
    q, k, v = (
        torch.empty(layer.batch, tokens, heads, width, dtype=dtype, device="meta", requires_grad=True)
        for heads, width in (
            (layer.heads, layer.width),
            (layer.key_heads, layer.width),
            (layer.key_heads, layer.value_width),
        )
    )
    groups = (at.ulysses, at.ring) if kind == HYBRID else None
    with torch.enable_grad(), _Exchanges() as seen:
        y = exchanges_only(
            *(q, k, v, at.layout),
            causal=layer.causal,
            mask=layer.mask(kind),
            window=layer.sides,
            method=None if kind == HYBRID else method,
            groups=groups,
        )
        calls, over = len(seen.sent), seen.now
        torch.autograd.grad(y, (q, k, v), torch.empty_like(y))
    received = seen.received[:calls]
    if method in ("ulysses", HYBRID, *SHAPES) and received:
        # Q comes first, and the last exchange returns the output.
        received = [received[0][1:], *received[1:-1]]
    held = _peak([memory for outputs in received for memory in outputs], over)
    return Traffic(sum(seen.sent[:calls]), sum(seen.sent[calls:]), held)
