"""Attention of a rank's queries to all keys, block by block, as the shards of keys come round.

Step s of rank r needs keys of rank r - s, counted round. Their owner sends them, and only those to which rank
r attends: first to the next two ranks at once, as a rank may hold two shards, then to one more at a time. In
backward the shards come round again, and what a rank computes of their gradients goes back to their owners
with the next shards. Where the keys of all ranks were gathered before, nothing comes round: they are the only
shard, or the second one after this rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch

from .._control.state import Place
from .._exchange.exchange import Exchange
from .._exchange.layouts import WHOLE, Args, Layout, pair
from .._exchange.watch import have_tangents, is_transformed
from .._exchange.work import Work, begin
from .._group.group import Call, Group
from .blocks import Block
from .kernels import kernel_for
from .kernels.kernel import BlockInputs, accumulated, finite
from .masks import added, causal_mask, joined, sliced
from .merged import Merged, Runs, Sum, forward_of, run_of


class Shift(NamedTuple):
    """How a step gets its keys [B, K, T, D] from their owner.

    `keys`: how many of this rank's own go to the rank that needs them in this step, from the first. `shard`,
    `gradient`: the layouts of the keys, and of their gradient, before and after the exchange.
    """

    keys: int
    shard: Args
    gradient: Args


class Ring(NamedTuple):
    """One attention: where, the blocks with the shard of each step, how shards come round, the scale.

    `shifts`: of each step but the first, whose keys are this rank's own. `kernel`: its name; None chooses. A
    failure in backward is reported to the ranks of `told`, which wait for `exchanges` of this rank. `layout`
    of the sequence, and `note`, must be equal on all ranks.
    """

    place: Group | Place
    steps: tuple[tuple[Block, ...], ...]
    shifts: tuple[Shift, ...]
    scale: float
    kernel: str | None
    told: Group | Place
    exchanges: int
    layout: Layout = ()
    note: str = ""


def exchanges_of(world: int) -> tuple[int, int]:
    """Return how many exchanges a ring makes, in forward and in backward."""
    return (max(world - 2, 1), max(world - 1, 2)) if world > 1 else (0, 0)


class _Sending:
    """Tensors [B, K, T, D] on their way to other ranks.

    They are in flight while the caller computes, where that does not slow it down.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        args: tuple[Args, ...],
        ring: Ring,
        name: str,
        records: bool,
        note: str = "",
        forward: int = 0,
    ) -> None:
        """note, forward: as in Operation, and in Channel.exchange."""
        self.work: Work | None = None
        self.sent: Sequence[torch.Tensor] = tensors  # not to be freed before they are sent
        self.received: Sequence[torch.Tensor]
        exchange = Exchange(name, ring.place, args, records=records, note=note)
        if torch.compiler.is_compiling():
            self.received = exchange.run(tensors)
        else:
            self.received, self.work = begin(exchange, tensors, None, True, forward)
            if self.work.is_completed():
                self.sent = ()

    def wait(self) -> Sequence[torch.Tensor]:
        """Return what came from other ranks, once; keep nothing."""
        if self.work is not None:
            self.work.wait()
        received, self.received, self.sent = self.received, (), ()
        return received


def _coming(step: int, world: int) -> tuple[int, ...]:
    """Return the steps whose keys are exchanged while a step is computed."""
    if step == 0:
        return tuple(range(1, min(world, 3)))
    return (step + 1,) if 2 <= step < world - 1 else ()


def _needed(
    ring: Ring, steps: Sequence[int], k: torch.Tensor, v: torch.Tensor
) -> tuple[list[torch.Tensor], tuple[Args, ...]]:
    """Return what other ranks need of this rank's keys in the steps, and its layouts."""
    shifts = [ring.shifts[step - 1] for step in steps]
    tensors = [run_of(x, 0, shift.keys) for shift in shifts for x in (k, v)]
    return tensors, tuple([shift.shard for shift in shifts for _ in (k, v)])


