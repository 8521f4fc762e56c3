# SPDX-License-Identifier: Apache-2.0
"""Exchanges of a grid: tokens go from their owners to the ranks that attend with them, and results back.

Each exchange moves tensors of items, those for each rank one behind the other. In backward gradients go the
other way, and are summed in float32 at their owners.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._exchange.autocast import no_autocast
from .._exchange.cut_and_join import add_selected, selected
from .._exchange.exchange import Exchange, Number
from .._exchange.gather_plan import Interval
from .._exchange.layouts import Args, by_receiver
from .._exchange.observers import must_record
from .._group.group import Call
from .float8 import narrowed_rows, widened_rows
from .grid import Shares
from .kernels.kernel import accumulated, finite
from .ring import as_items, second_derivative_error

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """How tensors [B, H, S, D] get from the owners of tokens to ranks with some of the heads, and back.

    Attributes:
        sent: which heads and tokens each peer gets.
        received: the number of tokens from each peer.
        order, back: as of Shares.
        heads: the number of heads that this rank gets.
        items: heads times tokens, receiver by receiver, from each owner.
    """

    sent: tuple[tuple[Interval, tuple[Interval, ...]], ...]
    received: tuple[int, ...]
    order: tuple[Interval, ...]
    back: tuple[Interval, ...]
    heads: int
    items: tuple[int, ...]

    def args(self, world: int, batch: int, width: int) -> Args:
        """Return the layouts of an exchange of the tensors' items."""
        return by_receiver(0, world, [batch * width * count for count in self.items])

    # ---- at the owners ----

    def cut(self, x: Tensor) -> list[Tensor]:
        """Return what each receiver gets of this rank's tensor."""
        return [selected(x.narrow(1, *heads), tokens, 2) for heads, tokens in self.sent]

    def shapes_cut(self, batch: int, width: int) -> list[Shape]:
        return [(batch, heads[1], sum([size for _, size in tokens]), width) for heads, tokens in self.sent]

    def summed(self, parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
        """Add what each receiver returns of this rank's tensor, of this shape."""
        dtype = parts[0].dtype
        total = parts[0].new_zeros(shape, dtype=accumulated(dtype))
        for (heads, tokens), part in zip(self.sent, parts, strict=True):
            add_selected(total.narrow(1, *heads), tokens, part, 2)
        return total.to(dtype)

    # ---- at the receivers ----

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Put tokens from their owners in the order of the sequence."""
        return selected(torch.cat(list(parts), 2), self.order, 2)

    def parted(self, x: Tensor) -> list[Tensor]:
        """Undo `joined`."""
        return list(selected(x, self.back, 2).split(list(self.received), 2))

    def shapes_parted(self, batch: int, width: int) -> list[Shape]:
        return [(batch, self.heads, size, width) for size in self.received]


def route_of(shares: Shares, heads: Sequence[Interval], rank: int) -> Route:
    """Return how tokens get to ranks with their heads: the first one, and the number, of each rank."""
    world, peers = len(heads), shares.peers
    return Route(
        tuple([(heads[peer], tokens) for peer, tokens in zip(peers, shares.sent, strict=True)]),
        tuple([shares.sizes[rank * world + owner] for owner in peers]),
        shares.order,
        shares.back,
        heads[rank][1],
        tuple([heads[i // world][1] * size for i, size in enumerate(shares.sizes)]),
    )


def _one_behind_the_other(tensors: Sequence[Tensor]) -> Tensor:
    """Return the items of all tensors, each copied once whatever its strides."""
    sizes = [x.numel() for x in tensors]
    items = tensors[0].new_empty(sum(sizes))
    for part, x in zip(items.split(sizes), tensors, strict=True):
        part.view(x.shape).copy_(x)
    return items


def _exchanged(
    exchange: Exchange,
    kinds: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[Shape]],
    forward: Number = 0,
) -> list[list[Tensor]]:
    """Send each rank its tensors of each kind; return what the ranks sent here, of these shapes."""
    dtype, flat = kinds[0][0].dtype, [_one_behind_the_other(kind) for kind in kinds]
    received = exchange.run([as_items(x, dtype) for x in flat], forward)
    found = []
    for items, kind, of_kind in zip(received, flat, shapes, strict=True):
        parts = as_items(items, kind.dtype).split([math.prod(shape) for shape in of_kind])
        found.append([part.view(shape) for part, shape in zip(parts, of_kind, strict=True)])
    return found


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise second_derivative_error()


class Leg(NamedTuple):
    """An exchange of rows [B, H, S, D], and numbers [B, H, S] of rows, between owners and those that attend.

    Attributes:
        exchange: the exchange.
        routes: of each tensor, from the owners.
        is_float8: whether rows travel as float8.
    """

    exchange: Exchange
    routes: tuple[Route, ...]
    is_float8: bool

    def to_attend(self, tensors: Sequence[Tensor], call: Number = 0) -> list[Tensor]:
        """Return the tensors of this rank's heads and tokens, in the order of the sequence."""
        sent = self._sent(tensors)
        kinds = [route.cut(x) for route, x in zip(self.routes, sent, strict=True)]
        shapes = [
            route.shapes_parted(x.size(0), x.size(3)) for route, x in zip(self.routes, sent, strict=True)
        ]
        received = zip(self.routes, _exchanged(self.exchange, kinds, shapes, call), tensors, strict=True)
        return [self._received(route.joined(parts), x) for route, parts, x in received]

    def to_owners(self, tensors: Sequence[Tensor], call: Number = 0) -> list[list[Tensor]]:
        """Return the parts of each tensor, of this rank's tokens, by the rank that had them."""
        sent = self._sent(tensors)
        kinds = [route.parted(x) for route, x in zip(self.routes, sent, strict=True)]
        shapes = [route.shapes_cut(x.size(0), x.size(3)) for route, x in zip(self.routes, sent, strict=True)]
        received = zip(_exchanged(self.exchange, kinds, shapes, call), tensors, strict=True)
        return [[self._received(part, x) for part in parts] for parts, x in received]

    def _sent(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors as they travel: numbers as rows of one."""
        return [
            x.unsqueeze(3) if x.dim() == 3 else narrowed_rows(x) if self.is_float8 else x for x in tensors
        ]

    def _received(self, x: Tensor, like: Tensor) -> Tensor:
        """Return what came, of the dims and the dtype of `like` before it travelled."""
        if like.dim() == 3:
            return x[..., 0]
        return widened_rows(x, like.dtype) if self.is_float8 else x


class Legs(NamedTuple):
    """The exchange of tensors in forward, and that of their gradients, which go back, in backward."""

    forward: Leg
    backward: Leg

    def recorded(self) -> Leg:
        """Return the exchange in forward as autograd records it."""
        return self.forward._replace(exchange=self.forward.exchange.recorded())


# ---- to the ranks that attend ----


class SparDelivery(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, legs: Legs, *tensors: Tensor) -> Any:
        outputs = legs.recorded().to_attend(tensors)
        ctx.legs, ctx.call = legs, legs.forward.exchange.number()
        ctx.shapes = [x.shape for x in tensors]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        leg = ctx.legs.backward
        with Call(leg.exchange.group, leg.exchange.name, 1, grads[0].device.type):
            _refuse_second_derivative()
            sums = zip(leg.routes, leg.to_owners(grads, ctx.call), ctx.shapes, strict=True)
            return None, *(route.summed(parts, shape) for route, parts, shape in sums)


def deliver(legs: Legs, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors [B, H, S, D] of this rank's heads and tokens; record it if one needs a gradient."""
    if must_record(tensors):
        return list(SparDelivery.apply(legs, *tensors))  # type: ignore[no-untyped-call]
    return legs.forward.to_attend(tensors)


# ---- back to the owners ----


class SparReturn(torch.autograd.Function):
    """Results of heads that other ranks have, one behind the other."""

    @staticmethod
    def forward(ctx: Any, legs: Legs, *outs: Tensor) -> Any:
        results = _of_all_heads(legs.recorded(), outs)
        ctx.legs, ctx.call = legs, legs.forward.exchange.number()
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        leg = ctx.legs.backward
        with Call(leg.exchange.group, leg.exchange.name, 2, grads[0].device.type):
            _refuse_second_derivative()
            return None, *leg.to_attend(grads, ctx.call)


def _of_all_heads(leg: Leg, outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Join the parts of each result, whose ranks are not in the order of their heads."""
    firsts = [heads[0] for heads, _ in leg.routes[0].sent]
    order = sorted(range(len(firsts)), key=firsts.__getitem__)
    return tuple([torch.cat([parts[i] for i in order], 1) for parts in leg.to_owners(outs)])


class SparMerge(torch.autograd.Function):
    """The output and the log-sum-exp of all keys, from those of the keys that each rank of a row has.

    In backward each rank gets the gradient, the log-sum-exp and the row sums of the owner, and finds by them
    the gradients of its own part: so an owner keeps no parts.
    """

    @staticmethod
    def forward(ctx: Any, legs: Legs, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Any:
        with no_autocast(out.device.type):
            merged, total = _merged(legs.recorded().to_owners((out, lse)), sinks)
        ctx.legs, ctx.call = legs, legs.forward.exchange.number()
        ctx.save_for_backward(out, lse, merged, total, sinks)
        return merged, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> Any:
        leg, device = ctx.legs.backward, grad.device.type
        with Call(leg.exchange.group, leg.exchange.name, 2, device), no_autocast(device):
            _refuse_second_derivative()
            out, lse, merged, total, sinks = ctx.saved_tensors
            rows = (grad.to(lse.dtype) * merged.to(lse.dtype)).sum(3) - grad_lse
            total = finite(total)
            own_grad, own_total, own_rows = leg.to_attend((grad, total, rows), ctx.call)
            weights, own_grad = torch.exp(lse - own_total), own_grad.to(lse.dtype)
            dlse = weights * ((own_grad * out.to(lse.dtype)).sum(3) - own_rows)
            dsinks = None
            if sinks is not None:
                weights_of_sinks = torch.exp(sinks.to(lse.dtype)[:, None] - total)
                dsinks = -(weights_of_sinks * rows).sum((0, 2)).to(sinks.dtype)
            return None, (weights[..., None] * own_grad).to(out.dtype), dlse, dsinks


def _merged(parts: Sequence[Sequence[Tensor]], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge outputs [B, H, S, E] by their log-sum-exps [B, H, S]; a sink has the value 0."""
    outs, lses = parts
    scores = list(lses)
    if sinks is not None:
        scores.append(sinks.to(lses[0].dtype)[:, None].expand_as(lses[0]))
    stacked = torch.stack(scores)
    total = torch.logsumexp(stacked, 0)
    # Not exp(lse - total): scores of -1e9 absorb a logarithm, and weights would not sum to 1.
    weights = stacked.softmax(0).masked_fill_(total == -torch.inf, 0.0)
    merged = torch.zeros_like(outs[0], dtype=total.dtype)
    for weight, out in zip(weights, outs, strict=False):
        merged.addcmul_(out.to(total.dtype), weight[..., None])
    return merged.to(outs[0].dtype), total


def give_back(legs: Legs, outs: Sequence[Tensor], sinks: Tensor | None, merges: bool) -> tuple[Tensor, ...]:
    """Return the results of this rank's tokens: the output [B, H, S, E], and the log-sum-exp [B, H, S].

    Args:
        legs: along the route of the queries.
        outs: of this rank's heads and the queries of its row.
        sinks: of all heads, if results are merged.
        merges: whether ranks attended to other keys each, and results are merged by the log-sum-exp; else
            they have other heads.
    """
    tensors = outs if sinks is None else (*outs, sinks)
    records = must_record(tensors)
    if merges:
        if records:
            return tuple(SparMerge.apply(legs, *outs, sinks))  # type: ignore[no-untyped-call]
        return _merged(legs.forward.to_owners(outs), sinks)
    if records:
        return tuple(SparReturn.apply(legs, *outs))  # type: ignore[no-untyped-call]
    return _of_all_heads(legs.forward, outs)
