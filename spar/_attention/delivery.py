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
from .._exchange.cut_and_join import selected
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
            of_heads, at = total.narrow(1, *heads), 0
            for first, size in tokens:
                of_heads.narrow(2, first, size).add_(part.narrow(2, at, size))
                at += size
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


# ---- to the ranks that attend ----


class Delivery(NamedTuple):
    """An exchange of tensors [B, H, S, D] from the owners of their tokens, and the route of each.

    Attributes:
        gradients: the exchange of their gradients.
        float8: whether each of both moves rows as float8.
    """

    exchange: Exchange
    gradients: Exchange
    routes: tuple[Route, ...]
    float8: tuple[bool, bool]

    def run(self, tensors: Sequence[Tensor], records: bool) -> list[Tensor]:
        """Return the tensors of this rank's heads and tokens, in the order of the sequence."""
        exchange, dtype = self.exchange.recorded() if records else self.exchange, tensors[0].dtype
        sent = [narrowed_rows(x) for x in tensors] if self.float8[0] else tensors
        kinds = [route.cut(x) for route, x in zip(self.routes, sent, strict=True)]
        shapes = [
            route.shapes_parted(x.size(0), x.size(3)) for route, x in zip(self.routes, sent, strict=True)
        ]
        received = _exchanged(exchange, kinds, shapes)
        joined = [route.joined(parts) for route, parts in zip(self.routes, received, strict=True)]
        return [widened_rows(x, dtype) for x in joined] if self.float8[0] else joined

    def undo(self, grads: Sequence[Tensor], call: Number) -> list[list[Tensor]]:
        """Return the gradients of this rank's tensors from each rank that got parts of them."""
        sent = [narrowed_rows(x) for x in grads] if self.float8[1] else grads
        kinds = [route.parted(x) for route, x in zip(self.routes, sent, strict=True)]
        shapes = [route.shapes_cut(x.size(0), x.size(3)) for route, x in zip(self.routes, sent, strict=True)]
        received = _exchanged(self.gradients, kinds, shapes, call)
        if not self.float8[1]:
            return received
        return [[widened_rows(x, grads[0].dtype) for x in parts] for parts in received]


class SparDelivery(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, delivery: Delivery, *tensors: Tensor) -> Any:
        outputs = delivery.run(tensors, True)
        ctx.delivery, ctx.call = delivery, delivery.exchange.number()
        ctx.shapes = [x.shape for x in tensors]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        delivery, gradients = ctx.delivery, ctx.delivery.gradients
        with Call(gradients.group, gradients.name, 1, grads[0].device.type):
            _refuse_second_derivative()
            sums = zip(delivery.routes, delivery.undo(grads, ctx.call), ctx.shapes, strict=True)
            return None, *(route.summed(parts, shape) for route, parts, shape in sums)


