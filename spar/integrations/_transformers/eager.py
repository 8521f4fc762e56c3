# SPDX-License-Identifier: Apache-2.0
"""Eager attention of transformers in a view: with a mask of spans it is computed without S x S scores.

Each model has an `eager_attention_forward` of its own. Those with the usual formula are recognised by their
source, statement by statement; any other runs as it is, and reads the mask's floats.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..._attention.spans import Spans
from ..._view.part import part_of
from ..._view.spans_mask import mask_of, spans_of_floats
from ..._view.view import current_view, without_view

_OPTIONAL = "?"  # a statement that a formula may leave out
_FORMULA = (  # patterns of the statements, in their order
    _OPTIONAL + r"if scaling is None:\n    scaling = (query\.size\(-1\)|module\.head_dim) \*\* \(?-0\.5\)?",
    _OPTIONAL + r"key_states = (repeat_kv\(key, module\.num_key_value_groups\)|key)",
    _OPTIONAL + r"value_states = (repeat_kv\(value, module\.num_key_value_groups\)|value)",
    r"attn_weights = torch\.matmul\(query, key(_states)?\.transpose\((2, 3|-1, -2)\)\) \* scaling",
    _OPTIONAL + r"if softcap is not None:\n[^#]*",  # without one nothing of it runs
    r"if attention_mask is not None:\n    attn_weights = attn_weights \+ attention_mask",
    r"attn_weights = nn\.functional\.softmax\(attn_weights, dim=-1(, dtype=torch\.float32)?\)"
    r"(\.to\(query\.dtype\))?",
    _OPTIONAL + r"attn_weights = attn_weights\.type\(value\.dtype\)",
    r"attn_weights = nn\.functional\.dropout\(attn_weights, p=dropout, training=module\.training\)",
    r"attn_output = torch\.matmul\(attn_weights(\.to\(value\.dtype\))?, value(_states)?\)",
    r"attn_output = attn_output\.transpose\(1, 2\)(\.contiguous\(\))?",
    r"return \(attn_output, attn_weights\)",
)
# Of these the lowest number absorbs what is added to it, and is finite in float32.
_UNIFORM = (torch.float32, torch.bfloat16)
_OF_LIBRARY = "transformers.models."
_CAPTURING = "install_output_capuring_hook."  # transformers' hooks: idle, unless outputs are collected


@contextlib.contextmanager
def attending(modeling_utils: Any) -> Iterator[None]:
    """Let layers that ask transformers' interface for eager attention receive one that reads spans in a view.

    Does nothing if the interface is not as in transformers 5.23.
    """
    interface: Any = getattr(modeling_utils, "AttentionInterface", None)
    own = getattr(interface, "get_interface", None)
    if own is None or [*inspect.signature(own).parameters] != ["self", "attn_implementation", "default"]:
        yield
        return

    @functools.wraps(own)
    def get_interface(self: Any, attn_implementation: Any, default: Any) -> Any:
        found = own(self, attn_implementation, default)
        if attn_implementation != "eager" or found is not default or current_view() is None:
            return found
        return functools.partial(_attend, default) if has_usual_formula(default) else default

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = own


@functools.lru_cache(maxsize=512)
def has_usual_formula(function: Any) -> bool:
    """Whether a function of a model of transformers is softmax(Q K^T scaling + mask) V, and nothing else."""
    if not getattr(function, "__module__", "").startswith(_OF_LIBRARY) or not inspect.isfunction(function):
        return False
    names = [*inspect.signature(function).parameters]
    if names[:5] != ["module", "query", "key", "value", "attention_mask"]:
        return False
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError):
        return False
    body = tree.body if isinstance(tree, ast.FunctionDef) and not tree.decorator_list else []
    statements = [ast.unparse(each) for each in body if not _is_docstring(each)]
    for pattern in _FORMULA:
        if statements and re.fullmatch(pattern.removeprefix(_OPTIONAL), statements[0]):
            del statements[0]
        elif not pattern.startswith(_OPTIONAL):
            return False
    return not statements


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _attend(
    own: Callable[..., Any],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute eager attention of parts by `spar.attention`, without weights, where nobody reads these."""
    spans = spans_of_floats(attention_mask)
    part, *others = [part_of(x) for x in (query, key, value)]
    scaling = kwargs.get("scaling")
    if (
        spans is None
        or attention_mask is None
        or args
        or scaling is None
        or kwargs.get("softcap") is not None
        or (kwargs.get("dropout") and module.training)
        or part is None
        or any(each is not None and each.dim != 2 for each in (part, *others))
        or not query.dim() == key.dim() == value.dim() == 4
        or _reads_weights(module, kwargs)
    ):
        return own(module, query, key, value, attention_mask, *args, **kwargs)
    with without_view():  # a rank may know it already: ranks compare the code that they run in the view
        dead = spans.remember(("dead", query.device), lambda: _dead(spans, query.device))
    if dead is not None and attention_mask.dtype not in _UNIFORM:
        return own(module, query, key, value, attention_mask, *args, **kwargs)
    mask = mask_of(spans, attention_mask.shape, attention_mask.device)
    grouped = query.size(1) != key.size(1)
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(query, key, value, mask, scale=scaling, enable_gqa=grouped)
    if dead is not None:
        out = torch.where(dead, _of_all_alike(query, key, value, scaling), out)
    return out.transpose(1, 2).contiguous(), None


def _of_all_alike(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Return the attention of queries without keys, whose scores are the lowest number for all keys.

    The weights are those of a mean, and their gradients go on to queries and keys, as to any scores:
    d out_i = scaling / S sum_j d(q_i k_j) (v_j - mean). A term with this gradient and the value 0 is added.
    """
    mean = value.mean(2, keepdim=True)
    apart = (value - mean).detach()
    slope = key.transpose(2, 3) @ apart * (scaling / value.size(2))
    if query.size(1) != key.size(1):
        count = query.size(1) // key.size(1)
        mean, slope = mean.repeat_interleave(count, 1), slope.repeat_interleave(count, 1)
    change = query @ slope
    return mean + (change - change.detach())


def _dead(spans: Spans, device: torch.device) -> Tensor | None:
    """Return which queries have no keys, [B, 1, S, 1]; None if each has one."""
    first, end = spans.on_cpu.unflatten(3, (-1, 2)).unbind(-1)
    dead = (first >= end).all(-1, keepdim=True)
    return dead.to(device) if bool(dead.any()) else None


def _reads_weights(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether somebody may read the weights of an attention layer; of `sdpa` there are none, either."""
    if kwargs.get("output_attentions") or getattr(
        getattr(module, "config", None), "output_attentions", False
    ):
        return True
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collected = capturing._active_collector.get() if capturing is not None else None
    if any("hidden_states" not in name for name in collected or ()):
        return True
    hooks = [*module._forward_hooks.values(), *torch.nn.modules.module._global_forward_hooks.values()]
    if not all(getattr(hook, "__qualname__", "").startswith(_CAPTURING) for hook in hooks):
        return True
    kind: Any = type(module)
    return not _runs_with_sdpa(kind)


@functools.lru_cache(maxsize=512)
def _runs_with_sdpa(kind: Any) -> bool:
    """Whether all models in a layer's file take attention without weights, as that of `sdpa` is."""
    from transformers import PreTrainedModel

    file = sys.modules[kind.__module__]
    if not kind.__module__.startswith(_OF_LIBRARY):
        return False
    models: list[Any] = [
        x for x in vars(file).values() if isinstance(x, type) and x.__module__ == file.__name__
    ]
    return all(each._supports_sdpa for each in models if issubclass(each, PreTrainedModel))
