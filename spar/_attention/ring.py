"""Attention of a rank's queries to all keys, block by block, as the shards of keys go round the ranks.

Each rank sends its shard of K and V to the next two ranks at once, and each shard that it received from two
ranks before on to the next, until it has seen all: as many as it may hold, two, in as few exchanges as that
permits. In backward the shards go round again, and with each of them the gradient of the one before it, which
arrives at its shard's owner last. Where the keys of all ranks were gathered before, nothing goes round: they
are the only shard, or the second one after this rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch

from .._runtime.channel import Operation
from .._runtime.exchange import (
    ONE,
    RECORDED,
    UNRECORDED,
    calls_before,
    have_tangents,
    is_profiled,
    is_transformed,
    report_failure,
    run,
)
from .._runtime.layouts import Args
from .._runtime.member import Place
from .._runtime.move import Move
from .._runtime.overlap import Work, begin
from .._runtime.registry import by_handle
from .blocks import Block
from .kernels import kernel_for
from .kernels.kernel import BlockInputs, accumulated, finite
from .masks import added, causal_mask, joined, sliced
from .merged import Merged, Runs, Sum, forward_of, run_of


class Ring(NamedTuple):
    """One attention: where, the blocks with the shard of each step, how shards go on, the scale.

    `passes`: for each step the layouts of its shard [B, K, T, D], or of its gradient, before and after the
    next rank has it. `skips`: those of the first step's, before and after the rank behind the next has it.
    `kernel`: its name; None chooses. A failure in backward is reported to the ranks of `told`, which wait for
    `exchanges` of this rank.
    """

    place: Place
    steps: tuple[tuple[Block, ...], ...]
    passes: tuple[Args, ...]
    skips: Args
    scale: float
    kernel: str | None
    told: Place
    exchanges: int


def exchanges_of(world: int) -> tuple[int, int]:
    """Return how many exchanges a ring makes, in forward and in backward."""
    return (max(world - 2, 1), world) if world > 1 else (0, 0)


class _Sending:
    """Tensors [B, K, T, D] on their way to other ranks.

    They are in flight while the caller computes, where that does not slow it down.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], args: tuple[Args, ...], ring: Ring, name: str, records: bool
    ) -> None:
        self.work: Work | None = None
        self.name = name
        self.sent: Sequence[torch.Tensor] = tensors  # not to be freed before they are sent
        self.received: Sequence[torch.Tensor]
        if torch.compiler.is_compiling():
            gradient = RECORDED if records else UNRECORDED
            self.received = run(tensors, ring.place, Operation(name, args, *ONE, gradient))
        else:
            self.received, self.work = begin(Move(name, ring.place, args), tensors, None, records, True)
            if self.work.is_completed():
                self.sent = ()

    def wait(self) -> Sequence[torch.Tensor]:
        """Return what came from ranks before this one, once; keep nothing."""
        if self.work is not None:
            with torch.profiler.record_function(f"spar::{self.name}") if is_profiled() else nullcontext():
                self.work.wait()
        received, self.received, self.sent = self.received, (), ()
        return received


def _to_two_ranks(ring: Ring, k: torch.Tensor, v: torch.Tensor, name: str, records: bool) -> _Sending:
    """Send this rank's shard to the next two ranks."""
    twice = ring.place.world > 2
    args = (ring.passes[0],) * 2 + (ring.skips,) * 2 * twice
    return _Sending((k, v) * (1 + twice), args, ring, name, records)


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
    queries, world = Runs(q), ring.place.world
    ahead = list(gathered)  # the shards of the next steps
    for step, blocks in enumerate(ring.steps):
        sending = None
        if step == 0 and world > 1:
            sending = _to_two_ranks(ring, k, v, name, records)
        elif 2 <= step < world - 1:
            sending = _Sending((k, v), (ring.passes[step],) * 2, ring, name, records)
        for block in blocks:
            (own,) = queries.of(block.query, block.queries)
            merged.add(block.query, *forward_of(kernel, _inputs(ring, block, own, k, v, mask)))
        if sending is not None:
            ahead += sending.wait()
        if ahead:
            k, v, *ahead = ahead
    out, lse = merged.total()
    return _after(out.to(q.dtype), ring, k, v), lse


