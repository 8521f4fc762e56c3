# SPDX-License-Identifier: Apache-2.0
"""Errors of failed exchanges. Invalid arguments raise ValueError or TypeError."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class SparError(dist.DistError):
    """Base of spar's errors.

    Attributes:
        op: the operation's name.
        group: the process group's name.
        call: the number of the call on its group, from 1.
        rank: this rank in the group.
        ranks: the ranks of the group that caused it, if known.
    """

    def __init__(
        self,
        message: str = "",
        *,
        op: str | None = None,
        group: str | None = None,
        call: int | None = None,
        rank: int | None = None,
        ranks: tuple[int, ...] = (),
    ) -> None:
        self.args = (message,)  # torch.compile cannot trace torch's own __init__, and would hide the message
        self.op = op
        self.group = group
        self.call = call
        self.rank = rank
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        details = {name: getattr(self, name) for name in ("op", "group", "call", "rank", "ranks")}
        return functools.partial(type(self), **details), (str(self),)


def ranks_of(texts: Sequence[str]) -> dict[str, str]:
    """Return "rank 0, 2" for each distinct text; texts are in rank order."""
    whose: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        whose.setdefault(text, []).append(rank)
    return {text: f"rank {', '.join(map(str, ranks))}" for text, ranks in whose.items()}


def by_rank(texts: Sequence[str]) -> str:
    """Format one line per distinct text, with its ranks; texts are in rank order."""
    return "\n".join(f"  {ranks}: {text}" for text, ranks in ranks_of(texts).items())


class MismatchError(SparError):
    """Calls differed between ranks. Nothing was exchanged; the group stays usable."""

    # the gathered dim and each rank's size of it, if the calls differ only in that
    _gathered_sizes: tuple[int, list[int]] | None = None


class PeerLostError(SparError):
    """A rank of the group died or disconnected. The group is broken."""


class ExchangeTimeoutError(SparError, TimeoutError):
    """An exchange did not end before its timeout (SPAR_TIMEOUT). The group is broken."""


class GroupBrokenError(SparError):
    """An earlier call on this group timed out, lost a peer or was interrupted."""


class TransportError(SparError):
    """No transport can serve the group, or the one in use failed."""


class OutOfMemoryError(SparError, MemoryError, torch.OutOfMemoryError):
    """Out of memory for an exchange, on this rank or a peer."""
