# SPDX-License-Identifier: Apache-2.0
"""A plan: which arguments and outputs of which modules are sharded, and which outputs are gathered."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..._checks import check_int
from .names import Names

# Diffusers has no plan for these. SD3 attends to image and text, which it embeds before its first block.
PLANS: dict[str, Any] = {
    "SD3Transformer2DModel": {
        "transformer_blocks.0": {"hidden_states": 1, "encoder_hidden_states": 1},
        "proj_out": 1,
    },
}
# whose own plan in diffusers (_cp_plan) the tests compare with one process
VERIFIED = (
    "ChronoEditTransformer3DModel",
    "Flux2Transformer2DModel",
    "FluxTransformer2DModel",
    "LTXVideoTransformer3DModel",
    "QwenImageTransformer2DModel",
    "WanTransformer3DModel",
)
_WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod")  # in torch's wrappers, whose forward takes *args


class Part(NamedTuple):
    """A tensor along whose `dim` the sequence lies; one with fewer than `ndim` dims has no sequence."""

    dim: int
    ndim: int | None


class Rule(NamedTuple):
    """What is done at one module."""

    name: str  # the module's; "" for the model
    module: torch.nn.Module
    parameters: list[str]  # the names of its arguments
    arguments: dict[str, Part]  # sharded before the module's forward
    outputs: dict[int, Part]  # sharded after it
    gathered: tuple[Part | None, ...]  # of each output, gathered after it


def default_plan(model: torch.nn.Module) -> Any:
    """Return the plan of a model whose class is verified.

    Raises:
        ValueError: the class is not.
    """
    classes = [kind.__name__ for kind in type(model).__mro__]
    for name in classes:
        if name in PLANS:
            return PLANS[name]
    plan = getattr(model, "_cp_plan", None)
    if plan is not None and any(name in VERIFIED for name in classes):
        return plan
    name = type(model).__name__
    verified = ", ".join(sorted({*PLANS, *VERIFIED}))
    raise ValueError(
        f"diffusers.enable: plan is 'default', and {name} has none that spar has verified, as {verified} "
        "have; expected plan=None, which needs none, or a plan. "
        + (
            f"diffusers has one: pass plan={name}._cp_plan, and compare with one process"
            if plan is not None
            else 'plan={"blocks.0": {"hidden_states": 1}, "proj_out": 1} shards dim 1 before the first block'
        )
    )


def rules_of(model: torch.nn.Module, plan: Any, names: Names) -> list[Rule]:
    """Check a plan; return what is to be done at each module.

    Raises:
        ValueError: a module or an argument does not exist, or nothing is sharded or gathered.
        TypeError: the plan is of another form.
    """
    if not isinstance(plan, Mapping):
        raise TypeError(f"diffusers.enable: plan is {plan!r:.200}; expected a dict of modules")
    rules = [
        _rule(name, module, entry, names)
        for key, entry in plan.items()
        for name, module in _modules(model, key)
    ]
    if not any(rule.arguments or rule.outputs for rule in rules):
        raise ValueError(f"diffusers.enable: plan is {plan!r:.200}; expected an argument or output to shard")
    if not any(rule.gathered for rule in rules):
        raise ValueError(f"diffusers.enable: plan is {plan!r:.200}; expected an output to gather")
    return rules


def _modules(model: torch.nn.Module, path: Any) -> list[tuple[str, torch.nn.Module]]:
    """Return the modules at a path, in which "*" stands for each child."""
    if not isinstance(path, str):
        raise TypeError(f"diffusers.enable: the plan has the key {path!r:.80}; expected a module's name")
    matches = [("", model)]
    for step in path.split(".") if path else ():
        matches = [
            (f"{name}.{child}".lstrip("."), module)
            for name, parent in matches
            for child, module in parent.named_children()
            if step in ("*", child)
        ]
    if not matches:
        raise ValueError(
            f"diffusers.enable: the plan names the module {path!r}; expected the name of a module of "
            f"{type(model).__name__}"
        )
    return matches


def _rule(name: str, module: torch.nn.Module, entry: Any, names: Names) -> Rule:
    at = f"diffusers.enable: the plan of module {name!r}"
    if not isinstance(entry, Mapping):
        parts = entry if isinstance(entry, (list, tuple)) else [entry]
        gathered = [None if part is None else _part(at, part, names.output, "gather_dim") for part in parts]
        return Rule(name, module, [], {}, {}, tuple(gathered))
    arguments: dict[str, Part] = {}
    outputs: dict[int, Part] = {}
    parameters = argument_names(module)
    for key, value in entry.items():
        part = _part(f"{at}: {key!r}", value, names.input, "split_dim")
        if isinstance(key, str) and not getattr(value, "split_output", False):
            if key not in parameters:
                raise ValueError(f"{at} names the argument {key!r}; expected one of {', '.join(parameters)}")
            arguments[key] = part
        else:
            outputs[check_int(at, "an output", key, 0)] = part
    return Rule(name, module, parameters, arguments, outputs, ())


def argument_names(module: torch.nn.Module) -> list[str]:
    """Return the names of what a module's forward takes, in order."""
    for name in _WRAPPED:
        module = getattr(module, name, module)
    return list(inspect.signature(module.forward).parameters)


def _part(at: str, value: Any, kind: Any, dim: str) -> Part:
    if isinstance(value, kind):
        return Part(check_int(at, dim, getattr(value, dim)), value.expected_dims)
    if isinstance(value, int) and not isinstance(value, bool):
        return Part(value, None)
    raise TypeError(f"{at} is {value!r:.200}; expected the sequence's dim, or a {kind.__name__}")
