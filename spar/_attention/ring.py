# SPDX-License-Identifier: Apache-2.0
"""Attention of a rank's queries to all keys, block by block, as the shards of keys come round.

Step s of rank r needs keys of rank r - s, counted round. Their owner sends them, and only those to which rank
r attends: first to the next two ranks at once, as a rank may hold two shards, then to one more at a time. In
backward the shards come round again, and what a rank computes of their gradients goes back to their owners
with the next shards. Where the keys of all ranks are gathered, nothing comes round: they are the only shard,
or the second one after this rank's own, which is attended to meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._control.state import Place
from .._exchange.autocast import no_autocast
from .._exchange.cut_and_join import selected
from .._exchange.exchange import Exchange
from .._exchange.layouts import WHOLE, Args, Layout, pair
from .._exchange.observers import have_tangents, is_transformed, may_have_hooks
from .._group.group import Call, Group
from .blocks import Block, BlocksMaker
from .kernels.kernel import Gradients, Graph, accumulated, finite, narrowed, readable, widened
from .merged import Merged, Sum
from .scores import Blocks, Scores
from .sending import Gathering, Sending
from .travel import Shift, Shifts


@dataclass(frozen=True)
class Round:
    """What a rank computes and exchanges while the shards of keys [B, K, T, D] go round.

    Attributes:
        steps: the blocks of each step, of this rank's queries and the step's shard.
        shifts: how the shard of each step but the first, which is this rank's, comes from its owner.
        layout: of the whole sequence, as ranks compare it; shards do not say where they lie in it.
    """

    steps: tuple[tuple[Block, ...], ...]
    shifts: tuple[Shift, ...] = ()
    layout: Args = ()


def round_of(layout: Layout, shifts: Shifts, blocks: BlocksMaker) -> Round:
    """Return a ring of what a rank receives, with the blocks of its queries and the keys of each step."""
    queries = shifts.held[0]
    steps = [tuple(blocks(queries, keys)) for keys in shifts.held]
    return Round(tuple(steps), shifts.shifts, pair(layout, WHOLE))


@dataclass(frozen=True)
class Ring:
    """One attention by blocks.

    Attributes:
        place: this rank's among those whose shards go round; `ALONE` if no shard does.
        scores: how they are computed.
        gather: brings the keys of all ranks for the second step, while the first one is computed.
        reports_to: the ranks that wait for `exchanges` of this rank in backward, and are told of its failure.
        note: what all ranks must pass alike, besides the layout.
    """

    place: Group | Place
    round: Round
    scores: Scores
    reports_to: Group | Place
    exchanges: int
    note: str = ""
    gather: Gathering | None = None


def forward_exchanges(world: int) -> int:
    return max(world - 2, 1) if world > 1 else 0


def backward_exchanges(round_: Round) -> int:
    return max(len(round_.shifts), 2) if round_.shifts else 0


def _sent(
    ring: Ring,
    name: str,
    tensors: Sequence[Tensor],
    args: tuple[Args, ...],
    records: bool,
    note: str = "",
    forward: int = 0,
) -> Sending:
    """Send tensors [B, K, T, D] to other ranks of a ring. note, forward: as in Exchange, and its run."""
    if torch.compiler.is_compiling():
        return Sending(Exchange(name, ring.place, args, records=records, note=note), tensors)
    remembered = ring.place.exchanges if isinstance(ring.place, Group) else {}
    key = name, args, records, note
    exchange = remembered.get(key)
    if exchange is None:
        exchange = remembered[key] = Exchange(name, ring.place, args, records=records, note=note)
    return Sending(exchange, tensors, forward)


def _coming(step: int, steps: int) -> tuple[int, ...]:
    """Return the steps, of so many, whose keys are exchanged while a step is computed."""
    if step == 0:
        return tuple(range(1, min(steps, 3)))
    return (step + 1,) if 2 <= step < steps - 1 else ()


def _needed(ring: Ring, steps: Sequence[int], k: Tensor, v: Tensor) -> tuple[list[Tensor], tuple[Args, ...]]:
    """Return the parts of this rank's shard to which other ranks attend in the steps, and their layouts."""
    tensors: list[Tensor] = []
    layouts: tuple[Args, ...] = ()
    for step in steps:
        parts, shard, _ = ring.round.shifts[step - 1]
        if len(parts) == 1:
            first, count = parts[0]
            tensors += (k.narrow(2, first, count), v.narrow(2, first, count))
        else:
            tensors += (selected(k, parts, 2), selected(v, parts, 2))
        layouts += (shard, shard)
    return tensors, layouts


