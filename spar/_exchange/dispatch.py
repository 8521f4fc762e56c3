# SPDX-License-Identifier: Apache-2.0
"""The dispatcher op of an exchange, which tracers see, and how they keep a graph's exchanges in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.compiler import is_dynamo_compiling

from .layouts import Args

library = torch.library.Library("spar", "DEF")
# world and rank are arguments: ranks share inductor's graph cache, and their shapes may differ
SCHEMA = (
    "(Tensor[] inputs, int group, int world, int rank, str op, SymInt[] args, float factor,"
    " bool divide, str gradient, str note, int[] then{}) -> Tensor[]"
)
# or a tracer would run it on a constant input while tracing: ranks that trace at other times would hang
_TAGS = (torch.Tag.nondeterministic_seeded,)
# Of the ops that exchange, the last output is the number of the call, on the CPU. As `after` it keeps the
# order of a graph's exchanges (`chained`); as `forward` it is that of the call whose gradient this one moves.
_CHAIN = ", Tensor? after=None, Tensor? forward=None"


def implement(name: str, schema: str, kernel: Any, fake: Any) -> None:
    """Define an op that exchanges: what it runs, and what it returns for fake tensors.

    schema: its arguments, `{}` behind the last, and `-> Tensor[]`.
    """
    library.define(name + schema.format(_CHAIN), tags=_TAGS)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"spar::{name}", fake, lib=library)
    # tracers then chain the exchanges of a graph by tokens: none is dropped, moved or repeated on one rank
    _register_effectful_op(getattr(torch.ops.spar, name).default, _EffectType.ORDERED)


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


def chained_exchange(*arguments: Any, forward: torch.Tensor | None = None) -> list[torch.Tensor]:
    return chained(torch.ops.spar.exchange, *arguments, forward=forward)


# what Dynamo sees: the tracer behind it chains the exchanges of its graph
define("chained_exchange" + SCHEMA.format(""), chained_exchange)
