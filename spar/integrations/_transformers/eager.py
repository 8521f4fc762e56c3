# SPDX-License-Identifier: Apache-2.0
"""Eager attention of transformers in a view: with a mask of spans it is computed without S x S scores.

Each model has an `eager_attention_forward` of its own. Those with a known formula are recognised by their
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._attention.spans import Spans
from ..._model.part import Part, mark, part_of, whole_numel
from ..._model.rules.attention import exchanged
from ..._model.rules.products import shared
from ..._model.spans_mask import mask_of, spans_of_floats
from ..._model.stand_ins import computing, replaced
from ..._model.view import current_view, without_view

_OPTIONAL = "?"  # a statement that a formula may leave out
_SCORES = (  # patterns of the statements, in their order
    _OPTIONAL + r"if scaling is None:\n    scaling = (query\.size\(-1\)|module\.head_dim) \*\* \(?-0\.5\)?",
    _OPTIONAL + r"key_states = (repeat_kv\(key, module\.num_key_value_groups\)|key)",
    _OPTIONAL + r"value_states = (repeat_kv\(value, module\.num_key_value_groups\)|value)",
    r"attn_weights = torch\.matmul\(query, key(_states)?\.transpose\((2, 3|-1, -2)\)\) \* scaling",
    _OPTIONAL + r"if softcap is not None:\n    attn_weights = attn_weights / softcap\n"
    r"    attn_weights = torch\.tanh\(attn_weights\)\n    attn_weights = attn_weights \* softcap",
    r"if attention_mask is not None:\n    attn_weights = attn_weights \+ attention_mask",
)
_WEIGHTS = (
    r"attn_weights = nn\.functional\.softmax\(attn_weights, dim=-1(, dtype=torch\.float32)?\)"
    r"(\.to\(query\.dtype\))?",
    _OPTIONAL + r"attn_weights = attn_weights\.type\(value\.dtype\)",
    r"attn_weights = nn\.functional\.dropout\(attn_weights, p=dropout, training=module\.training\)",
)
_WEIGHTS_BESIDE_SINKS = (
    r"sinks = module\.sinks\.reshape\(1, -1, 1, 1\)"
    r"\.expand\(query\.shape\[0\], -1, query\.shape\[-2\], -1\)",
    r"combined_logits = torch\.cat\(\[attn_weights, sinks\], dim=-1\)",
    r"combined_logits = combined_logits - combined_logits\.max\(dim=-1, keepdim=True\)\.values",
    r"probs = F\.softmax\(combined_logits, dim=-1, dtype=combined_logits\.dtype\)",
    r"scores = probs\[\.\.\., :-1\]",
    r"attn_weights = nn\.functional\.dropout\(scores, p=dropout, training=module\.training\)"
    r"\.to\(value_states\.dtype\)",
)
_OUTPUT = (
    r"attn_output = torch\.matmul\(attn_weights(\.to\(value\.dtype\))?, value(_states)?\)",
    r"attn_output = attn_output\.transpose\(1, 2\)(\.contiguous\(\))?",
    r"return \(attn_output, attn_weights\)",
)
_BY_SUM = (  # the share of the sink by the logarithm of the sum of the others
    r"lse = torch\.logsumexp\(attn_weights, dim=-1\)",
    r"sink_scale = \(lse - module\.sinks\.view\(1, -1, 1\)\)\.to\(torch\.float32\)\.sigmoid\(\)",
    r"attn_weights = F\.softmax\(attn_weights, dim=-1, dtype=torch\.float32\)\.to\(query\.dtype\)",
    r"attn_weights = F\.dropout\(attn_weights, p=dropout, training=module\.training\)",
    _OUTPUT[0],
    r"attn_output = attn_output \* sink_scale\.unsqueeze\(-1\)\.to\(attn_output\.dtype\)",
)
_FORMULAS = (
    ("usual", _SCORES + _WEIGHTS + _OUTPUT),
    ("sinks", _SCORES + _WEIGHTS_BESIDE_SINKS + _OUTPUT),
    ("sinks", _SCORES + _BY_SUM + _OUTPUT[1:]),
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
        formula = formula_of(default)
        return functools.partial(_attend, default, formula == "sinks") if formula else default

    with replaced((interface, "get_interface", get_interface)):
        yield


@functools.lru_cache(maxsize=512)
def formula_of(function: Any) -> str | None:
    """Return which formula a function of a model of transformers is; None if it is none of them.

    "usual": softmax(Q K^T scaling + mask) V, of scores that a softcap may limit; "sinks": the same, where the
    softmax has one more score in each head.
    """
    if not getattr(function, "__module__", "").startswith(_OF_LIBRARY) or not inspect.isfunction(function):
        return None
    names = [*inspect.signature(function).parameters]
    if names[:5] != ["module", "query", "key", "value", "attention_mask"]:
        return None
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError):
        return None
    body = tree.body if isinstance(tree, ast.FunctionDef) and not tree.decorator_list else []
    statements = [ast.unparse(each) for each in body if not _is_docstring(each)]
    return next((name for name, patterns in _FORMULAS if _are(statements, patterns)), None)


def _are(statements: Sequence[str], patterns: Sequence[str]) -> bool:
    left = [*statements]
    for pattern in patterns:
        if left and re.fullmatch(pattern.removeprefix(_OPTIONAL), left[0]):
            del left[0]
        elif not pattern.startswith(_OPTIONAL):
            return False
    return not left


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _attend(
    own: Callable[..., Any],
    has_sinks: bool,
    module: Any,
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
    scaling, softcap = kwargs.get("scaling"), kwargs.get("softcap")
    is_plain = softcap is None and not has_sinks
    if (
        spans is None
        or attention_mask is None
        or args
        or scaling is None
        or (kwargs.get("dropout") and module.training)
        or part is None
        or any(each is not None and each.dim != 2 for each in (part, *others))
        or not query.dim() == key.dim() == value.dim() == 4
        or not (is_plain or (others == [part, part] and part.is_sequence))
        or are_weights_read(module, kwargs)
        or not _runs_without_weights(module.__class__)
    ):
        return own(module, query, key, value, attention_mask, *args, **kwargs)
    with without_view():  # a rank may know it already: ranks compare the code that they run in the view
        dead = spans.remember(("dead", query.device), lambda: _dead(spans, query.device))
    # Beside a sink, a query without keys has no weights, as by spans.
    is_uniform = dead is not None and not has_sinks
    if is_uniform and (softcap is not None or attention_mask.dtype not in _UNIFORM):
        return own(module, query, key, value, attention_mask, *args, **kwargs)
    mask = mask_of(spans, attention_mask.shape, attention_mask.device)
    grouped = query.size(1) != key.size(1)
    if is_plain:
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(query, key, value, mask, scale=scaling, enable_gqa=grouped)
    else:
        options = {"softcap": softcap, "sinks": module.sinks if has_sinks else None}
        out = _beside_sdpa(part, query, key, value, mask, scale=scaling, **options)
    if is_uniform and dead is not None:
        out = torch.where(dead, _of_all_alike(query, key, value, scaling), out)
    return out.transpose(1, 2).contiguous(), None


def _beside_sdpa(
    part: Part, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any
) -> Tensor:
    """Attend over parts of one sequence, with options of `spar.attention` that torch's has not."""
    view, work = current_view(), shared(2 * whole_numel(query) * part.whole, part)
    assert view is not None
    with computing(view, "eager attention", (query, key, value), work):
        return mark(exchanged(part, part)(query, key, value, mask, **options), part)


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


def are_weights_read(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether somebody may read the weights of an attention layer; fused kernels return none."""
    if kwargs.get("output_attentions") or getattr(
        getattr(module, "config", None), "output_attentions", False
    ):
        return True
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collected = capturing._active_collector.get() if capturing is not None else None
    if any("hidden_states" not in name and name != "router_logits" for name in collected or ()):
        return True
    hooks = [*module._forward_hooks.values(), *torch.nn.modules.module._global_forward_hooks.values()]
    return not all(getattr(hook, "__qualname__", "").startswith(_CAPTURING) for hook in hooks)


@functools.lru_cache(maxsize=512)
def _runs_without_weights(kind: Any) -> bool:
    """Whether all models in a layer's file take attention without weights, as fused kernels return none."""
    from transformers import PreTrainedModel

    file = sys.modules[kind.__module__]
    if not kind.__module__.startswith(_OF_LIBRARY):
        return False
    models: list[Any] = [
        x for x in vars(file).values() if isinstance(x, type) and x.__module__ == file.__name__
    ]
    models = [each for each in models if issubclass(each, PreTrainedModel)]
    return all(each._supports_sdpa or each._supports_flash_attn for each in models)
