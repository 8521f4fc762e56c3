# SPDX-License-Identifier: Apache-2.0
"""Each type of transformers under `spar.parallelize` on 2 ranks, compared with one process."""

from __future__ import annotations

import contextlib
import math
import random
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import Ranks
from torch import Tensor, nn

import spar

from .averages import averaged
from .compiled_blocks import compile_each_block, graphs_of
from .transformers_types import PADDING, Unbuilt, batch, build, configs

TOLERANCE, WORLD, LIMIT = 1e-4, 2, 180
Group = dist.ProcessGroup


class Outcome(NamedTuple):
    """What a type did.

    Attributes:
        result: "right", "wrong", "refused", "crash", or "none" if one process fails.
        note: the error, or which value is wrong.
        error: the largest relative error of the loss, outputs and gradients.
        share: of a rank's multiply-adds in blocks.
        whole: the functions that ran whole in blocks, and where.
        compiled: whether compiled blocks are right: "yes", "partly: " or "no: " and why some run eagerly, or
            what is wrong; None for other tasks.
        dtype: of the weights.
    """

    result: str
    note: str = ""
    error: float = 0.0
    share: float = 1.0
    whole: tuple[str, ...] = ()
    compiled: str | None = None
    dtype: str = ""


class Result(NamedTuple):
    loss: Tensor
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def run(model: nn.Module, inputs: dict[str, Tensor]) -> Result:
    model.zero_grad()
    torch.manual_seed(1)
    random.seed(1)  # layers may be dropped
    out = model(**inputs)
    out.loss.backward()
    values = {k: v.detach() for k, v in out.items() if isinstance(v, Tensor) and v.is_floating_point()}
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Result(out.loss.detach(), values, gradients)


def reference(task: str, kind: str) -> tuple[nn.Module, dict[str, Tensor], Result]:
    """Return a model, its batch and what one process computes: in float64, or else in float32."""
    failed: Exception | None = None
    for config in configs(task, kind):
        for dtype in (torch.float64, torch.float32):
            try:
                if isinstance(config, Exception):
                    raise config
                model = build(task, config, kind).to(dtype)
                inputs = batch(task, kind, model)
                found = run(model, inputs)
                if not all(x.isfinite().all() for x in (found.loss, *found.gradients.values())):
                    raise Unbuilt("the loss or a gradient is not finite")
                return model, inputs, found
            except Exception as error:
                failed = failed or error
    assert failed is not None
    raise Unbuilt(_told(failed)) from failed


def differences(got: Result, expected: Result) -> Iterator[tuple[str, float]]:
    """Yield relative errors, by the largest element; of gradients of 0, by the largest gradient."""
    largest = max((float(g.abs().max()) for g in expected.gradients.values() if g.numel()), default=1.0)
    yield "loss", _error(got.loss, expected.loss, 1e-9)
    for name, x in expected.outputs.items():
        y = got.outputs.get(name)
        yield name, float("inf") if y is None or y.shape != x.shape else _error(y, x, 1e-9)
    for name, x in expected.gradients.items():
        yield f"gradient of {name}", _error(got.gradients[name], x, 1e-3 * largest)


def _error(x: Tensor, expected: Tensor, least: float) -> float:
    if x.numel() == 0:
        return 0.0
    x, expected = x.double(), expected.double()
    both = x.isfinite() & expected.isfinite()  # masks have -inf
    if not (x[~both].nan_to_num(7.0) == expected[~both].nan_to_num(7.0)).all():
        return float("inf")
    if not both.any():
        return 0.0
    return float((x - expected)[both].abs().max() / expected[both].abs().max().clamp(min=least))


def mean_over_ranks(model: nn.Module, names: Any, group: Group) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    found = [parameters[name] for name in names]
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in found]
    return dict(zip(names, averaged(found, group), strict=True))