def _is_one_block(ring: Ring, sinks: Tensor | None) -> bool:
    """Whether the output and the log-sum-exp are those of one block."""
    return sum(map(len, ring.round.steps)) == 1 and sinks is None


def _keeps_graph(ring: Ring, q: Tensor, sinks: Tensor | None) -> bool:
    """Whether the only block's graph holds no memory besides what is saved for backward.

    It would hold another rank's shard, a block's output that is copied into a longer one, and what hooks of
    saved tensors discard (checkpoint) or move (save_on_cpu).
    """
    if torch.compiler.is_compiling() or not _is_one_block(ring, sinks) or may_have_hooks():
        return False
    steps, shifts = ring.round.steps, ring.round.shifts
    (block,) = itertools.chain(*steps)
    is_saved = bool(steps[0]) or not shifts
    return is_saved and block.sample < 0 and block.queries == q.shape[2]


def forward_of(
    ring: Ring,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    gathered: list[Tensor],
    records: bool,
    graphs: list[Graph] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, S, E] and the log-sum-exp [B, H, S].

    gathered: the k and v of all ranks, for the second step; those that it gathers itself are added.
    graphs: a list to which the graph of the only block is added, if its kernel needs it for backward.
    """
    merged, of_scores, name = Merged(q, v.size(3)), Blocks(ring.scores, q, v, mask), "attention"
    shard, waits = (k, v), ring.place.world > 1
    if ring.gather is not None:
        gathering = ring.gather.begin(k, v, records and (k.requires_grad or v.requires_grad))
    # The shards of the next steps.
    ahead = list(gathered)
    for step, blocks in enumerate(ring.round.steps):
        sending = None
        coming = _coming(step, len(ring.round.shifts) + 1)
        # Ranks compare their calls in the first exchange, which each has, whatever it needs.
        if coming or (step == 0 and waits):
            tensors, args = _needed(ring, coming, *shard)
            if step == 0:
                # An empty tensor shows the layout of the sequence to the peers.
                tensors.append(k.new_empty(k.size(2), 0))
                args = (*args, ring.round.layout)
            sending = _sent(ring, name, tensors, args, records, ring.note)
        for block in blocks:
            kernel, inputs = of_scores.of(block, q, k, v)
            graph = None if graphs is None else kernel.kept(inputs)
            if graphs is None or graph is None:
                out, lse = kernel.forward(inputs)
            else:
                graphs.append(graph)
                # Not the graph's own, which would become outputs of the caller's Function.
                out, lse = graph.out.detach(), graph.lse.detach()
            del inputs  # they would hold the shard when the next one is here
            merged.add(block.query, out, lse, block.sample)
        if step == 0 and ring.gather is not None:
            gathered += ring.gather.end(gathering)
            ahead += gathered
        if sending is not None:
            ahead += sending.wait()[: 2 * len(coming)]
        if ahead:
            k, v, *ahead = ahead
    out, lse = merged.total()
    if sinks is not None:
        # A sink is one more key, of this score and the value 0.
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        # A sink of -inf is none: a query without keys then has no weights at all.
        out, lse = out * torch.exp(lse - finite(total))[..., None], total
    return out.to(q.dtype), lse


class Backward:
    """The gradients of one attention of q [B, H, S, D] to k and v [B, K, T, D].

    A gradient of the log-sum-exp is one more column of the output's. Of v it is 1 for all keys, so that each
    weight gets it, and of the output 0, so that kernels, which subtract grad * out, do not take it away. The
    graph of a forward takes it as it is.
    """

    def __init__(
        self,
        ring: Ring,
        call: int,
        grad: Tensor,
        saved: Sequence[Any],
        grad_lse: Tensor | None = None,
        graph: Graph | None = None,
    ) -> None:
        """call: `forward` of Exchange.run. saved: by `SparAttention.forward`. graph: of the only block."""
        self.ring, self.call, self.grad_lse, self.graph = ring, call, grad_lse, graph
        q, k, v, out, lse, mask, self.sinks, *self.gathered = saved
        self.q, self.k, self.v = q, k, v
        # The weights of a query whose keys are all masked are then 0.
        may_be_empty = mask is not None or ring.scores.spans is not None
        self.widens = grad_lse is not None and graph is None
        if grad_lse is not None and graph is None:
            q, v, grad, out = widened(q), widened(v, 1), widened(grad, grad_lse), widened(out)
        self.blocks, self.dtype = Blocks(ring.scores, q, v, mask), accumulated(q.dtype)
        self.of_output = grad, out, finite(lse) if may_be_empty else lse
        self.is_only = _is_one_block(ring, self.sinks) and grad_lse is None
        self.dq, self.dk, self.dv = Sum(self.q, self.dtype), Sum(k, self.dtype), Sum(self.v, self.dtype)
        # Of other ranks' keys: the step, and the sums, which go back to their owners.
        self.unsent: list[tuple[int, Tensor]] = []
        self.returned: list[int] = []

    def run(self, learns: bool = False) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, of gathered keys and values, and of sinks if there are any.

        learns: whether those of keys and values that the ring gathers are exchanged.
        """
        steps = len(self.ring.round.shifts) + 1
        # The shards of the next steps.
        ahead: list[Tensor] = []
        if coming := _coming(0, steps):
            ahead = self.receive(self.send(coming), coming)
        for step in range(1, steps):
            k, v, *ahead = ahead
            coming = _coming(step, steps)
            sending = self.send(coming) if coming else None
            dk, dv = Sum(k, self.dtype), Sum(v, self.dtype)
            self.add_blocks(step, k, v, dk, dv)
            if sending is not None:
                ahead += self.receive(sending, coming)
            self.unsent += ((step, dk.total(self.dtype)), (step, dv.total(self.dtype)))
            # Another rank's shard and its gradients must not stay while the next are computed.
            del k, v, dk, dv
        # The last blocks are those of this rank's shard: its gradients from other ranks arrive meanwhile.
        sending, of_gathered = self.send(()) if steps > 1 else None, self.of_gathered()
        gather = self.ring.gather
        if gather is not None:
            sending = gather.begin_backward(of_gathered, self.call) if learns else None
            of_gathered = []
        self.add_blocks(0, self.k, self.v, self.dk, self.dv)
        if gather is not None and sending is not None:
            for sum_, x in zip((self.dk, self.dv), gather.end(sending), strict=True):
                sum_.add(0, x)
        elif sending is not None:
            self.receive(sending, ())
        gradients = [x.total(self.q.dtype) for x in (self.dq, self.dk, self.dv)]
        of_sinks = [] if self.sinks is None else [self.of_sinks(self.sinks)]
        return (*gradients, *of_gathered, *of_sinks)

    def of_gathered(self) -> list[Tensor]:
        """Return the gradients of gathered keys and values, and add that of q."""
        if not self.gathered:
            return []
        k, v = self.gathered
        sums = Sum(k, self.dtype), Sum(v, self.dtype)
        self.add_blocks(1, k, v, *sums)
        return [x.total(self.q.dtype) for x in sums]

    def of_sinks(self, sinks: Tensor) -> Tensor:
        """Return the gradient of the sinks: their weights, as those of a key whose value is 0."""
        grad, out, lse = self.of_output
        row_sum = (grad.to(self.dtype) * out.to(self.dtype)).sum(-1)
        weights = torch.exp(sinks.to(self.dtype)[:, None] - lse)
        if self.grad_lse is not None:
            row_sum = row_sum - self.grad_lse
        gradient: Tensor = -(weights * row_sum).sum((0, 2)).to(sinks.dtype)
        return gradient

    def add_blocks(self, step: int, k: Tensor, v: Tensor, dk: Sum, dv: Sum) -> None:
        """Add the gradients of a step's blocks to those of q and of the step's shard, k and v."""
        q = self.q
        if self.widens:
            q, k, v = widened(q), widened(k), widened(v, 1)
        for block in self.ring.round.steps[step]:
            if self.graph is None:
                dq_part, dk_part, dv_part = self.of_block(block, q, k, v)
            else:
                dq_part, dk_part, dv_part = self.graph.gradients(self.of_output[0], self.grad_lse)
            self.dq.add(block.query, dq_part, block.sample)
            dk.add(block.key, dk_part, block.sample)
            dv.add(block.key, dv_part, block.sample)

    def of_block(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        """Return a block's gradients, computed by its kernel from the output and the log-sum-exp."""
        parts = [x.narrow(2, block.query, block.queries) for x in self.of_output]
        if block.sample >= 0:
            parts = [x.narrow(0, block.sample, 1) for x in parts]
        kernel, inputs = self.blocks.of(block, q, k, v)
        grad, out, lse = parts
        dq, dk, dv = kernel.backward(inputs._replace(is_only=self.is_only), grad, out, lse)
        return (narrowed(dq), narrowed(dk), narrowed(dv)) if self.widens else (dq, dk, dv)

    def send(self, steps: Sequence[int]) -> Sending:
        """Send this rank's keys for the steps, and gradients of other ranks' keys to their owners."""
        tensors, args = _needed(self.ring, steps, self.k, self.v)
        # Each rank returns its gradients of the same steps.
        self.returned = []
        for step, x in self.unsent:
            tensors.append(as_items(x, self.k.dtype))
            args = (*args, self.ring.round.shifts[step - 1].gradient)
            if step not in self.returned:
                self.returned.append(step)
        self.unsent = []
        return _sent(self.ring, "backward of attention", tensors, args, False, forward=self.call)

    def receive(self, sending: Sending, steps: Sequence[int]) -> list[Tensor]:
        """Return the keys of the steps; add gradients that other ranks computed for this rank's keys."""
        received = list(sending.wait())
        count = 2 * len(steps)
        for i, step in enumerate(self.returned):
            at = count + 2 * i
            for sum_, x in zip((self.dk, self.dv), received[at : at + 2], strict=True):
                begin, gradients = 0, as_items(x, self.dtype)
                for first, size in self.ring.round.shifts[step - 1].parts:
                    sum_.add(first, gradients.narrow(2, begin, size))
                    begin += size
        return received[:count]


def as_items(x: Tensor, dtype: torch.dtype) -> Tensor:
    """View sums as items of the shards' dtype, or the reverse: the tensors of one exchange have one dtype."""
    if x.dtype == dtype:
        return x
    return (x if x.stride(-1) == 1 else x.contiguous()).view(dtype)


def _by_token(lse: Tensor) -> Tensor:
    """Return [B, H, S] in the memory of [B, S, H], which callers have; it is no tensor that is saved.

    Dynamo would take a stride of its gradient for the size S, and the gradient has other strides.
    """
    return lse.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def second_derivative_error() -> RuntimeError:
    return RuntimeError(
        "attention: blocks that are merged cannot be differentiated twice (create_graph=True); "
        'pass method="ulysses" and a kernel that can be'
    )


def transform_error() -> NotImplementedError:
    return NotImplementedError(
        "attention: blocks that are merged have no forward-mode derivative, and none under torch.func; "
        'pass method="ulysses", and as kernel None or a function, whose derivatives it then has'
    )


class SparAttention(torch.autograd.Function):
    """The gradient is computed from the output and the log-sum-exp; it cannot be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any,
        ring: Ring,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        *gathered: Tensor,
    ) -> Any:
        ctx.ring, ctx.graphs = ring, [] if _keeps_graph(ring, q, sinks) else None
        held, place = list(gathered), ring.place if ring.gather is None else ring.gather.exchange.group
        with no_autocast(q.device.type):
            out, lse = forward_of(ring, q, k, v, mask, sinks, held, True, ctx.graphs)
        ctx.call = place.calls if isinstance(place, Group) else 0
        ctx.save_for_backward(q, k, v, out, lse, mask, sinks, *held)
        return (out, _by_token(lse)) if ring.scores.returns_lse else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None = None) -> Any:
        ring, saved = ctx.ring, ctx.saved_tensors
        with Call(ring.reports_to, "backward of attention", ring.exchanges, grad.device.type):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise second_derivative_error()
            with no_autocast(grad.device.type):
                # One more backward, after retain_graph=True, has no graph, and computes the forward again.
                graph = ctx.graphs.pop() if not torch.compiler.is_compiling() and ctx.graphs else None
                made = Backward(ring, ctx.call, grad, saved, grad_lse, graph)
                learns = ring.gather is not None and any(ctx.needs_input_grad[2:4])
                dq, dk, dv, *others = made.run(learns)
                of_sinks = None if saved[6] is None else others.pop()
                return None, dq, dk, dv, None, of_sinks, *others


def attend_round(
    ring: Ring,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    *gathered: Tensor,
) -> tuple[Tensor, ...]:
    """Return the attention of this rank's queries [B, H, S, D] to the keys of all ranks [B, K, T, D].

    A tuple of the output, and of the log-sum-exp [B, H, S] if the scores say so.

    gathered: the k and v of all ranks, for the ring's second step; then its first has this rank's own.
    """
    if is_transformed() or (forward_ad._current_level >= 0 and have_tangents((q, k, v))):
        raise transform_error()
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        q, k, v = readable(q, k, v)
    learns = q.requires_grad or k.requires_grad or v.requires_grad
    if torch.is_grad_enabled() and (learns or (sinks is not None and sinks.requires_grad)):
        outs = SparAttention.apply(ring, q, k, v, mask, sinks, *gathered)  # type: ignore[no-untyped-call]
        return outs if ring.scores.returns_lse else (outs,)
    with no_autocast(q.device.type):
        out, lse = forward_of(ring, q, k, v, mask, sinks, list(gathered), False)
        return (out, _by_token(lse)) if ring.scores.returns_lse else (out,)