def _after(x: torch.Tensor, ring: Ring, *received: torch.Tensor) -> torch.Tensor:
    """Return x; keep the last exchange in a graph, though this rank needs no key of it: its peers do."""
    if ring.steps[-1] or not torch.compiler.is_compiling():
        return x
    return cast(torch.Tensor, torch.ops.spar.after(x, received))


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
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v, and of gathered keys and values."""
    kernel, dq = kernel_for(ring.kernel, q, v, mask), Sum(q)
    if mask is not None:
        lse = finite(lse)  # a query whose keys are all masked: their weights become 0
    queries = Runs(q, grad, out, lse)

    def gradients(step: int, k: torch.Tensor, v: torch.Tensor) -> tuple[Sum, Sum]:
        dk, dv = Sum(k), Sum(v)
        for block in ring.steps[step]:
            own, *of = queries.of(block.query, block.queries)
            parts = kernel.backward(_inputs(ring, block, own, k, v, mask), of[0], of[1], of[2])
            for whole, at, part in zip((dq, dk, dv), (block.query, block.key, block.key), parts, strict=True):
                whole.add(at, part)
        return dk, dv

    name, world = "backward of attention", ring.place.world
    received: Sequence[torch.Tensor] = k, v
    ahead: Sequence[torch.Tensor] = ()  # the shards of the next steps
    sums: list[torch.Tensor] = []  # the gradient of the step's shard, by this rank and those before
    if world > 1:
        ahead = _to_two_ranks(ring, k, v, name, False).wait()
    # this rank's own shard is the last: by then the gradients of it have come round
    for step in range(1, world):
        received, ahead = ahead[:2], ahead[2:]
        sending = _pass_on(ring, step, received, sums, name) if step > 1 else None
        parts = gradients(step, received[0], received[1])
        if sending is None:
            sums = [part.total() for part in parts]
        else:
            found = sending.wait()
            ahead, sums = [*ahead, *found[:-2]], [_as_items(x, accumulated(k.dtype)) for x in found[-2:]]
            parts[0].add_to(sums[0])
            parts[1].add_to(sums[1])
        del parts  # not to be kept while the next are computed
    sending = _pass_on(ring, world, (k, v), sums, name) if world > 1 else None
    own = [part.total() for part in gradients(0, k, v)]
    if sending is not None:
        for whole, others in zip(own, sending.wait(), strict=True):
            whole.add_(_as_items(others, whole.dtype))
    if gathered:
        own += [part.total() for part in gradients(1, gathered[0], gathered[1])]
    return _after(dq.total().to(q.dtype), ring, *received), *[x.to(q.dtype) for x in own]


def _pass_on(
    ring: Ring, step: int, shard: Sequence[torch.Tensor], sums: Sequence[torch.Tensor], name: str
) -> _Sending:
    """Send a step's shard on, if the next rank needs it, and the gradient of the shard of the step before."""
    tensors = [_as_items(x, like.dtype) for x, like in zip(sums, shard, strict=True)]
    args: tuple[Args, ...] = (ring.passes[step - 1],) * 2
    if step + 1 < ring.place.world:
        tensors, args = [*shard, *tensors], (ring.passes[step],) * 2 + args
    return _Sending(tensors, args, ring, name, False)


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
        compiling = torch.compiler.is_compiling()
        group = None if compiling or ring.place.world == 1 else by_handle(ring.place.handle).group
        ctx.call = ring, group  # keeps the group alive until backward
        with _no_autocast(q):
            out, lse = _forward(ring, q, k, v, mask, gathered, True)
        ctx.save_for_backward(q, k, v, out, lse, mask, *gathered)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ring, _ = ctx.call
        q, k, v, out, lse, mask, *gathered = ctx.saved_tensors
        (before,) = calls_before((ring.told,)) if ring.told.world > 1 else (0,)
        try:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise RuntimeError(
                    "attention: blocks that are merged cannot be differentiated twice (create_graph=True); "
                    'pass method="ulysses" and a kernel that can be, as attend'
                )
            with _no_autocast(grad):
                dq, dk, dv, *others = _backward(ring, grad, q, k, v, out, lse, mask, gathered)
                return None, dq, dk, dv, None, *others
        except BaseException as error:
            waiting = [(ring.told, before + ring.exchanges)]
            report_failure(waiting, "backward of attention", grad.device.type, error)
            raise


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
