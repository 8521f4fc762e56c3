# SPDX-License-Identifier: Apache-2.0
"""spar.integrations.diffusers: each misuse ends in an error on every rank, and leaves the group usable."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Ranks
from helpers.diffusion import (
    PRELOAD as PRELOAD,
    Group,
    Inputs,
    compare,
    parallelize,
    trained,
    unparallelize,
    wan,
    wan_inputs,
)
from torch import nn

import spar
from spar.integrations._diffusers import names

pytestmark = pytest.mark.one_transport


def refused(
    kind: type[BaseException], parts: str, function: Callable[..., Any], *args: Any, **kw: Any
) -> None:
    """Check that a call raises, with each part of the message, which "..." separates."""
    with pytest.raises(kind) as info:
        function(*args, **kw)
    for part in parts.split("..."):
        assert part in str(info.value), str(info.value)


# ---- enable and unparallelize, which communicate nothing ----


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def check_arguments(rank: int, world: int, group: Group) -> None:
    model = wan()
    compiled = torch.compile(model)  # it sets an attribute of models of diffusers
    before = {name: {*vars(module)} for name, module in model.named_modules()}
    refuse = partial(refused, ValueError)
    refused(TypeError, "model is 3; expected a torch.nn.Module", parallelize, 3, group)
    pipe = SimpleNamespace(transformer=model, text_encoder=Other())
    message = "model is a SimpleNamespace; expected a model in it: pass pipe.transformer"
    refused(TypeError, message, parallelize, pipe, group)
    refuse("Other has no ModuleList of blocks", parallelize, Other(), group)
    refuse("method is 'rings'; expected ...gather", parallelize, model, method="rings")
    refuse("is not parallelized", unparallelize, model)
    wrapper = nn.parallel.DistributedDataParallel(model, process_group=group)
    refuse("is not parallelized", unparallelize, wrapper)
    message = "model is a DistributedDataParallel; expected what it wraps: model.module"
    refuse(message, parallelize, wrapper, group)
    refuse("expected what it wraps: model._orig_mod", parallelize, compiled, group)
    model._parallel_config = object()
    refuse("enable_parallelism", parallelize, model, group)
    del model._parallel_config
    assert before == {name: {*vars(module)} for name, module in model.named_modules()}
    parallelize(model, group)
    refuse("parallelized already; call unparallelize", parallelize, model, group)
    forward = model.forward
    model.forward = lambda **inputs: forward(**inputs)
    refuse("forward...was replaced", unparallelize, model)
    model.forward = forward
    unparallelize(model)


def test_arguments_are_checked(ranks: Ranks) -> None:
    ranks(1, check_arguments)


@pytest.mark.parametrize(
    "name",
    [
        f"{module}.{name}"
        for module, found in names.REQUIRED.items()
        for name in found
        if name != "__version__"
    ],
)
def test_a_missing_name_of_diffusers_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = max((m for m in names.REQUIRED if name.startswith(f"{m}.")), key=len)
    *path, last = name.removeprefix(f"{module}.").split(".")
    holder: Any = importlib.import_module(module)
    for step in path:
        holder = getattr(holder, step)
    monkeypatch.delattr(holder, last)
    refused(ImportError, f"needs {name}, which diffusers 0.42.1 lacks; it is tested with", parallelize, wan())


# ---- forward ----


def changed(name: str, value: Any) -> Callable[[Inputs], Inputs]:
    return lambda inputs: inputs | {name: value}


def check_one_rank(rank: int, world: int, group: Group) -> None:
    """One rank has other inputs, or fails: all raise at once, and go on with the next call."""
    model = wan()
    expected = trained(model, wan_inputs())
    parallelize(model, group)
    model(**wan_inputs())
    for change in (
        lambda inputs: wan_inputs((5, 2, 8)),  # other tokens
        changed("encoder_hidden_states", torch.zeros(2, 7, 9)),  # of no use to the model
        changed("timestep", "now"),
        lambda inputs: inputs | {"unknown": 1},
    ):
        inputs = wan_inputs()
        with pytest.raises(Exception) as info:
            model(**(change(inputs) if rank == 1 else inputs))
        if rank != 1:
            assert isinstance(info.value, (spar.MismatchError, ValueError)), info.value
            assert "rank 1" in str(info.value), info.value
        compare(trained(model, wan_inputs(), group), expected, model)


def test_a_failure_of_one_rank_is_raised_on_all(ranks: Ranks) -> None:
    ranks(3, check_one_rank, timeout=60)


def check_unequal(rank: int, world: int, group: Group) -> None:
    """Each forward compares the inputs of the ranks."""

    def attempt(message: str, **other: Any) -> None:
        model = wan()
        parallelize(model, group)
        inputs = wan_inputs() | (other if rank == 2 else {})
        refused(ValueError, f"{message}...on all ranks", model, **inputs)
        model(**wan_inputs())

    attempt("hidden_states is another value on rank 2", hidden_states=torch.randn(2, 4, 5, 2, 10))
    attempt("timestep is another value on rank 2", timestep=torch.tensor([50, 151]))
    shape = "hidden_states of shape [2, 4, 5, 2, 12], torch.float32 on cpu on rank 2"
    attempt(shape, hidden_states=torch.zeros(2, 4, 5, 2, 12))
    model = wan()
    parallelize(model, group)
    nearly = wan_inputs()["hidden_states"] * (1 + 1e-6 * rank)  # as another GPU may round
    model(nearly, *list(wan_inputs().values())[1:])


def test_unequal_inputs_are_refused(ranks: Ranks) -> None:
    ranks(3, check_unequal)
