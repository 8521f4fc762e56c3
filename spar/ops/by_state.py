# SPDX-License-Identifier: Apache-2.0
"""`by_state`: run a recurrence with a linear state on each rank's tokens, and pass states between ranks.

A fragment, a run of one document on one rank, maps the state affinely: S_out = M S_in + S_own, where S_own is
the state that it leaves from zero. Ranks gather (M, S_own) of the fragments that have a successor, and fold
those before each of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._exchange.arguments import Arguments, not_empty
from .._exchange.autocast import no_autocast
from .._exchange.gather_plan import Fragment
from ..sequence_layout import SequenceLayout, checked_numbers
from .fragments import fragments_of
from .gather import transpose_for
from .tree_fragments import fragments_of_tree
from .tree_row import TreeRow, agree, check_tree
from .unused import depending_on

_NAME = "by_state"
Step = Callable[..., tuple[Tensor, Tensor]]
Transition = Callable[..., Tensor]


class Recurrence(NamedTuple):
    """What computes a fragment: the arguments of `by_state` of these names."""

    fn: Step
    state: tuple[int, ...]
    transition: Transition | None = None
    values: int | None = None
    decay: bool = False
    correct: Callable[..., Tensor] | None = None
    like: int = 0


def by_state(
    fn: Step,
    tensors: Sequence[Tensor],
    layout: SequenceLayout,
    state: Sequence[int],
    transition: Transition | None = None,
    *,
    values: int | None = None,
    decay: bool = False,
    correct: Callable[..., Tensor] | None = None,
    like: int = 0,
    seq_dim: int = 1,
    tree: TreeRow | None = None,
) -> Tensor:
    """Run a recurrence over a sharded sequence; only states travel, whose size does not depend on its length.

    For linear attention, delta rules and state spaces, with any kernel that takes and returns a state. One
    all_gather in forward, of a state and a transition for each fragment that another one continues, and its
    transpose in backward; none if each document lies on one rank. Gradients are exact, those of parameters
    are to be summed over the ranks. `by_heads` does the same by another exchange: it moves fewer bytes for
    short shards, and needs as many heads as ranks to balance.

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
            multiplies the state before it. None: fn computes it, from `values`.
        values: instead of transition: the index of the tensor `[B, S_local, H, V]` whose columns fn keeps
            apart, as it does those of the state and of the output, `[B, S_local, H, V]`: linear attention and
            delta rules. A fragment that continues another one runs once, with K more columns: values 0 from
            the identity. They are its transition, and what any state before it adds to the output.
        decay: whether the transition is a factor instead, `[B, H, K, 1]` or what broadcasts to it.
        correct: called as correct(*tensors, state); what the state before a fragment adds to its output from
            zero. With it, fn runs once for each fragment and from zeros only, else twice.
        like: the tensor whose shape and dtype the output has, where a rank has no tokens.
        seq_dim: where S is in the tensors and the output.
        tree: of a `PrefixTree`, whose layout is `layout`: each token then has its ancestors before it.

    Returns:
        The output, `[B, S_local, ...]`, contiguous.

    Raises:
        ValueError, TypeError: a tensor does not fit the layout, or a result another shape.
        MismatchError: calls differ between ranks. Every rank raises.
    """
    recurrence = Recurrence(fn, tuple(state), transition, values, decay, correct, like)
    tensors = not_empty(_NAME, tensors, layout.group)
    agree(_NAME, tree)
    # One exchange, and the peers' next call, in which they learn that fn failed behind it.
    with Arguments(_NAME, tensors[0], layout.group, "tensors[0]", 2) as call:
        seq = call.dim("seq_dim", seq_dim)
        for i, x in enumerate(tensors):
            checked_numbers(call.beside(x, f"tensors[{i}]"), "layout", layout, seq, False)
        if not 0 <= recurrence.like < len(tensors):
            raise call.error("like", recurrence.like, f"the index of one of {len(tensors)} tensors")
        _check_recurrence(call, recurrence, tensors, seq)
        if tree is not None:
            check_tree(call, tree, layout)
        return _Passing(call, recurrence, tensors, layout, seq, tree).run()


def _check_recurrence(call: Arguments, given: Recurrence, tensors: Sequence[Tensor], seq: int) -> None:
    values, state = given.values, given.state
    if len(state) < 2:
        raise call.error("state", list(state), "a shape [..., K, V]")
    if (given.transition is None) == (values is None):
        raise call.error(
            "transition",
            "None" if values is None else "passed besides values",
            "one of transition and values",
        )
    if values is None:
        return
    if given.decay or given.correct is not None:
        raise call.error("values", values, "None: fn computes no decay, and needs no correct")
    if not 0 <= values < len(tensors):
        raise call.error("values", values, f"the index of one of {len(tensors)} tensors")
    x = tensors[values]
    shape = [*state[:seq], x.size(seq), *state[seq:-2], state[-1]]
    if seq > len(state) - 2 or list(x.shape) != shape:
        expected = f"{shape}, as state {list(state)} says"
        raise call.error(f"tensors[{values}]", f"of shape {list(x.shape)}", expected)


class _Alone(NamedTuple):
    """What a fragment computes without the state before it; None where nobody needs it.

    Attributes:
        output: from zeros.
        own: the state behind it, from zeros.
        transition: what multiplies the state before it.
        added: what multiplies the state before it and is then added to the output, `[B, T, H, K]`.
    """

    output: Tensor | None = None
    own: Tensor | None = None
    transition: Tensor | None = None
    added: Tensor | None = None


class _Passing:
    """One call, on the fragments of this rank."""

    def __init__(
        self,
        call: Arguments,
        given: Recurrence,
        tensors: Sequence[Tensor],
        layout: SequenceLayout,
        seq: int,
        tree: TreeRow | None,
    ) -> None:
        self.call, self.given, self.tensors, self.layout, self.seq = call, given, tensors, layout, seq
        if tree is None:
            self.own, self.succession = fragments_of(layout, call.world, call.rank)
        else:
            self.own, self.succession = fragments_of_tree(tree, call.world, call.rank)
        self.states: dict[tuple[int, ...], Tensor] = {}  # behind paths of fragments
        self.state = given.state
        self.width = 1 if given.decay else self.state[-2]
        dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        self.zeros = torch.zeros(self.state, dtype=dtype, device=tensors[0].device)

    def run(self) -> Tensor:
        _, before, continued = self.succession
        parts = [self.part(fragment) for fragment in self.own]
        runs = [self.alone(*of) for of in zip(parts, before, continued, strict=True)]
        outputs = [alone.output for alone in runs]
        if sum(self.succession.sizes):
            maps = [self.map(alone) for alone, others in zip(runs, continued, strict=True) if others]
            gathered = self.gathered(maps)
            for i, (part, alone) in enumerate(zip(parts, runs, strict=True)):
                if before[i]:
                    outputs[i] = self.behind(part, alone, self.folded(gathered, before[i]))
            result = self.joined(outputs)
            # A rank that uses no state of others takes part in the gradient's exchange.
            result = depending_on(result, [gathered])
        else:
            result = self.joined(outputs)
        return result.contiguous()

    def part(self, fragment: Fragment) -> list[Tensor]:
        """Return a fragment of each tensor."""
        return [x.narrow(self.seq, fragment.begin, fragment.size) for x in self.tensors]

    def joined(self, outputs: Sequence[Tensor | None]) -> Tensor:
        """Concatenate the outputs of all fragments."""
        listed = [output for output in outputs if output is not None]
        if not listed:
            # Peers with tokens exchange the gradients of all tensors.
            return depending_on(self.tensors[self.given.like], self.tensors)
        return torch.cat(listed, self.seq)

    def alone(self, part: Sequence[Tensor], before: Sequence[int], continued: bool) -> _Alone:
        """Compute what a fragment does without the state before it."""
        if not before:
            output, own = self.stepped(part, self.zeros)
            return _Alone(output, own)
        if self.given.values is not None:
            return self.widened(part, self.given.values)
        if not continued and self.given.correct is None:
            return _Alone()  # its output needs the state before it
        output, own = self.stepped(part, self.zeros)
        assert self.given.transition is not None
        return _Alone(output, own, self.given.transition(*part) if continued else None)

    def widened(self, part: Sequence[Tensor], values: int) -> _Alone:
        """Run fn with K more columns of values, 0, from the identity."""
        x, (width, columns) = part[values], self.state[-2:]
        identity = torch.eye(width, dtype=self.zeros.dtype, device=self.zeros.device)
        state = torch.cat([self.zeros, identity.expand(*self.state[:-1], width)], -1)
        wide = [*part]
        wide[values] = torch.cat([x, x.new_zeros(*x.shape[:-1], width)], -1)
        output, final = self.stepped(wide, state)
        if output.size(-1) != columns + width:
            expected = f"[..., {columns + width}], a column for each of values"
            raise self.call.error("the output of fn", f"of shape {list(output.shape)}", expected)
        sizes = [columns, width]
        (output, added), (own, transition) = output.split(sizes, -1), final.split(sizes, -1)
        return _Alone(output, own, transition, added)

    def behind(self, part: Sequence[Tensor], alone: _Alone, state: Tensor) -> Tensor:
        """Return a fragment's output, of the state before it."""
        if alone.output is not None and alone.added is not None:
            with no_autocast(self.zeros.device.type):
                # [B, T, H, K] by [B, H, K, V]
                added = alone.added.movedim(self.seq, -2).to(state.dtype) @ state
            added = added.movedim(-2, self.seq)
        elif alone.output is not None and self.given.correct is not None:
            added = self.given.correct(*part, state)
        else:
            return self.stepped(part, state)[0]
        return (alone.output + added).to(alone.output.dtype)

    def stepped(self, part: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Call fn, and check what it returns."""
        result = self.given.fn(*part, state)
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
        if final.shape != state.shape:
            raise self.call.error("the state of fn", f"of shape {list(final.shape)}", f"{list(state.shape)}")
        return output, final.to(self.zeros.dtype)

    def map(self, alone: _Alone) -> Tensor:
        """Return (M, S_own) of a fragment, [B, H, K, K or 1 + V]; zeros for an M that nobody needs."""
        shape, value, own = (*self.state[:-1], self.width), alone.transition, alone.own
        assert own is not None
        if value is None:
            return torch.cat([self.zeros.new_zeros(shape), own], -1)
        fits = value.dim() == len(shape) and all(
            size == most or (self.given.decay and size == 1)
            for size, most in zip(value.shape, shape, strict=True)
        )
        if not fits:
            found, expected = f"of shape {list(value.shape)}", f"{list(shape)}"
            raise self.call.error("the result of transition", found, expected)
        return torch.cat([value.to(own.dtype).expand(shape), own], -1)

    def gathered(self, maps: Sequence[Tensor]) -> Tensor:
        """Gather the maps of all fragments that are continued, along a dim in front."""
        width = self.width + self.state[-1]
        own = torch.stack(list(maps)) if maps else self.zeros.new_zeros(0, *self.state[:-1], width)
        # All ranks record the exchange alike.
        own = depending_on(own, self.tensors)
        sizes = self.succession.sizes
        gathered: Tensor = transpose_for(_NAME, False, own, self.layout.group, 0, sizes, None)
        return gathered

    def folded(self, gathered: Tensor, numbers: tuple[int, ...]) -> Tensor:
        """Return the state behind the fragments of these numbers, which are the first ones of a path."""
        state = self.zeros
        with no_autocast(self.zeros.device.type):
            for i, number in enumerate(numbers):
                path = numbers[: i + 1]  # Others begin with it, too.
                if path not in self.states:
                    before, own = gathered[number, ..., : self.width], gathered[number, ..., self.width :]
                    # The M of a first fragment is not gathered.
                    after = own if i == 0 else own + (before * state if self.given.decay else before @ state)
                    self.states[path] = after
                state = self.states[path]
        return state
