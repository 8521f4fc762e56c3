# SPDX-License-Identifier: Apache-2.0
"""spar.integrations.diffusers: each misuse ends in an error on every rank, and leaves the group usable."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Ranks
from helpers.diffusion import (
    MODELS,
    PLANS,
    PRELOAD as PRELOAD,
    Group,
    Inputs,
    compare,
    disable,
    enable,
    flux,
    flux_inputs,
    ltx,
    ltx_inputs,
    qwen_image,
    qwen_image_inputs,
    sd3,
    trained,
    wan,
    wan_inputs,
)
from torch import nn

import spar
from spar.integrations._diffusers import names

pytestmark = pytest.mark.one_transport
both_ways = pytest.mark.parametrize("plan", PLANS, ids=["view", "plan"])


def refused(
    kind: type[BaseException], parts: str, function: Callable[..., Any], *args: Any, **kw: Any
) -> None:
    """Check that a call raises, with each part of the message, which "..." separates."""
    with pytest.raises(kind) as info:
        function(*args, **kw)
    for part in parts.split("..."):
        assert part in str(info.value), str(info.value)


# ---- enable and disable, which communicate nothing ----


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def check_arguments(rank: int, world: int, group: Group) -> None:
    model, split, gather = wan(), {"blocks.0": {"hidden_states": 1}}, {"proj_out": 1}
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    refuse = partial(refused, ValueError)
    refused(TypeError, "model is 3; expected a torch.nn.Module", enable, 3, group)
    pipe = SimpleNamespace(transformer=model, text_encoder=Other())
    message = "model is a SimpleNamespace; expected a model in it: pass pipe.transformer"
    refused(TypeError, message, enable, pipe, group)
    message = "plan is 'default', and Other has none that spar has verified, as...Wan...plan=None"
    refuse(message, enable, Other(), group, "default")
    refuse("Other has no ModuleList of blocks", enable, Other(), group)
    refuse("method is 'rings'; expected ...gather", enable, model, method="rings")
    message = "method is 'ring' and strict False; expected neither with a plan"
    refuse(message, enable, model, group, "default", method="ring")
    refuse("Other has no attention processors", enable, Other(), group, {"": {"x": 1}, "inner": 1})
    refused(TypeError, "plan is [1]; expected a dict", enable, model, group, [1])
    refused(TypeError, "key 3", enable, model, group, {3: 1})
    refuse("expected an argument or output to shard", enable, model, group, gather)
    refuse("expected an output to gather", enable, model, group, split)
    refuse("'blocks.9'; expected the name of a module", enable, model, group, {"blocks.9": 1})
    wrong = {"blocks.0": {"hidden": 1}} | gather
    refuse(
        "'blocks.0' names the argument 'hidden'; expected one of hidden_states, ", enable, model, group, wrong
    )
    refused(TypeError, "is 'x'; expected the sequence's dim", enable, model, group, split | {"proj_out": "x"})
    refuse("an output is -1", enable, model, group, {"rope": {-1: 1}} | gather)
    refuse("is not enabled", disable, model)
    refuse("is not enabled", disable, nn.parallel.DistributedDataParallel(model, process_group=group))
    wrapper = nn.parallel.DistributedDataParallel(model, process_group=group)
    refuse("model is a DistributedDataParallel; expected what it wraps: model.module", enable, wrapper, group)
    refuse("expected what it wraps: model._orig_mod", enable, torch.compile(model), group)
    model._parallel_config = object()
    refuse("enable_parallelism", enable, model, group)
    del model._parallel_config
    model.blocks[1].attn1.processor = type("WanIPAdapter", (type(model.blocks[1].attn1.processor),), {})()
    refuse("processor of blocks.1.attn1 is a WanIPAdapter", enable, model, group, "default")
    model.blocks[1].attn1.processor = lambda *args: None
    refuse("processor of blocks.1.attn1 is a function", enable, model, group, "default")
    model = wan()
    assert before.keys() == {name for name, _ in model.named_modules()}
    for plan in PLANS:
        enable(model, group, plan)
        for again in PLANS:
            refuse("enabled already; call disable", enable, model, group, again)
        forward = model.forward
        model.forward = lambda forward=forward, **inputs: forward(**inputs)
        refuse("forward...was replaced", disable, model)
        model.forward = forward
        disable(model)


def test_arguments_are_checked(ranks: Ranks) -> None:
    ranks(1, check_arguments)


def test_a_model_without_a_verified_plan_names_diffusers_own() -> None:
    model = Other()
    model._cp_plan = {"inner": 1}
    refused(ValueError, "pass plan=Other._cp_plan, and compare", enable, model, plan="default")


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
    if last == "__dataclass_fields__":
        monkeypatch.setattr(holder, last, {})
        name = name.removesuffix(last) + ("split_dim" if "Input" in name else "gather_dim")
    else:
        monkeypatch.delattr(holder, last)
    refused(
        ImportError,
        f"needs {name}...which diffusers 0.42.1 lacks; it is tested with",
        enable,
        nn.Linear(1, 1),
    )


def test_a_missing_diffusers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    refused(ImportError, "needs diffusers; pip install diffusers==", enable, nn.Linear(1, 1))


# ---- forward ----


def check_changed(rank: int, world: int, group: Group) -> None:
    """What was set after enable would attend to this rank's tokens only."""
    from diffusers.models.attention_processor import JointAttnProcessor2_0

    model = wan()
    enable(model, group, "default")
    model.set_attention_backend("native")
    refused(ValueError, "backend of blocks.0.attn1 was set after enable...disable", model, **wan_inputs())
    disable(model)
    enable(model, group, "default")
    model(**wan_inputs())
    other = sd3()
    enable(other, group, "default")
    other.set_attn_processor(JointAttnProcessor2_0())
    refused(
        ValueError,
        "processor or attention backend of transformer_blocks.0.attn was",
        other,
        **MODELS["sd3"][1](),
    )

    disable(model)
    enable(model, group, "default")
    from diffusers import FirstBlockCacheConfig

    model.enable_cache(FirstBlockCacheConfig())
    refused(ValueError, "has a cache...disable_cache()", model, **wan_inputs())
    model.disable_cache()
    model(**wan_inputs())


