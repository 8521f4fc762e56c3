# SPDX-License-Identifier: Apache-2.0
"""Run a step of a sharded model over the ranks and in one process, and find where the two first differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._group.group import MOST_EXCHANGES
from .._group.registry import group_of
from .._model.generators import others_restored
from .._model.model import states_of
from ..random import preserved
from .difference import Difference, first_difference
from .trace import Trace

_NAME = "testing.diagnose"


def diagnose(model: torch.nn.Module, step: Callable[[], Any], *, show: bool = True) -> Difference | None:
    """Run a step of a sharded model over the ranks and in one process; return where they first differ.

    Collective. It calls step twice: over the ranks, as `parallelize` has it, and whole on each rank. It
    compares what each torch function reads and returns, and then the gradients of that and of parameters:
    backward begins from the loss that step returns, or from all its outputs with random gradients. Torch's
    and Python's generators, buffers and gradients are as before at the end. Use a batch that one rank's
    memory holds, in float32 or float64, without dropout in attention.

    Args:
        model: the model that is sharded, or one that contains it, such as DDP.
        step: calls the model, and returns a loss, or an output with `loss` as a key or an attribute or at
            the first place, or other outputs. It may compute the loss itself. It must not call `backward`,
            and has to do the same in each call: it must not change its inputs.
        show: whether rank 0 of the group prints the result.

    Returns:
        The first difference, equal on all ranks; None if there is none.

    Raises:
        ValueError: no module of the model is sharded, or the ranks' inputs differ.
    """
    states = states_of(model)
    if not states:
        raise ValueError(
            f"{_NAME}: no module of {type(model).__name__} is parallelized; call parallelize first"
        )
    parts = states[0].view.parts
    with group_of(parts.group).call(_NAME, MOST_EXCHANGES):
        sharded = Trace(model)
        error = None
        with kept(model, parts.group):
            try:
                sharded.run(step, states)
            # An error is a difference, unless one process raises it, too.
            except Exception as raised:
                error = raised
        alone = Trace(model, sharded)
        with kept(model, parts.group), whole(states):
            alone.run(step, states)
        found = first_difference(sharded, alone, parts.group, parts.world, error)
    if show and parts.rank == 0:
        print(found or f"{_NAME}: {len(alone.entries)} tensors agree with one process", flush=True)
    return found


@contextlib.contextmanager
def whole(states: list[Any]) -> Iterator[None]:
    """Let sharded models run as in one process."""
    for state in states:
        state.is_whole = True
    try:
        yield
    finally:
        for state in states:
            state.is_whole = False


@contextlib.contextmanager
def kept(model: torch.nn.Module, group: Any) -> Iterator[None]:
    """Restore at the end what a step changes: generators, buffers and gradients, of which there are none."""
    buffers = [(x, x.clone()) for x in model.buffers()]
    gradients = [(p, p.grad) for p in model.parameters()]
    for p, _ in gradients:
        p.grad = None
    try:
        with preserved(group), others_restored():
            yield
    finally:
        with torch.no_grad():
            for x, before in buffers:
                x.copy_(before)
        for p, gradient in gradients:
            p.grad = gradient
