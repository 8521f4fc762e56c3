# SPDX-License-Identifier: Apache-2.0
"""The dispatcher op of an exchange, which tracers see, and how they keep a graph's exchanges in order."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.compiler import is_dynamo_compiling

from .layouts import Args

library = torch.library.Library("spar", "DEF")
# or a tracer would run it on a constant input while tracing: ranks that trace at other times would hang
_TAGS = (torch.Tag.nondeterministic_seeded,)
# Of the ops that exchange, the last output is the number of the call, on the CPU. As `after` it keeps the
# order of a graph's exchanges (`chained`); as `forward` it is that of the call whose gradient this one moves.
_CHAIN = ", Tensor? after=None, Tensor? forward=None"


class OpCall(NamedTuple):
    """What the op of an exchange is given besides tensors and the group, as `Exchange` has it.

    world and rank are arguments: ranks share inductor's graph cache, and their shapes may differ.

    Attributes:
        args: flattened; None for those that are no ints.
        then: groups whose next exchange depends on this one: a failure is reported to them, too.
    """

    world: int
    rank: int
    op: str
    args: Sequence[int | None]
    factor: float
    divide: bool
    gradient: str
    note: str
    then: Sequence[int]

    def text(self) -> tuple[str, list[Any]]:
        """Return one text, and the args that are symbols: the dispatcher takes its time on each number."""
        fixed = [x if type(x) is int else None for x in self.args]
        return json.dumps(self._replace(args=fixed)), [x for x in self.args if type(x) is not int]


@functools.lru_cache(maxsize=4096)
def call_of(text: str) -> OpCall:
    """Return what a text says."""
    return OpCall(*json.loads(text))


def layouts_of(call: OpCall, sizes: Sequence[int]) -> tuple[Args, ...]:
    """Return the layouts of a call, with sizes in the place of its symbols."""
    rest = iter(sizes)
    return unflattened([next(rest) if x is None else x for x in call.args])


def implement(name: str, schema: str, kernel: Any, fake: Any) -> None:
    """Define an op that exchanges: what it runs, and what it returns for fake tensors.

    schema: its arguments, `{}` behind the last, and `-> Tensor[]`.
    """
    define_kernel(name, schema.format(_CHAIN), kernel, fake, _TAGS)
    # tracers then chain the exchanges of a graph by tokens: none is dropped, moved or repeated on one rank
    _register_effectful_op(getattr(torch.ops.spar, name).default, _EffectType.ORDERED)


def define_kernel(name: str, schema: str, kernel: Any, fake: Any, tags: Any = ()) -> None:
    """Define an op by its kernel for all devices, and by what it returns for fake tensors."""
    library.define(name + schema, tags=tags)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"spar::{name}", fake, lib=library)


def define(schema: str, function: Any) -> None:
    """Define an op that every tracer but Dynamo replaces by what the function does."""
    library.define(schema, tags=_TAGS)
    # functorch, too, must see the autograd Function in it, instead of an op on its tensors
    for key in ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode"):
        library.impl(schema[: schema.index("(")], function, key)


def flattened(args: Sequence[Args]) -> list[int]:
    """Return an op's args: for each tensor the count of its numbers, then those."""
    flat: list[int] = []
    for numbers in args:
        flat += (len(numbers), *numbers)
    return flat


def unflattened(flat: Sequence[int]) -> tuple[Args, ...]:
    args, at = [], 0
    while at < len(flat):
        end = at + 1 + flat[at]
        args.append(tuple(flat[at + 1 : end]))
        at = end
    return tuple(args)


def _tracer() -> Any:
    """Return the mode in which AOTAutograd traces; None outside of it."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)


def number_of_newest() -> torch.Tensor | int:
    """Return the number of the exchange that a tracer has just seen; 0 where it has none."""
    tracer = None if is_dynamo_compiling() else _tracer()
    return 0 if tracer is None else tracer._spar_exchange[1]


def chained(op: Any, *arguments: Any, forward: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Call an op that exchanges with an output of the exchange before it in the same graph.

    Its effect keeps an exchange in a graph, but inductor takes effects out of their order (torch 2.13, 2.14).
    The order of inputs and outputs it keeps.
    """
    tracer = _tracer()
    # torch begins another dict where it traces backward, which must not keep an output of forward
    tokens = getattr(tracer, "_tokens", None)
    of, after = getattr(tracer, "_spar_exchange", (None, None))
    outputs: list[torch.Tensor] = op(*arguments, after if of is tokens else None, forward)
    last = outputs.pop()
    if tracer is not None:
        tracer._spar_exchange = tokens, last
    return outputs


def chained_exchange(
    inputs: Sequence[torch.Tensor], group: int, *call: Any, forward: torch.Tensor | None = None
) -> list[torch.Tensor]:
    return chained(torch.ops.spar.exchange, inputs, group, *OpCall(*call).text(), forward=forward)


# what Dynamo sees: the tracer behind it chains the exchanges of its graph
define(
    "chained_exchange(Tensor[] inputs, int group, int world, int rank, str op, SymInt[] args, float factor,"
    " bool divide, str gradient, str note, int[] then) -> Tensor[]",
    chained_exchange,
)


def number_of_call(number: int) -> torch.Tensor:
    """Return the last output of an op that exchanges."""
    return torch.scalar_tensor(number, dtype=torch.int64, device="cpu")
