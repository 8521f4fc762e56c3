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
from typing import Any

import torch

from .._group.member import Place
from .._tracing import constant
from .exchange import (
    ONE,
    UNRECORDED,
    Scale,
    Step,
    Tensors,
    define,
    flattened,
    recorded,
    run_steps,
    unflattened,
)


@constant
def code() -> str:
    """Identify what the ops do, for their arguments: torch keeps compiled graphs on disk by these."""
    return _digest()


@functools.cache
def _digest() -> str:
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join([file.read_bytes() for file in files])).hexdigest()


def _run_steps(
    inputs: Tensors,
    name: str,
    places: Sequence[int],
    args: Sequence[int],
    factor: float,
    divide: bool,
    records: bool,
    note: str,
    _code: str,
) -> list[torch.Tensor]:
    count, layouts = len(inputs), unflattened(args)
    steps = tuple(
        (Place(*places[3 * i : 3 * i + 3]), layouts[count * i : count * (i + 1)])
        for i in range(len(places) // 3)
    )
    if records:
        return list(recorded(inputs, name, steps, ONE, (factor, divide), None, note))
    return list(run_steps(inputs, name, steps, ONE, UNRECORDED, None, note))


define(
    "run_steps(Tensor[] inputs, str name, int[] places, SymInt[] args, float factor, bool divide,"
    " bool records, str note, str code) -> Tensor[]",
    _run_steps,
)


def steps_in_graph(
    inputs: Tensors, name: str, steps: tuple[Step, ...], grad_scale: Scale, records: bool, note: str
) -> Tensors:
    """Put one op into Dynamo's graph for all exchanges of a call, and their gradient if it is recorded."""
    places: tuple[int, ...] = ()
    layouts: tuple[Any, ...] = ()
    for place, args in steps:
        places += place
        layouts += args
    outputs: Tensors = torch.ops.spar.run_steps(
        inputs, name, places, flattened(layouts), *grad_scale, records, note, code()
    )
    return outputs
