# SPDX-License-Identifier: Apache-2.0
"""Tensors on their way to other ranks while this one computes, inside of a Function of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._exchange.exchange import Exchange
from .._exchange.work import Work, begin


class Sending:
    """One exchange, in flight while the caller computes, where that does not slow it down."""

    def __init__(self, exchange: Exchange, tensors: Sequence[Tensor], forward: int = 0) -> None:
        """forward: as in `Exchange.run`."""
        self.work: Work | None = None
        self.sent: Sequence[Tensor] = tensors  # not to be freed before they are sent
        self.received: Sequence[Tensor]
        if torch.compiler.is_compiling():
            self.received = exchange.run(tensors)
            return
        self.received, self.work = begin(exchange, tensors, None, True, forward)
        if self.work is None or self.work.is_completed():
            self.sent = ()

    def wait(self) -> Sequence[Tensor]:
        """Return what came from other ranks, once; keep nothing."""
        if self.work is not None:
            self.work.wait()
        received, self.received, self.sent = self.received, (), ()
        return received


class Gathering(NamedTuple):
    """What gathers the keys [B, K, T, D] and values of all ranks, and sums their gradients.

    Attributes:
        exchange: of k and v in the caller's order of dims.
        as_given, by_heads: permute to that order, and back.
    """

    exchange: Exchange
    as_given: tuple[int, ...]
    by_heads: tuple[int, ...]

    def begin(self, k: Tensor, v: Tensor, records: bool) -> Sending:
        exchange = self.exchange.recorded() if records else self.exchange
        return Sending(exchange, [x.permute(self.as_given) for x in (k, v)])

    def begin_backward(self, gradients: Sequence[Tensor], forward: int) -> Sending:
        return Sending(self.exchange.transposed, [x.permute(self.as_given) for x in gradients], forward)

    def end(self, sending: Sending) -> list[Tensor]:
        return [x.permute(self.by_heads) for x in sending.wait()]