def compare(rank: int, world: int, group: Group, task: str, kind: str, compiled: str = "") -> Outcome:
    """Run a type on these ranks, and beside them in this process.

    compiled: also with compiled "blocks", or as a compiled "model".
    """
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        model, inputs, expected = reference(task, kind)
        again = max(error for _, error in differences(run(model, inputs), expected))
        others = other_values(inputs)
        expected_others = run(model, others)
        if again > TOLERANCE:
            raise Unbuilt(f"two runs differ by {again:.0e}")
    except Exception as error:
        return Outcome("none", _told(error))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    try:
        report = spar.parallelize(model, group)
        got = run(model, inputs)
        got = got._replace(gradients=mean_over_ranks(model, expected.gradients, group))
    except Exception as error:
        return Outcome("refused" if is_refusal(error) else "crash", _told(error), dtype=dtype)
    places = [f"{each.function} at {each.place}" for each in report.functions if each.in_block]
    errors = sorted(differences(got, expected), key=_order, reverse=True)
    error = errors[0][1]
    result = "right" if error <= TOLERANCE else "wrong"
    note = "" if result == "right" else ", ".join(f"{name} {each:.0e}" for name, each in errors[:3])
    verdict = None
    if compiled:
        runs = [(inputs, expected), (others, expected_others), (inputs, expected)]
        verdict = compiles(model, report, runs, group, whole=compiled == "model")
    spar.unparallelize(model)
    for module in model.modules():
        module._compiled_call_impl = None
    return Outcome(result, note, error, report.share, tuple(places), verdict, dtype)


def _order(difference: tuple[str, float]) -> float:
    error = difference[1]
    return float("inf") if math.isnan(error) else error


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, Unbuilt) else f"{type(error).__name__}: {error}"


def is_refusal(error: Exception) -> bool:
    """Whether spar says that it cannot run a model."""
    text = str(error)
    return text.startswith("parallelize: ") or (isinstance(error, RuntimeError) and " on rank " in text)


def other_values(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch with the same padding, whose rows have their tokens in another order."""
    names, made = ("input_ids", "decoder_input_ids", "labels"), {}
    for name, x in inputs.items():
        made[name] = x.clone()
        for row in made[name] if name in names and x.dim() == 2 else ():
            kept = (row > PADDING).nonzero()[:, 0]
            row[kept] = row[kept.flip(0)]
    return made


def compiles(
    model: Any, report: Any, runs: Any, group: Group, backend: str = "aot_eager", whole: bool = False
) -> str:
    """Run a compiled model: each batch, and what one process computes of it.

    whole: whether the model is compiled, not its blocks; then "one graph", or why it is compiled by block.
    """
    torch._dynamo.reset()
    with contextlib.suppress(Exception):  # a loop over experts is none that a graph can have
        model.set_experts_implementation("batched_mm")
    if whole:
        model.compile(backend=backend)
    else:
        compile_each_block(model, backend)
    try:
        for inputs, expected in runs:
            got = run(model, inputs)
            got = got._replace(gradients=mean_over_ranks(model, expected.gradients, group))
            name, error = max(differences(got, expected), key=_order)
            if not error <= TOLERANCE:
                return f"wrong: {name} {error:.0e}"
    except Exception as error:
        # Of some kernels' gradients torch knows other strides than they have: softplus, in torch 2.13.
        if backend == "aot_eager" and "view size is not compatible" in str(error):
            return compiles(model, report, runs, group, "inductor", whole)
        return f"crash: {_told(error)}"
    if whole:
        return "; ".join(report.why_by_block) or "one graph"
    if not report.eager:
        return "yes"
    return f"{'partly' if graphs_of(model) else 'no'}: " + "; ".join(map(str, report.eager))


def run_type(pool: Ranks, task: str, kind: str) -> Outcome:
    """Compare a type; fresh ranks follow a failure, after which their calls may no longer match."""
    try:
        outcomes = [
            Outcome(*each)
            for each in pool(WORLD, compare, task, kind, "blocks" if task == "causal" else "", timeout=LIMIT)
        ]
    except pytest.fail.Exception as failure:
        pool.stop()
        return Outcome("crash", f"{failure}")
    found = next((each for each in outcomes if each.result not in ("right", "none")), outcomes[0])
    found = next((each for each in outcomes if each.compiled not in ("yes", found.compiled)), found)
    if found.result in ("refused", "crash") or any("crash: " in (each.compiled or "") for each in outcomes):
        pool.stop()
    return found