def test_processors_set_after_enable_are_refused(ranks: Ranks) -> None:
    ranks(2, check_changed)


def check_parts(rank: int, world: int, group: Group) -> None:
    """A part of a model alone would attend to the tokens that it is given, also in a recompute."""
    model = wan()
    enable(model, group, "default")
    rotary, kept = model.rope(wan_inputs()["hidden_states"]), []
    arguments = torch.zeros(2, 25, 36), torch.zeros(2, 7, 36), torch.zeros(2, 6, 36), rotary
    refused(ValueError, "neither in a forward...disable(model)", model.blocks[0], *arguments)
    model.enable_gradient_checkpointing()
    model.blocks[1].register_forward_hook(lambda module, args, output: kept.append(output))
    model(**wan_inputs())
    refused(ValueError, "neither in a forward...disable(model)", kept[0].sum().backward)
    disable(model)
    expected = model.blocks[0](*arguments)
    enable(model, group)  # by a view, it computes the whole alone
    torch.testing.assert_close(model.blocks[0](*arguments), expected, rtol=0, atol=0)


def test_by_a_plan_parts_of_a_model_do_not_run_alone(ranks: Ranks) -> None:
    ranks(2, check_parts)


def check_masks(rank: int, world: int, group: Group) -> None:
    model = ltx()
    expected = trained(model, ltx_inputs())
    plan = {key: dict(value) for key, value in model._cp_plan.items() if key != "proj_out"} | {"proj_out": 1}
    del plan[""]["encoder_attention_mask"]
    enable(model, group, plan)
    refused(ValueError, "a mask of shape [2, 3, 1, ...; expected one value for each", model, **ltx_inputs())
    disable(model)
    enable(model, group, "default")
    compare(trained(model, ltx_inputs(), group), expected, model)
    other = qwen_image()
    for module in other.modules():
        if hasattr(module, "processor"):
            module.processor._attention_backend = "_native_math"
    enable(other, group, "default")
    refused(ValueError, "a mask or is_causal with another backend", other, **qwen_image_inputs())
    other(**qwen_image_inputs(masked=False))


def test_masks_that_cannot_be_gathered_are_refused(ranks: Ranks) -> None:
    ranks(2, check_masks)