def _forward(
    ring: Ring,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    gathered: Sequence[torch.Tensor],
    records: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    merged, kernel, name = Merged(q, v.size(3)), kernel_for(ring.kernel, q, v, mask), "attention"
    queries, world, own = Runs(q), ring.place.world, (k, v)
    ahead = list(gathered)  # the shards of the next steps
    for step, blocks in enumerate(ring.steps):
        sending = None
        if coming := _coming(step, world):
            tensors, args = _needed(ring, coming, *own)
            if step == 0:  # an empty tensor shows the layout to the peers: shards say nothing of their order
                tensors.append(k.new_empty(k.size(2), 0))
                args = (*args, pair(ring.layout, WHOLE))
            sending = _Sending(tensors, args, ring, name, records, ring.note)
        for block in blocks:
            (mine,) = queries.of(block.query, block.queries)
            merged.add(block.query, *forward_of(kernel, _inputs(ring, block, mine, k, v, mask)))
        if sending is not None:
            ahead += sending.wait()[: 2 * len(coming)]
        if ahead:
            k, v, *ahead = ahead
    out, lse = merged.total()
    return out.to(q.dtype), lse


def _inputs(
    ring: Ring, block: Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> BlockInputs:
    """Return a block's part of the tensors, q being its queries; the mask as what is added to the scores."""
    k, v = run_of(k, block.key, block.keys), run_of(v, block.key, block.keys)
    if mask is None:
        return BlockInputs(q, k, v, block.causal, None, ring.scale)
    mask = sliced(mask, block.query_start, block.queries, block.key_start, block.keys)
    if block.causal:  # a query may have no key left only by both together: `forward_of` must see it
        mask = joined(mask, causal_mask(block.queries, block.keys, 0, mask.device))
    return BlockInputs(q, k, v, False, added(mask, q.dtype), ring.scale)


def _backward(
    ring: Ring,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    gathered: Sequence[torch.Tensor],
    forward: int,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v, and of gathered keys and values; forward: as in Channel.exchange."""
    kernel, dq = kernel_for(ring.kernel, q, v, mask), Sum(q)
    if mask is not None:
        lse = finite(lse)  # a query whose keys are all masked: their weights become 0
    queries = Runs(q, grad, out, lse)

    def add_gradients(step: int, k: torch.Tensor, v: torch.Tensor, dk: Sum, dv: Sum) -> None:
        for block in ring.steps[step]:
            mine, *of = queries.of(block.query, block.queries)
            parts = kernel.backward(_inputs(ring, block, mine, k, v, mask), of[0], of[1], of[2])
            for whole, at, part in zip((dq, dk, dv), (block.query, block.key, block.key), parts, strict=True):
                whole.add(at, part)

    name, world = "backward of attention", ring.place.world
    own = Sum(k), Sum(v)
    unsent: list[tuple[int, torch.Tensor]] = []  # gradients of other ranks' keys, with their steps

    def send(steps: Sequence[int]) -> _Sending:
        """Send this rank's keys for the steps, and what is unsent to its owners."""
        tensors, args = _needed(ring, steps, k, v)
        tensors += [_as_items(x, k.dtype) for _, x in unsent]
        args += tuple([ring.shifts[step - 1].gradient for step, _ in unsent])
        unsent.clear()
        return _Sending(tensors, args, ring, name, False, forward=forward)

    def receive(sending: _Sending, steps: Sequence[int]) -> list[torch.Tensor]:
        """Return the keys of the steps; add gradients of this rank's own."""
        found = sending.wait()
        for i, part in enumerate(found[2 * len(steps) :]):
            own[i % 2].add(0, _as_items(part, accumulated(k.dtype)))
        return list(found[: 2 * len(steps)])

    keys, values = k, v
    ahead: list[torch.Tensor] = []  # the shards of the next steps
    if coming := _coming(0, world):
        ahead = receive(send(coming), coming)
    for step in range(1, world):
        keys, values, *ahead = ahead
        coming = _coming(step, world)
        sending = send(coming) if coming else None
        parts = Sum(keys), Sum(values)
        add_gradients(step, keys, values, *parts)
        if sending is not None:
            ahead += receive(sending, coming)
        unsent += [(step, part.total()) for part in parts]
        del parts  # not to be kept while the next are computed
    del keys, values
    # this rank's own shard is the last: meanwhile the gradients of it arrive
    sending = send(()) if world > 1 else None
    add_gradients(0, k, v, *own)
    if sending is not None:
        receive(sending, ())
    found = [part.total() for part in own]
    if gathered:
        others = Sum(gathered[0]), Sum(gathered[1])
        add_gradients(1, gathered[0], gathered[1], *others)
        found += [part.total() for part in others]
    return dq.total().to(q.dtype), *[x.to(q.dtype) for x in found]


def _as_items(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View sums as items of the shards' dtype, or the reverse: the tensors of one exchange have one dtype."""
    if x.dtype == dtype:
        return x
    return (x if x.stride(-1) == 1 else x.contiguous()).view(dtype)


def _no_autocast(x: torch.Tensor) -> AbstractContextManager[None]:
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class SparAttention(torch.autograd.Function):
    """The gradient is computed from the output and the log-sum-exp; it cannot be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any,
        ring: Ring,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        *gathered: torch.Tensor,
    ) -> torch.Tensor:
        ctx.ring = ring
        with _no_autocast(q):
            out, lse = _forward(ring, q, k, v, mask, gathered, True)
        ctx.call = ring.place.calls if isinstance(ring.place, Group) else 0
        ctx.save_for_backward(q, k, v, out, lse, mask, *gathered)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ring = ctx.ring
        q, k, v, out, lse, mask, *gathered = ctx.saved_tensors
        with Call(ring.told, "backward of attention", ring.exchanges, grad.device.type):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise RuntimeError(
                    "attention: blocks that are merged cannot be differentiated twice (create_graph=True); "
                    'pass method="ulysses" and a kernel that can be, as attend'
                )
            with _no_autocast(grad):
                dq, dk, dv, *others = _backward(ring, grad, q, k, v, out, lse, mask, gathered, ctx.call)
                return None, dq, dk, dv, None, *others


def attend_round(
    ring: Ring,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *gathered: torch.Tensor,
) -> torch.Tensor:
    """Return the attention of this rank's queries [B, H, S, D] to the keys of all ranks [B, K, T, D].

    gathered: the k and v of all ranks, for the ring's second step; then its first has this rank's own.
    """
    if is_transformed() or have_tangents((q, k, v)):
        raise NotImplementedError(
            "attention: blocks that are merged have no forward-mode derivative, and none under torch.func; "
            'pass method="ulysses", and as attend None or a function, whose derivatives it then has'
        )
    q, k, v, *gathered_ = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, *gathered))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return cast(torch.Tensor, SparAttention.apply(ring, q, k, v, mask, *gathered_))  # type: ignore[no-untyped-call]
    with _no_autocast(q):
        return _forward(ring, q, k, v, mask, gathered_, False)[0]
