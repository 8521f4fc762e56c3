# SPDX-License-Identifier: Apache-2.0
"""One check: spar's call on this rank, and the same in plain torch for all ranks, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel_state import ParallelState, Topology

Tensors = list[Tensor]

SUMMED, OWN, NO_GRADIENT = "summed", "own", "none"


@dataclass(frozen=True)
class Setting:
    """Where the checks run. `state`: ring x ulysses over all ranks, in `topology`."""

    rank: int
    world: int
    device: torch.device
    group: dist.ProcessGroup
    topology: Topology
    state: ParallelState
    ring: int
    ulysses: int


@dataclass(frozen=True)
class Trial:
    """A call, and what it must return.

    Attributes:
        inputs: the inputs of each rank. A tensor that all ranks hold is the same object for each.
        run: spar's call, of this rank's inputs; returns its outputs.
        reference: the outputs of each rank, from the inputs of each, in plain torch.
        gradient: what the gradient of an input is. SUMMED: of the sum of all ranks' losses; OWN: of this
            rank's loss; NO_GRADIENT: not checked.
        scale: what the operation does to the gradient besides, by the number of ranks.
        tolerance: relative to the largest expected element; 0: equal.
    """

    inputs: Sequence[Tensors]
    run: Callable[..., Any]
    reference: Callable[[list[Tensors]], list[Tensors]]
    gradient: str = SUMMED
    scale: Callable[[Any, int], Any] | None = None
    tolerance: float = 0.0


class Expected(NamedTuple):
    """What this rank's call must return, the gradients of its outputs, and those of its inputs."""

    outputs: Tensors
    upper: Tensors
    gradients: Tensors


@dataclass(frozen=True)
class Case:
    """A check of a public operation. `make` builds it only when it runs: tensors may be large."""

    operation: str
    variant: str
    make: Callable[[Setting], Trial]

    @property
    def name(self) -> str:
        return f"{self.operation} ({self.variant})" if self.variant else self.operation


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return small ints as floats, the same on all ranks: sums of them are exact in any order."""
    generator = torch.Generator().manual_seed(1 + seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def expected_of(trial: Trial, setting: Setting) -> Expected:
    """Compute this rank's expected outputs and gradients, with the inputs of all ranks, on the CPU."""
    leaves: dict[int, Tensor] = {}  # by the id of the input: one leaf for what all ranks hold
    copies = [[leaves.setdefault(id(x), x.detach().clone()) for x in tensors] for tensors in trial.inputs]
    for leaf in leaves.values():
        leaf.requires_grad_(trial.gradient != NO_GRADIENT)
    outputs = trial.reference(copies)
    upper = [
        [numbers(*y.shape, seed=1000 + 10 * rank + at, dtype=y.dtype) for at, y in enumerate(ys)]
        for rank, ys in enumerate(outputs)
    ]
    local = outputs[setting.rank]
    if trial.gradient == NO_GRADIENT:
        return Expected(local, [], [])
    counted = range(setting.world) if trial.gradient == SUMMED else [setting.rank]
    ys, gs = ([x for rank in counted for x in tensors[rank]] for tensors in (outputs, upper))
    gradients = torch.autograd.grad(ys, copies[setting.rank], gs, materialize_grads=True)
    if trial.scale is not None:
        gradients = tuple(trial.scale(g, setting.world) for g in gradients)
    return Expected([y.detach() for y in local], upper[setting.rank], list(gradients))


def listed(outputs: Any) -> Tensors:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def difference(actual: Tensor, expected: Tensor, tolerance: float) -> str:
    """Describe how a tensor differs from the expected one; "" if it does not."""
    actual = actual.detach().cpu()
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"{actual.dtype} {list(actual.shape)}; expected {expected.dtype} {list(expected.shape)}"
    if not actual.numel() or torch.equal(actual, expected):
        return ""
    wide = torch.float64
    apart = (actual.to(wide) - expected.to(wide)).abs().nan_to_num(torch.inf)
    wrong = apart > tolerance * max(1.0, float(expected.to(wide).abs().max()))
    if not bool(wrong.any()):
        return ""
    place = wrong.nonzero()[0].tolist()
    got, want = (float(x[tuple(place)]) for x in (actual, expected))
    return (
        f"element {place} is {got:.6g}; expected {want:.6g}; {int(wrong.sum())} of {actual.numel()} elements "
        f"differ, by up to {float(apart.max()):.3g}"
    )