def check_plan(rank: int, world: int, group: Group) -> None:
    """A plan that does not shard all that attention joins is an error, not a wrong result."""
    model = flux()
    plan = {"": {"hidden_states": 1, "img_ids": 0}, "proj_out": 1}
    for text in (7, 12, 13, 25):
        enable(model, group, plan)
        with pytest.raises((ValueError, RuntimeError)):
            model(**flux_inputs(text=text))
        disable(model)
    model = sd3()
    enable(model, group, {"transformer_blocks.0": {"hidden_states": 1}, "proj_out": 1})
    for text in (7, 12, 13, 25):
        inputs = MODELS["sd3"][1](text=text)
        refused(ValueError, "queries, which are no shard of...hidden_states: 25...", model, **inputs)
    model = wan()  # whose keys are the text, and here also this rank's tokens
    attend = type(model.blocks[0].attn2.processor).__call__
    both = {
        "__call__": lambda self, attn, x, text, *rest: attend(self, attn, x, torch.cat([x, text], 1), *rest)
    }
    model.blocks[0].attn2.processor = type("Both", (type(model.blocks[0].attn2.processor),), both)()
    enable(model, group, "default")
    refused(ValueError, "keys in a module with a text of 7 tokens, which is not...", model, **wan_inputs())
    model = wan()
    enable(model, group, {"blocks.0": {"hidden_states": 1, "encoder_hidden_states": 1}, "proj_out": 1})
    with pytest.raises((ValueError, RuntimeError, spar.MismatchError)):
        model(**wan_inputs())
    enable(model := wan(), group, {"": {"timestep": 1}, "proj_out": 1})
    refused(ValueError, "timestep is of shape [2]; expected a dim 1", model, **wan_inputs())
    enable(model := wan(), group, {"rope": {2: 1}, "proj_out": 1})
    refused(ValueError, "module 'rope' 2 outputs; expected more than 2", model, **wan_inputs())
    enable(
        model := wan(), group, {"rope": {0: 1, 1: 1}, "blocks.0": {"hidden_states": 1}, "proj_out": [1, 1]}
    )
    refused(ValueError, "module 'proj_out' 1 outputs; expected 2", model, **wan_inputs())


def test_a_wrong_plan_is_an_error(ranks: Ranks) -> None:
    ranks(2, check_plan)


def changed(name: str, value: Any) -> Callable[[Inputs], Inputs]:
    return lambda inputs: inputs | {name: value}


def check_one_rank(rank: int, world: int, group: Group, plan: Any) -> None:
    """One rank has other inputs, or fails: all raise at once, and go on with the next call."""
    model = wan()
    expected = trained(model, wan_inputs())
    enable(model, group, plan)
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


@both_ways
def test_a_failure_of_one_rank_is_raised_on_all(ranks: Ranks, plan: Any) -> None:
    ranks(3, check_one_rank, plan, timeout=60)


def check_unequal(rank: int, world: int, group: Group, plan: Any) -> None:
    """Each forward compares the inputs of the ranks."""

    def attempt(message: str, **other: Any) -> None:
        model = wan()
        enable(model, group, plan)
        inputs = wan_inputs() | (other if rank == 2 else {})
        refused(ValueError, f"{message}...on all ranks", model, **inputs)
        model(**wan_inputs())

    attempt("hidden_states is another value on rank 2", hidden_states=torch.randn(2, 4, 5, 2, 10))
    attempt("timestep is another value on rank 2", timestep=torch.tensor([50, 151]))
    shape = "hidden_states of shape [2, 4, 5, 2, 12], torch.float32 on cpu on rank 2"
    attempt(shape, hidden_states=torch.zeros(2, 4, 5, 2, 12))
    model = wan()
    enable(model, group, plan)
    nearly = wan_inputs()["hidden_states"] * (1 + 1e-6 * rank)  # as another GPU may round
    model(nearly, *list(wan_inputs().values())[1:])


@both_ways
def test_unequal_inputs_are_refused(ranks: Ranks, plan: Any) -> None:
    ranks(3, check_unequal, plan)


def check_empty(rank: int, world: int, group: Group) -> None:
    model = ltx()
    enable(model, group, "default")
    with pytest.raises((ValueError, spar.MismatchError)) as info:
        model(**ltx_inputs(text=1))
    assert "no token of encoder_hidden_states" in str(info.value)
    assert "expected at least 2 tokens" in str(info.value)


def test_a_model_that_cannot_take_an_empty_shard_says_so(ranks: Ranks) -> None:
    ranks(2, check_empty)
