# SPDX-License-Identifier: Apache-2.0
"""`by_state`: run a recurrence with a linear state on each rank's tokens, and pass states between ranks.

A fragment, a run of one document on one rank, maps the state affinely: S_out = M S_in + S_own, where S_own is
the state that it leaves from zero. Ranks gather (M, S_own) of all fragments, and fold those before each of
theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._exchange.arguments import Arguments, not_empty
from .._exchange.layouts import pieces
from ..sequence_layout import SequenceLayout, checked_numbers, numbers_of
from .gather import transpose_for

_NAME = "by_state"
Step = Callable[..., tuple[Tensor, Tensor]]


def by_state(
    fn: Step,
    tensors: Sequence[Tensor],
    layout: SequenceLayout,
    state: Sequence[int],
    transition: Callable[..., Tensor],
    *,
    decay: bool = False,
    correct: Callable[..., Tensor] | None = None,
    like: int = 0,
    seq_dim: int = 1,
) -> Tensor:
    """Run a recurrence over a sharded sequence; only states travel, whose size does not depend on its length.

    For linear attention, delta rules and state spaces, with any kernel that takes and returns a state. One
    all_gather in forward, of a state and a transition for each fragment, and its transpose in backward.
    Gradients are exact, those of parameters are to be summed over the ranks. `by_heads` does the same by
    another exchange: it moves fewer bytes for short shards, and needs as many heads as ranks to balance.

    Args:
        fn: called as fn(*tensors, state) with a fragment of this rank's tokens and the state before it, for
            each of its documents. It returns the output `[B, T, ...]` and the state behind it. The state must
            be affine in the one before.
        tensors: this rank's tokens, `[B, S_local, ...]`. One must require a gradient where results of fn do:
            not all ranks call it before the exchange.
        layout: how the sequence lies on the ranks. In a packed layout each document begins with zeros.
        state: the shape of the state, `[B, H, K, V]`. Zeros, and what ranks gather, are float32, or float64
            if the first tensor is.
        transition: called as transition(*tensors) with a fragment; the matrix `[B, H, K, K]` by which it
            multiplies the state before it. For a delta rule: fn's final state from the identity and values 0.
        decay: whether the transition is a factor instead, `[B, H, K, 1]` or what broadcasts to it.
        correct: called as correct(*tensors, state); what the state before a fragment adds to its output from
            zero. With it, fn runs once for each fragment, not twice.
        like: the tensor whose shape and dtype the output has, where a rank has no tokens.
        seq_dim: where S is in the tensors and the output.

    Returns:
        The output, `[B, S_local, ...]`, contiguous.

    Raises:
        ValueError, TypeError: a tensor does not fit the layout, or a result another shape.
        MismatchError: calls differ between ranks. Every rank raises.
    """
    tensors = not_empty(_NAME, tensors, layout.group)
    # One exchange, and the peers' next call, in which they learn that fn failed behind it.
    with Arguments(_NAME, tensors[0], layout.group, "tensors[0]", 2) as call:
        seq = call.dim("seq_dim", seq_dim)
        for i, x in enumerate(tensors):
            checked_numbers(call.beside(x, f"tensors[{i}]"), "layout", layout, seq, False)
        if not 0 <= like < len(tensors):
            raise call.error("like", like, f"the index of one of {len(tensors)} tensors")
        passing = _Passing(call, fn, tensors, layout, tuple(state), transition, correct, seq)
        passing.decay, passing.like = decay, tensors[like]
        return passing.run()


class _Passing:
    """One call, on the fragments of this rank."""

    def __init__(
        self,
        call: Arguments,
        fn: Step,
        tensors: Sequence[Tensor],
        layout: SequenceLayout,
        state: tuple[int, ...],
        transition: Callable[..., Tensor],
        correct: Callable[..., Tensor] | None,
        seq: int,
    ) -> None:
        self.call, self.fn, self.tensors, self.layout = call, fn, tensors, layout
        self.state, self.transition, self.correct, self.seq = state, transition, correct, seq
        self.decay, self.like = False, tensors[0]
        shards = [pieces(numbers_of(layout, 0), call.world, rank) for rank in range(call.world)]
        fragments = [[run for run in runs if run.size > 0] for runs in shards]
        self.sizes = [len(runs) for runs in fragments]
        self.own, first = fragments[call.rank], sum(self.sizes[: call.rank])
        # By document: the numbers of its fragments, as they are gathered, in the order of the sequence.
        documents: dict[int, list[tuple[int, int]]] = {}
        for number, run in enumerate(itertools.chain(*fragments)):
            document = run.sequence if layout.kind == "packed" else 0
            documents.setdefault(document, []).append((run.start, number))
        numbers = [[number for _, number in sorted(runs)] for runs in documents.values()]
        places = {number: (runs, i) for runs in numbers for i, number in enumerate(runs)}
        # For each own fragment: the numbers of those before it in its document, and whether it is the last.
        self.before = [places[first + i][0][: places[first + i][1]] for i in range(len(self.own))]
        self.last = [places[first + i][0][-1] == first + i for i in range(len(self.own))]
        dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        self.zeros = torch.zeros(state, dtype=dtype, device=tensors[0].device)

    def run(self) -> Tensor:
        ends = itertools.accumulate([run.size for run in self.own], initial=0)
        parts = [
            [x.narrow(self.seq, begin, run.size) for x in self.tensors]
            for begin, run in zip(ends, self.own, strict=False)
        ]
        outputs: list[Tensor | None] = [None] * len(parts)
        maps = []
        for i, part in enumerate(parts):
            if self.last[i] and self.before[i] and self.correct is None:
                # Nobody needs its state, and its output needs the state before it.
                maps.append(self.map(None, self.zeros))
                continue
            outputs[i], own = self.stepped(part, self.zeros)
            maps.append(self.map(part if self.before[i] and not self.last[i] else None, own))
        gathered = self.gathered(maps)
        for i, part in enumerate(parts):
            if self.before[i]:
                state, zero = self.folded(gathered, self.before[i]), outputs[i]
                if zero is None or self.correct is None:
                    outputs[i] = self.stepped(part, state)[0]
                else:
                    outputs[i] = zero + self.correct(*part, state).to(zero.dtype)
        found = [x for x in outputs if x is not None]
        result = torch.cat(found, self.seq) if found else self.like
        # A rank that uses no state of others takes part in the gradient's exchange.
        return (result + (gathered.reshape(-1)[:0] ** 2).sum().to(result.dtype)).contiguous()

    def stepped(self, part: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Call fn, and check what it returns."""
        result = self.fn(*part, state)
        if (
            not isinstance(result, tuple)
            or len(result) != 2
            or not all(isinstance(x, Tensor) for x in result)
        ):
            raise self.call.error("the result of fn", f"a {type(result).__name__}", "(output, state)")
        output, final = result
        tokens = part[0].size(self.seq)
        if output.dim() <= self.seq or output.size(self.seq) != tokens:
            expected = f"{tokens} tokens in dim {self.seq}"
            raise self.call.error("the output of fn", f"of shape {list(output.shape)}", expected)
        if final.shape != self.zeros.shape:
            raise self.call.error("the state of fn", f"of shape {list(final.shape)}", f"{list(self.state)}")
        return output, final.to(self.zeros.dtype)

    def map(self, part: Sequence[Tensor] | None, own: Tensor) -> Tensor:
        """Return (M, S_own) of a fragment, [B, H, K, K or 1 + V]; zeros for an M that nobody needs."""
        shape = (*self.state[:-1], 1 if self.decay else self.state[-2])
        if part is None:
            return torch.cat([self.zeros.new_zeros(shape), own], -1)
        value = self.transition(*part)
        fits = value.dim() == len(shape) and all(
            size == most or (self.decay and size == 1) for size, most in zip(value.shape, shape, strict=True)
        )
        if not fits:
            found, expected = f"of shape {list(value.shape)}", f"{list(shape)}"
            raise self.call.error("the result of transition", found, expected)
        return torch.cat([value.to(own.dtype).expand(shape), own], -1)

    def gathered(self, maps: Sequence[Tensor]) -> Tensor:
        """Gather the maps of all fragments along a dim in front."""
        width = (1 if self.decay else self.state[-2]) + self.state[-1]
        own = torch.stack(list(maps)) if maps else self.zeros.new_zeros(0, *self.state[:-1], width)
        for x in self.tensors:
            if x.is_floating_point():
                # All ranks record the exchange alike.
                own = own + (x.reshape(-1)[:0] ** 2).sum().to(own.dtype)
        gathered: Tensor = transpose_for(_NAME, False, own, self.layout.group, 0, self.sizes, None)
        return gathered

    def folded(self, gathered: Tensor, numbers: Sequence[int]) -> Tensor:
        """Return the state behind the fragments of these numbers, which are a document's first ones."""
        state, width = self.zeros, 1 if self.decay else self.state[-2]
        for i, number in enumerate(numbers):
            before, own = gathered[number, ..., :width], gathered[number, ..., width:]
            # The M of a first fragment is not gathered.
            state = own if i == 0 else own + (before * state if self.decay else before @ state)
        return state
