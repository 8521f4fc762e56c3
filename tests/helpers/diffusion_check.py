# SPDX-License-Identifier: Apache-2.0
"""A tiny model of each transformer class of diffusers, sharded over ranks and beside one process."""

from __future__ import annotations

import contextlib
import inspect
import warnings
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spar import parallelize, unparallelize
from spar._model.report import Report

from .averages import gradients
from .compiled_blocks import compile_each_block, graphs_of
from .diffusion_case import Case, Draw, Inputs
from .diffusion_images import IMAGES
from .diffusion_sequences import SEQUENCES
from .diffusion_videos import VIDEOS

CASES: dict[str, Case] = dict(sorted((IMAGES | VIDEOS | SEQUENCES).items()))


class Outcome(NamedTuple):
    """How a class's sharded model compares with one process.

    Attributes:
        verdict: "right", or "not sharded", "differs", "refused" or "error", with what is wrong.
        error: of the outputs and gradients, of the largest element of each.
        share: the multiply-adds of this rank inside blocks.
        whole: the functions that ran whole, with their lines in diffusers.
        compiled: of the blocks, by aot_eager: "yes", or "partly: " or "no: " and why they run eagerly.
    """

    name: str
    verdict: str
    error: float = 0.0
    share: float = 1.0
    whole: tuple[str, ...] = ()
    compiled: str = ""


def classes() -> set[str]:
    """Return the names of diffusers' transformer models."""
    import diffusers.models.transformers as transformers

    return {
        name
        for name, value in vars(transformers).items()
        if inspect.isclass(value) and issubclass(value, nn.Module) and hasattr(value, "from_pretrained")
    }


def made(name: str, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a class's tiny model with random values in all parameters, also those that begin as zeros.

    dtype: of its parameters, instead of the case's.
    """
    import diffusers.models.transformers as transformers

    case, draw = CASES[name], Draw(1)
    model: nn.Module = getattr(transformers, name.split()[0])(**case.config).to(dtype or case.dtype)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = max(1, parameter.shape[1:].numel()) ** -0.5 if parameter.dim() > 1 else 0.2
            parameter.copy_(draw(*parameter.shape) * spread + float("norm" in key and parameter.dim() == 1))
    return model


def inputs_of(name: str, like: Tensor) -> Inputs:
    """Return the arguments of a class's forward, in the dtype and on the device of a parameter."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.to(like.device)
            return value.to(like.dtype) if value.dtype == torch.float64 else value
        if isinstance(value, dict):
            return {key: cast(each) for key, each in value.items()}
        return type(value)(map(cast, value)) if isinstance(value, (list, tuple)) else value

    inputs: Inputs = cast(CASES[name].inputs(Draw(zlib.crc32(name.encode()))))
    return inputs


def outputs(value: Any) -> list[Tensor]:
    """Return the floating tensors of a model's output."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    return [x for each in value for x in outputs(each)] if isinstance(value, (list, tuple)) else []


def trained(model: nn.Module, name: str, average: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the outputs, and the gradients of all parameters, averaged over a group."""
    model.zero_grad()
    torch.manual_seed(3)  # some classes draw which conditions they drop in training
    with torch.set_grad_enabled(CASES[name].has_backward):
        found = outputs(model(**inputs_of(name, next(model.parameters()))))
    if not CASES[name].has_backward:
        return found
    draw = Draw(2)
    sum((x * draw(*x.shape).to(x.device)).sum() for x in found).backward()  # type: ignore[union-attr]
    return [*[x.detach() for x in found], *gradients(model, average)]


def check_classes(
    rank: int, world: int, group: dist.ProcessGroup, names: Sequence[str], compiled: bool = False
) -> list[Outcome]:
    found = []
    for name in names:
        with in_double() if CASES[name].in_double else contextlib.nullcontext():
            found.append(check_class(group, name, compiled))
    return found


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Convert to float64 where classes convert to fewer bits, whose rounding would hide errors."""
    own, short = Tensor.to, (torch.float32, torch.bfloat16)

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple([torch.float64 if each in short else each for each in args])
        kwargs = {key: torch.float64 if each in short else each for key, each in kwargs.items()}
        return own(self, *args, **kwargs)

    with mock.patch.object(Tensor, "to", to), mock.patch.object(Tensor, "float", Tensor.double):
        yield


def tolerance(name: str) -> float:
    return 1e-10 if CASES[name].in_double else 1e-5


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return the largest error, of the largest element or of 0.01."""
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().max()) / max(0.01, float(expected.abs().max()))


def difference(model: nn.Module, name: str, found: list[Tensor], expected: list[Tensor]) -> tuple[float, str]:
    """Return the largest error of what `trained` returned, of the largest element, and where it is."""
    worst, where = 0.0, ""
    names = [f"output {i}" for i in range(len(found))]
    if CASES[name].has_backward:
        parameters = [key for key, _ in model.named_parameters()]
        names[-len(parameters) :] = parameters
    for key, x, y in zip(names, found, expected, strict=True):
        error = error_of(x, y)
        if not error <= worst:
            worst, where = error, key
    return worst, where


def _compiled(
    model: nn.Module, name: str, report: Report, expected: list[Tensor], group: dist.ProcessGroup
) -> str:
    """Run a sharded model with its blocks compiled, twice; return how that went."""
    torch._dynamo.reset()
    compile_each_block(model)
    try:
        for _ in range(2):
            error, where = difference(model, name, trained(model, name, group), expected)
            if not error <= tolerance(name):
                return f"differs: {where} by {error:.1e}"
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
    if not report.eager:
        return "yes"
    return f"{'partly' if graphs_of(model) else 'no'}: " + "; ".join(map(str, report.eager))


def check_class(group: dist.ProcessGroup, name: str, compiled: bool) -> Outcome:
    """Compare a class's tiny model on the ranks of a group with the same model in one process.

    compiled: whether to do so also with its blocks compiled.
    """
    model = made(name)
    expected = trained(model, name)
    assert all(x.isfinite().all() for x in expected), name
    used = sum(bool(x.any()) for x in expected)
    assert used > 0.3 * len(expected), name  # some classes have parameters that no output uses
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            report = parallelize(model, group)
        except ValueError as error:
            return Outcome(name, f"refused: {error}")
        try:
            found = trained(model, name, group)
        except Exception as error:
            return Outcome(name, f"error: {type(error).__name__}: {error}")
    verdict = _compiled(model, name, report, expected, group) if compiled else ""
    unparallelize(model)
    whole = tuple(
        f"`{each.function}@{each.place}`" if each.in_block else f"(`{each.function}@{each.place}`)"
        for each in report.functions
    )
    worst, where = difference(model, name, found, expected)
    outcome = Outcome(name, "right", worst, report.share, whole, verdict)
    if not worst <= tolerance(name):
        return outcome._replace(verdict=f"differs: {where} by {worst:.1e}")
    return outcome._replace(verdict="not sharded") if report.share == 1 else outcome
