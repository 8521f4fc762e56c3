"""One exchange of several tensors, or a gather or a sum of shards, and its transpose.

A sum of shards is an exchange of layouts as well: with a dim in front for the rank that holds a summand,
shards by that dim become shards of the scattered one. This rank then adds the rows that it received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from .._group.communicator import Communicator
from .._group.member import Place
from .._transports.channel import Operation
from .._transports.dtypes import add_rows
from .exchange import (
    GATHERED,
    ONE,
    RECORDED,
    SUMMED,
    UNRECORDED,
    Number,
    Tensors,
    is_any_traced,
    run_eager,
    run_steps,
)
from .layouts import WHOLE, Args, Layout, even, moved, out_shape, pair, swapped


class Move(NamedTuple):
    """What all ranks do with their inputs, and what carries the gradients back.

    Attributes:
        args: the layouts of each tensor; with `sums`, of the input with a dim in front.
        shards: of a gather or a sum: which part of the whole tensor each rank holds. Else empty.
        sums: whether each rank adds the ranks' parts of its shard.
        note: as in Operation.
    """

    name: str
    place: Place
    args: tuple[Args, ...]
    shards: tuple[Layout, ...] = ()
    sums: bool = False
    note: str = ""

    @classmethod
    def of_shards(cls, name: str, place: Place, shards: Sequence[Layout], sums: bool, note: str = "") -> Move:
        """Gather shards, or sum and scatter; the transpose of each is the other."""
        if sums:
            args = tuple([pair(even(0, place.world), moved(shard)) for shard in shards])
        else:
            args = tuple([pair(shard, WHOLE) for shard in shards])
        return cls(name, place, args, tuple(shards), sums, note)

    def turned(self) -> Move:
        """Return the transpose, which carries gradients back."""
        name = self.name if self.name.startswith("backward of ") else f"backward of {self.name}"
        if self.shards:
            return Move.of_shards(name, self.place, self.shards, not self.sums)
        return Move(name, self.place, tuple([swapped(args) for args in self.args]))

    def operands(self, inputs: Tensors) -> Tensors:
        """Return what is exchanged."""
        return [x.unsqueeze(0) for x in inputs] if self.sums else inputs

    def shapes(self, inputs: Tensors) -> list[list[int]]:
        """Return the shape of each output."""
        _, world, rank = self.place
        operands = zip(self.operands(inputs), self.args, strict=True)
        return [out_shape(x.shape, args, world, rank)[self.sums :] for x, args in operands]

    def operation(self, records: bool) -> Operation:
        """Return what all ranks must agree on.

        records: whether autograd records the exchange; else it would match one whose backward differs.
        """
        return Operation(self.name, self.args, *ONE, self._gradient(records), self.sums, self.note)

    def _gradient(self, records: bool) -> str:
        return UNRECORDED if not records else GATHERED if self.sums else SUMMED if self.shards else RECORDED

    def run(self, inputs: Tensors, records: bool = False, forward: Number = 0) -> Tensors:
        """Return new outputs. forward: as in `Channel.exchange`."""
        operands = self.operands(inputs)
        if self.sums and not inputs[0].is_meta and not is_any_traced(inputs):
            operation = self.operation(records)
            return run_eager(operands, self.place, operation, (), cast(int, forward))  # the transport adds
        steps = ((self.place, self.args),)
        gradient = self._gradient(records)
        parts = run_steps(operands, self.name, steps, ONE, gradient, None, self.note, (forward,))
        return [add_rows(part) for part in parts] if self.sums else parts

    def write(
        self,
        comm: Communicator,
        inputs: Tensors,
        outs: list[torch.Tensor],
        records: bool = False,
        queued: bool = False,
        forward: int = 0,
    ) -> None:
        """Write the outputs to plain tensors."""
        comm.exchange(self.operation(records), self.operands(inputs), outs, queued, forward)
