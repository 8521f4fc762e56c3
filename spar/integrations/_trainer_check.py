# SPDX-License-Identifier: Apache-2.0
"""Compare a Trainer's first step over the ranks with the same step in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._doctor.diagnose import kept, whole
from .._group.log import log
from .._model.model import states_of
from ._trainer import WHERE

_HALF = torch.bfloat16, torch.float16
_TOLERANCE, _TOLERANCE_OF_HALF = 1e-3, 0.1  # relative, of the largest element
_LEAST = 1e-3  # of the largest gradient: what is smaller, such as that of a bias of keys, may be rounding


def compare_with_one_process(trainer: Any, model: Any, step: Callable[[], Tensor]) -> None:
    """Raise if the loss or a gradient of a step differs from one process. Leaves no gradient.

    Collective over all ranks. Each runs the step again, whole. step: forward and backward; returns the loss.
    """
    states = states_of(model)
    _check_dropout(model)
    group = states[0].view.parts.group
    found: list[tuple[str, Tensor]] = []
    expected: list[tuple[str, Tensor]] = []
    for values, context in ((found, contextlib.nullcontext()), (expected, whole(states))):
        with kept(model, group), context:
            loss = step()
            trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            values += [("the loss", loss.clone()), *((name, _gradient(p)) for name, p in trained)]
    sizes = torch.stack([_sizes(x, y) for (_, x), (_, y) in zip(found, expected, strict=True)])
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    scales = sizes[:, 1].clone()
    scales[1:] = scales[1:].clamp(min=float(scales[1:].max()) * _LEAST)
    errors = (sizes[:, 0] / scales).nan_to_num(0.0, posinf=torch.inf)  # 0 / 0 is no difference
    worst = int(errors.argmax())
    name, error = found[worst][0].removeprefix("module."), float(errors[worst])
    is_half = trainer.args.bf16 or trainer.args.fp16 or any(p.dtype in _HALF for p in model.parameters())
    allowed = _TOLERANCE_OF_HALF if is_half else _TOLERANCE
    losses = f"the losses of this rank are {float(found[0][1]):.6g} and {float(expected[0][1]):.6g}"
    if not error < allowed:
        raise RuntimeError(
            f"{WHERE}: check is True, and the first step differs from one process, most in {name}: by "
            f"{error:.1e}, relative; allowed is {allowed:.0e}. {losses.capitalize()}. Find the first call "
            "that differs by spar.testing.diagnose, and report it"
        )
    log.info("%s: the first step agrees with one process within %.0e; %s", WHERE, error, losses)


def _check_dropout(model: Any) -> None:
    for state in states_of(model):
        config = getattr(state.model, "config", None)
        for name, value in (config.to_dict() if config is not None else {}).items():
            if "drop" in name and isinstance(value, float) and value > 0:
                raise ValueError(
                    f"{WHERE}: check is True, and the model's config has {name}={value}, with which "
                    "attention draws other numbers than in one process; expected 0 for this comparison"
                )


def _gradient(p: Tensor) -> Tensor:
    """Return a copy of this rank's part of a gradient; zero if there is none."""
    if p.grad is None:
        return torch.zeros((), device=p.device)
    own: Tensor = getattr(p.grad, "_local_tensor", p.grad)
    return own.detach().clone()


def _sizes(found: Tensor, expected: Tensor) -> Tensor:
    """Return the largest elements of a difference, and of what is expected."""
    difference = torch.where(found.isnan() & expected.isnan(), 0, found - expected)
    pair = [x.abs().max() if x.numel() else x.new_zeros(()) for x in (difference, expected.nan_to_num())]
    return torch.stack(pair).double().nan_to_num(torch.inf)