def deliver(delivery: Delivery, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors [B, H, S, D] of this rank's heads and tokens; record it if one needs a gradient."""
    if must_record(tensors):
        return list(SparDelivery.apply(delivery, *tensors))  # type: ignore[no-untyped-call]
    return delivery.run(tensors, False)


# ---- back to the owners ----


class Return(NamedTuple):
    """An exchange of results [B, H, S, E], and [B, H, S] if there are two, along the route of the queries.

    Attributes:
        gradients: the exchange of what ranks need of the gradients of results.
        merges: whether ranks attended to other keys each, and results are merged by the log-sum-exp; else
            they have other heads.
        float8: whether the exchange, and that of gradients, move rows as float8.
    """

    exchange: Exchange
    gradients: Exchange
    route: Route
    merges: bool
    float8: tuple[bool, bool]

    def run(self, outs: Sequence[Tensor], records: bool) -> list[list[Tensor]]:
        """Return the parts of each result, of this rank's tokens, by the rank that computed them."""
        exchange, dtype = self.exchange.recorded() if records else self.exchange, outs[0].dtype
        sent = _by_rows(outs, self.float8[0])
        kinds = [self.route.parted(x) for x in sent]
        received = _exchanged(exchange, kinds, [self.route.shapes_cut(x.size(0), x.size(3)) for x in sent])
        if self.float8[0]:
            received[0] = [widened_rows(x, dtype) for x in received[0]]
        return received

    def undo(self, grads: Sequence[Tensor], call: Number) -> list[Tensor]:
        """Return the gradients [B, H, S, E] of what this rank computed, from those of results."""
        sent = _by_rows(grads, self.float8[1])
        kinds = [self.route.cut(x) for x in sent]
        shapes = [self.route.shapes_parted(x.size(0), x.size(3)) for x in sent]
        received = _exchanged(self.gradients, kinds, shapes, call)
        found = [self.route.joined(parts) for parts in received]
        if self.float8[1]:
            found[0] = widened_rows(found[0], grads[0].dtype)
        return found


def _by_rows(tensors: Sequence[Tensor], is_float8: bool) -> list[Tensor]:
    """Return results as an exchange moves them: rows [B, H, S, E], and numbers [B, H, S] as rows of one."""
    rows, *numbers = tensors
    found = [narrowed_rows(rows) if is_float8 else rows]
    return found + [x.unsqueeze(3) for x in numbers]


class SparReturn(torch.autograd.Function):
    """Results of heads that other ranks have, one behind the other."""

    @staticmethod
    def forward(ctx: Any, back: Return, *outs: Tensor) -> Any:
        ctx.back = back
        results = _of_all_heads(back, back.run(outs, True), outs)
        ctx.call = back.exchange.number()
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = ctx.back
        with Call(back.gradients.group, back.gradients.name, 2, grads[0].device.type):
            _refuse_second_derivative()
            found = back.undo(grads, ctx.call)
            return None, *(x if like.dim() == 4 else x[..., 0] for x, like in zip(found, grads, strict=True))


def _of_all_heads(
    back: Return, parts: Sequence[Sequence[Tensor]], outs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Join the parts of each result, whose ranks are not in the order of their heads."""
    firsts = [heads[0] for heads, _ in back.route.sent]
    order = sorted(range(len(firsts)), key=firsts.__getitem__)
    joined = [torch.cat([of_ranks[i] for i in order], 1) for of_ranks in parts]
    return tuple([x if out.dim() == 4 else x[..., 0] for x, out in zip(joined, outs, strict=True)])


class SparMerge(torch.autograd.Function):
    """The output and the log-sum-exp of all keys, from those of the keys that each rank of a row has.

    In backward each rank gets the gradient, the log-sum-exp and the row sums of the owner, and finds by them
    the gradients of its own part: so an owner keeps no parts.
    """

    @staticmethod
    def forward(ctx: Any, back: Return, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Any:
        with no_autocast(out.device.type):
            merged, total = _merged(back.run((out, lse), True), sinks)
        ctx.back, ctx.call = back, back.exchange.number()
        ctx.save_for_backward(out, lse, merged, total, sinks)
        return merged, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> Any:
        back, device = ctx.back, grad.device.type
        with Call(back.gradients.group, back.gradients.name, 2, device), no_autocast(device):
            _refuse_second_derivative()
            out, lse, merged, total, sinks = ctx.saved_tensors
            rows = (grad.to(lse.dtype) * merged.to(lse.dtype)).sum(3) - grad_lse
            total = finite(total)
            own_grad, *of_rows = back.undo((grad, total, rows), ctx.call)
            own_total, own_rows = (x[..., 0] for x in of_rows)
            weights, own_grad = torch.exp(lse - own_total), own_grad.to(lse.dtype)
            dlse = weights * ((own_grad * out.to(lse.dtype)).sum(3) - own_rows)
            dsinks = None
            if sinks is not None:
                weights_of_sinks = torch.exp(sinks.to(lse.dtype)[:, None] - total)
                dsinks = -(weights_of_sinks * rows).sum((0, 2)).to(sinks.dtype)
            return None, (weights[..., None] * own_grad).to(out.dtype), dlse, dsinks


def _merged(parts: Sequence[Sequence[Tensor]], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge outputs [B, H, S, E] by their log-sum-exps [B, H, S, 1]; a sink has the value 0."""
    outs, lses = parts
    scores = list(lses)
    if sinks is not None:
        scores.append(sinks.to(lses[0].dtype)[:, None, None].expand_as(lses[0]))
    stacked = torch.stack(scores)
    total = torch.logsumexp(stacked, 0)
    # Not exp(lse - total): scores of -1e9 absorb a logarithm, and weights would not sum to 1.
    weights = stacked.softmax(0).masked_fill_(total == -torch.inf, 0.0)
    merged = torch.zeros_like(outs[0], dtype=total.dtype)
    for weight, out in zip(weights, outs, strict=False):
        merged.addcmul_(out.to(total.dtype), weight)
    return merged.to(outs[0].dtype), total[..., 0]


def give_back(back: Return, outs: Sequence[Tensor], sinks: Tensor | None) -> tuple[Tensor, ...]:
    """Return the results of this rank's tokens: the output [B, H, S, E], and the log-sum-exp [B, H, S].

    outs: of this rank's heads and the queries of its row. sinks: of all heads, if results are to be merged.
    """
    tensors = outs if sinks is None else (*outs, sinks)
    records = must_record(tensors)
    if back.merges:
        if records:
            return tuple(SparMerge.apply(back, *outs, sinks))  # type: ignore[no-untyped-call]
        return _merged(back.run(outs, False), sinks)
    if records:
        return tuple(SparReturn.apply(back, *outs))  # type: ignore[no-untyped-call]
    return _of_all_heads(back, back.run(outs, False), outs)
