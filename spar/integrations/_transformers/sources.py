# SPDX-License-Identifier: Apache-2.0
"""What the sources of a model's classes say of its attention and masks; nothing else in a model does."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what a layer calls for the registered attention
# what a layer passes to a module that mixes tokens, besides masks: generation needs one of them there
_STATES = {"past_key_values", "past_key_value", "layer_past", "cache_params", "cache", "state"}


class Masks(NamedTuple):
    """How the forwards of a model build causal masks.

    Attributes:
        functions: the names of transformers' functions that they call.
        documents: whether they pass position_ids, by which these functions separate packed documents.
        by_kind: whether they accept a dict with a mask for each type of layer.
    """

    functions: frozenset[str]
    documents: bool
    by_kind: bool


def is_attention(module: torch.nn.Module) -> bool:
    """Whether a layer calls the attention that is set by its name."""
    return _INTERFACE in names_of(type(module).forward)


def has_attention(model: torch.nn.Module) -> bool:
    """Whether any of a model's layers calls the attention that is set by its name."""
    return any(is_attention(module) for module in model.modules())


def mask_builder(module: torch.nn.Module) -> str | None:
    """Return the name of the method by which an attention layer builds a mask itself."""
    names = sorted(names_of(type(module).forward))
    return next((name for name in names if "mask" in name and callable(getattr(module, name, None))), None)


def drops_arguments(module: torch.nn.Module, child: str) -> bool:
    """Whether a layer calls an attention layer inside it without the keyword arguments that it received."""
    kind: Any = type(module)
    return _drops_arguments(kind, child)


@functools.cache
def _drops_arguments(kind: type, child: str) -> bool:
    calls = [
        node
        for function in functions_of(kind)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{child}"
    ]
    return bool(calls) and not any(keyword.arg is None for call in calls for keyword in call.keywords)


def takes_mask(module: torch.nn.Module) -> bool:
    """Whether a module is an embedding of positions that may derive these from a mask."""
    is_embedding = isinstance(module, torch.nn.Embedding)
    return is_embedding and "attention_mask" in inspect.signature(module.forward).parameters


class Bare(NamedTuple):
    """An attention layer that the layer around it calls without its keyword arguments.

    Attributes:
        path: its path in the model.
        parent: the layer around it.
        has_mask: whether it receives a mask.
    """

    path: str
    parent: torch.nn.Module
    has_mask: bool


def bare_attention(model: torch.nn.Module, whole: frozenset[torch.nn.Module]) -> list[Bare]:
    """Return a model's attention layers that receive no layout, but for modules that run whole."""
    return [
        Bare(f"{path}.{name}", parent, "attention_mask" in mixing_children(parent).get(name, ()))
        for path, parent in model.named_modules()
        if parent not in whole
        for name, child in parent.named_children()
        if is_attention(child) and child not in whole and drops_arguments(parent, name)
    ]


def needs_mask(model: torch.nn.Module, whole: frozenset[torch.nn.Module]) -> bool:
    """Whether a model needs a mask also where attention needs none.

    Its attention finds the layout there, or else it makes a mask of ones for its embedding of positions.
    """
    return bool(bare_attention(model, whole)) or any(takes_mask(module) for module in model.modules())


def mixing_children(module: torch.nn.Module) -> dict[str, frozenset[str]]:
    """Return the modules to which a layer passes a cache, a state or a mask, and the names that it passes."""
    kind: Any = type(module)
    names = {name for name, _ in module.named_children()}
    return {name: passed for name, passed in _receive_state(kind).items() if name in names}


@functools.cache
def _receive_state(kind: type) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for function in functions_of(kind):
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("self."):
                continue
            passed = {keyword.arg or "" for keyword in node.keywords}
            passed |= {name.id for x in node.args for name in ast.walk(x) if isinstance(name, ast.Name)}
            if passed & _STATES or any("mask" in name for name in passed):
                name = ast.unparse(node.func).removeprefix("self.")
                found[name] = found.get(name, frozenset()) | passed
    return found


def masks_of_forward(model: torch.nn.Module) -> Masks:
    """Return how a model, and the models inside it, build causal masks."""
    from transformers import PreTrainedModel

    kinds: set[Any] = {type(module) for module in model.modules() if isinstance(module, PreTrainedModel)}
    found = [_masks_of(kind) for kind in kinds]
    functions: set[str] = set().union(*(masks.functions for masks in found))
    documents, by_kind = any(masks.documents for masks in found), any(masks.by_kind for masks in found)
    return Masks(frozenset(functions), documents, by_kind)


@functools.cache
def _masks_of(kind: type) -> Masks:
    builders: set[str] = set()
    documents = by_kind = False
    for function in functions_of(kind):
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        causal = {name for name in names if name.startswith("create_") and name.endswith("causal_mask")}
        builders |= causal
        documents = documents or any("position_ids" in passed for passed in _arguments(function) if causal)
        by_kind = by_kind or any(_asks_for_dict(node) for node in ast.walk(function))
    return Masks(frozenset(builders), documents, by_kind)


def _asks_for_dict(node: ast.AST) -> bool:
    """Whether a node is `isinstance(attention_mask, dict)`, perhaps with an assignment in it."""
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "isinstance"
        and ast.unparse(node.args[1]) == "dict"
        and "attention_mask" in ast.unparse(node.args[0])
    )


def _arguments(function: ast.AST) -> Iterator[set[object]]:
    """Return the names of the arguments of each mask: those of a call, or of a dict for several calls."""
    for node in ast.walk(function):
        names: set[object] = set()
        if isinstance(node, ast.Call):
            names = {keyword.arg for keyword in node.keywords}
        elif isinstance(node, ast.Dict):
            names = {key.value for key in node.keys if isinstance(key, ast.Constant)}
        if {"config", "inputs_embeds"} <= names:
            yield names


@functools.cache
def names_of(forward: Callable[..., object]) -> frozenset[str]:
    """Return the global names and attributes that a function has in its code."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return frozenset(() if code is None else code.co_names)


def functions_of(kind: type) -> list[ast.AST]:
    """Return the methods of a class of a model, and of its bases but for those of all models."""
    functions: list[ast.AST] = []
    for base in kind.__mro__:
        library = base.__module__.startswith(("builtins", "torch.", "transformers."))
        if library and not base.__module__.startswith("transformers.models."):
            continue
        for value in vars(base).values():
            if inspect.isfunction(function := inspect.unwrap(value)):
                with contextlib.suppress(OSError, SyntaxError):  # it was not read from a file
                    functions.append(ast.parse(textwrap.dedent(inspect.getsource(function))))
    return functions
