# SPDX-License-Identifier: Apache-2.0
"""Operations as single ops of torch.compile's graphs.

Dynamo interprets Python, which is slow, and an autograd Function, which is slower still. So it puts one op
into its graph for all that follows the checks of a call. The tracers behind it run the op's function, that of
eager code, and record the exchanges that it makes, and their gradients.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .._control.state import Place
from .._tracing import constant
from .autograd import apply
from .dispatch import define, flattened, unflattened
from .exchange import MOVE, Chain, Exchange, Tensors, in_steps
from .observers import must_record


@constant
def code() -> str:
    """Identify what the op does, for its arguments: torch keeps compiled graphs on disk by these."""
    return _digest()


@functools.cache
def _digest() -> str:
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join([file.read_bytes() for file in files])).hexdigest()


def _run(
    inputs: Tensors,
    name: str,
    places: Sequence[int],
    args: Sequence[int],
    factor: float,
    divide: bool,
    kind: int,
    records: bool,
    note: str,
    _code: str,
) -> list[torch.Tensor]:
    count, layouts = len(inputs), unflattened(args)
    steps = [
        (Place(*places[3 * i : 3 * i + 3]), layouts[count * i : count * (i + 1)])
        for i in range(len(places) // 3)
    ]
    return list(apply(in_steps(name, steps, (factor, divide), kind, records, note), inputs))


define(
    "run(Tensor[] inputs, str name, int[] places, SymInt[] args, float factor, bool divide, int kind,"
    " bool records, str note, str code) -> Tensor[]",
    _run,
)


def in_graph(exchange: Exchange | Chain, inputs: Tensors) -> Tensors:
    """Put one op into Dynamo's graph for an exchange or a chain, and its gradient if it is recorded."""
    exchanges = exchange.exchanges if isinstance(exchange, Chain) else (exchange,)
    first = exchanges[0]
    places: list[int] = []
    layouts: list[tuple[int, ...]] = []
    for step in exchanges:
        places += (step.group.handle, step.group.world, step.group.rank)
        layouts += step.args
    kind = first.kind if len(exchanges) == 1 else MOVE
    outputs: Tensors = torch.ops.spar.run(
        inputs,
        first.name,
        places,
        flattened(layouts),
        *first.grad_scale,
        kind,
        bool(first.gradient),
        first.note,
        code(),
    )
    return outputs


def run_decided(exchange: Exchange, inputs: Tensors) -> Tensors:
    """Run an exchange whose arguments were checked, without a factor; record it if an input needs a gradient.

    In a group of one rank the outputs are the inputs.
    """
    if exchange.group.world == 1:
        return inputs
    records = forward_ad._current_level >= 0 and must_record(inputs)
    for x in inputs:
        records = records or (x.requires_grad and torch.is_grad_enabled())
    if records:
        exchange = exchange.recorded()
    if is_dynamo_compiling():
        return in_graph(exchange, inputs)
    return apply(exchange, inputs) if records else exchange.run(inputs)
