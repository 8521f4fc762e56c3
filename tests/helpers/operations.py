# SPDX-License-Identifier: Apache-2.0
"""The public operations: the cases of `spar check`, and a table of those with lists, `out` and `async_op`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import spar
from spar._commands.check.run import make_setting
from spar._commands.check.trial import (
    NO_GRADIENT,
    Case,
    Expected,
    Setting,
    Trial,
    difference,
    expected_of,
    listed,
)
from spar._commands.ranks import Ranks


@dataclass(frozen=True)
class Direct:
    """An operation that takes lists, `out` and `async_op`.

    run: it, for a [B, S, H, ...], the group, each rank's size of S, and more arguments.
    whole: whether each rank's input has all of S.
    """

    run: Callable[..., Any]
    whole: bool = False

    def __call__(self, x: Any, group: dist.ProcessGroup, sizes: list[int], **more: Any) -> Any:
        """Run it on a tensor, or on a list of tensors that share the sizes."""
        return self.run(x, group, [sizes] * len(x) if isinstance(x, list) else sizes, **more)


DIRECT = {
    "all_to_all": Direct(
        lambda x, group, sizes, **more: spar.all_to_all(x, group, 2, 1, gather_sizes=sizes, **more)
    ),
    "all_gather": Direct(lambda x, group, sizes, **more: spar.all_gather(x, group, 1, sizes, **more)),
    "reduce_scatter": Direct(
        lambda x, group, sizes, **more: spar.reduce_scatter(x, group, 1, sizes, **more), whole=True
    ),
}


def setting_of_world() -> Setting:
    """Return the setting of all ranks, on CPU tensors. Collective."""
    store = dist.HashStore()  # not used: the outcomes stay on their ranks
    return make_setting(Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo", store))


def failures(
    case: Case, setting: Setting, context: Callable[[], Any] = contextlib.nullcontext
) -> Iterator[str]:
    """Run a case, forward and backward, within a context; yield what differs from the reference."""
    trial = case.make(setting)
    return failures_of(trial, expected_of(trial, setting), setting, context)


def failures_of(
    trial: Trial, expected: Expected, setting: Setting, context: Callable[[], Any]
) -> Iterator[str]:
    recorded = trial.gradient != NO_GRADIENT
    inputs = [x.detach().clone().requires_grad_(recorded) for x in trial.inputs[setting.rank]]
    try:
        with context():
            outputs = listed(trial.run(*inputs))
            gradients = torch.autograd.grad(outputs, inputs, expected.upper) if recorded else ()
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
        return
    if any(not torch.equal(x, before) for x, before in zip(inputs, trial.inputs[setting.rank], strict=True)):
        yield "an input was modified"
    for kind, ours, theirs in (
        ("output", outputs, expected.outputs),
        ("gradient", gradients, expected.gradients),
    ):
        for one, other in zip(ours, theirs, strict=True):
            if one.device != other.device:
                yield f"{kind} on {one.device}"
            elif text := difference(one, other, trial.tolerance):
                yield f"{kind}: {text}"
