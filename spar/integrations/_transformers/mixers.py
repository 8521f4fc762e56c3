# SPDX-License-Identifier: Apache-2.0
"""Layers that mix tokens without attention: convolutions, linear attention and state spaces.

transformers calls their functions by global names of a model's module, with the keyword arguments of the
forward. `serve` puts functions of the same names before them, which act on the layout that `shard` passes.
All names of transformers on which this depends stand here and in `scans`, as of transformers 5.23.
"""

from __future__ import annotations

import ast
import functools
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._attention.spans import Spans
from ...ops.fragments import Lengths
from ...sequence_layout import SequenceLayout
from .attention import NO_LAYOUT, registered
from .scans import ALLOWED, CONVOLUTIONS, LIGHTNING, SCANS, SERVED, lightning
from .sources import drops_arguments, functions_of, has_attention, masks_of_forward, names_of
from .tokens import Carried, Tokens

# kinds of layers, in config.layer_types and as keys of masks, whose masks are [B, S] of padding
RECURRENT = ("linear_attention", "conv")
_BY_KIND = {"hybrid": ("full_attention", "linear_attention")}  # the keys of such a layer's masks
KINDS = {*RECURRENT, *_BY_KIND}
WITHOUT_TOKENS = {"mlp", "moe"}  # layers of Nemotron-H in which no token sees another one
_MASK = "create_recurrent_attention_mask"  # by which a model makes such a mask of the one that it receives


class _Current(threading.local):
    """The tokens of the layer that runs in this thread: backward runs layers again in threads of its own."""

    tokens: Tokens | None = None


_current = _Current()


# ---- a model's layers ----


class Mixer(NamedTuple):
    """A layer that calls functions of this file: its path, the module around it, and its name there."""

    path: str
    module: torch.nn.Module
    parent: torch.nn.Module
    name: str

    @property
    def functions(self) -> frozenset[str]:
        return _called(self.module)

    @property
    def has_scan(self) -> bool:
        """Whether it is a recurrence, rather than a convolution alone."""
        return bool(self.functions & SCANS.keys()) or _is_lightning(self.module)

    @property
    def omits_arguments(self) -> bool:
        """Whether it calls one of the functions without the keyword arguments that it received."""
        kind: Any = type(self.module)
        return _omits_arguments(kind)

    @property
    def scope(self) -> dict[str, Any]:
        """The globals in which the forward finds its functions."""
        forward: Any = inspect.unwrap(type(self.module).forward)
        return forward.__globals__  # type: ignore[no-any-return]


def mixers_of(model: torch.nn.Module) -> list[Mixer]:
    return [
        Mixer(f"{path}.{name}" if path else name, child, parent, name)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if _called(child) or _is_lightning(child)
    ]


def _called(module: torch.nn.Module) -> frozenset[str]:
    return names_of(type(module).forward) & SERVED.keys()


def _is_lightning(module: torch.nn.Module) -> bool:
    return names_of(type(module).forward) >= LIGHTNING


def convolutions_of(mixers: list[Mixer]) -> set[torch.nn.Module]:
    """Return the convolutions whose weights go to a function, and which are not called themselves."""
    return {
        child
        for mixer in mixers
        if mixer.functions & CONVOLUTIONS.keys()
        for name, child in mixer.module.named_children()
        if isinstance(child, torch.nn.Conv1d) and not drops_arguments(mixer.module, name)
    }


def why_refused(config: Any, mixers: list[Mixer], whole: set[int]) -> str | None:
    """Return why a model's layers without attention cannot be served, or None.

    whole: the numbers of layers that need not be.
    """
    for mixer in mixers:
        others = [
            name
            for name in names_of(type(mixer.module).forward) - SERVED.keys() - ALLOWED
            if isinstance(mixer.scope.get(name), types.FunctionType)
        ]
        if others:
            return f"{mixer.path} calls {', '.join(sorted(others))}, which spar does not know"
        if not hasattr(mixer.module, "layer_idx"):
            return f"{mixer.path} has no layer_idx, by which spar finds its kind in config.layer_types"
    served: dict[str, set[object]] = {
        kind: {mixer.module.layer_idx for mixer in mixers if mixer.functions & functions.keys()}
        for kind, functions in (("conv", CONVOLUTIONS), ("linear_attention", SCANS))
    }
    served["linear_attention"] |= {m.module.layer_idx for m in mixers if _is_lightning(m.module)}
    kinds = (getattr(config, "layer_types", None) or ())[: getattr(config, "num_hidden_layers", None)]
    for index, kind in enumerate(kinds):
        needed = kind in KINDS and index not in whole
        if needed and index not in served["conv" if kind == "conv" else "linear_attention"]:
            expected = ", ".join(CONVOLUTIONS if kind == "conv" else SCANS)
            return (
                f"layer {index} is one of {kind}, which passes more between tokens, and calls none of the "
                f"functions that spar computes over a sharded sequence ({expected})"
            )
    return None


def mask_kinds(config: Any) -> list[str]:
    """Return the keys of the masks of a model that accepts one for each kind of layer."""
    kinds = getattr(config, "layer_types", None) or ()
    return sorted({key for kind in kinds for key in _BY_KIND.get(kind, (kind,))})


def accepted(model: Any, config: Any, masks: Any, around: Callable[[Any], Any]) -> Any:
    """Return masks as a model accepts them: one, or a dict with one for each kind of layer.

    around: returns what a mask of attention is to be passed as.
    """
    kinds = mask_kinds(config) if masks_of_forward(model).by_kind else None
    if isinstance(masks, dict):
        if all(mask is None for mask in masks.values()):
            masks = None
        elif len(masks) == 1 and not kinds:
            (masks,) = masks.values()
    if kinds and (isinstance(masks, Spans) or (masks is None and around(None) is not None)):
        masks = {kind: None if kind in RECURRENT else masks for kind in kinds}
    if isinstance(masks, dict):
        return {kind: _padding(mask) if kind in RECURRENT else around(mask) for kind, mask in masks.items()}
    return around(masks)


def _padding(mask: Any) -> Tensor | None:
    """Return the mask of a layer without attention; documents of the caller's reach it in another way."""
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


# ---- the layout's way to the functions ----


def carries(model: torch.nn.Module, mixers: list[Mixer]) -> bool:
    """Whether masks are to have the layout: arguments are lost, or no attention would report their loss."""
    return bool(mixers) and (
        not has_attention(model)
        or any(drops_arguments(mixer.parent, mixer.name) or mixer.omits_arguments for mixer in mixers)
    )


@functools.cache
def _omits_arguments(kind: type) -> bool:
    return any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in SERVED
        and not any(keyword.arg is None for keyword in node.keywords)
        for function in functions_of(kind)
        for node in ast.walk(function)
    )


def with_layout(masks: Any, kinds: list[str] | None, tokens: Tokens) -> Any:
    """Let the masks of these layers have the layout.

    masks: None, one for all layers, or a dict by kind.
    kinds: the keys of such a dict if the model accepts one, else None.
    """
    if kinds is None:
        return Carried(masks, tokens)
    if not isinstance(masks, dict):
        masks = {kind: None if kind in RECURRENT else masks for kind in kinds}
    return {kind: Carried(mask, tokens) if kind in RECURRENT else mask for kind, mask in masks.items()}


def serve(model: Any, mixers: list[Mixer]) -> None:
    """Put spar's functions before those of the model's modules; let its layers find the layout.

    Raises:
        ValueError: this version of transformers has another function.
    """
    carried = carries(model, mixers)
    for mixer in mixers:
        scope = mixer.scope
        for name in sorted(mixer.functions):
            if not hasattr(scope.get(name), "of_transformers"):
                scope[name] = _served(name, scope)
        kind: Any = type(mixer.module)
        if _is_lightning(mixer.module) and not hasattr(kind.forward, "of_transformers"):
            kind.forward = _for_layout(kind.forward, lightning)
        if _MASK in scope and not hasattr(scope[_MASK], "of_transformers"):
            scope[_MASK] = _passes_carried(scope[_MASK])
        hooks = mixer.module._forward_pre_hooks.values()
        if not any(getattr(hook, "func", None) is _before for hook in hooks):
            before = functools.partial(_before, model.config if has_attention(model) else None)
            mixer.module.register_forward_pre_hook(before, with_kwargs=True)
            if carried:
                mixer.module.register_forward_hook(_after, always_call=True)


def _served(name: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that calls spar's where there is a layout, and transformers' else."""
    own, function = scope.get(name), SERVED[name]
    found = inspect.signature(own).parameters if callable(own) else {}
    missing = [parameter for parameter in function.parameters if parameter not in found]
    if not callable(own) or missing:
        import transformers

        what = f"has no parameter {', '.join(missing)}" if callable(own) else "does not exist"
        raise ValueError(
            f"shard: {name} of {scope.get('__name__')} {what} in transformers {transformers.__version__}; "
            "expected the function of transformers 5.23, which spar computes over a sharded sequence. "
            "Install transformers 5.23, or a spar for this version"
        )

    return _for_layout(own, function.run)


def _for_layout(own: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def served(
        *args: Any,
        layout: SequenceLayout | None = None,
        documents: Lengths | None = None,
        scan: str | None = None,
        **kwargs: Any,
    ) -> Any:
        # Where a mask has them, no documents are passed, but the layout may be.
        carried = _current.tokens
        tokens = carried if layout is None or carried is not None else Tokens(layout, documents, scan)
        if tokens is None or tokens.are_one_sequence:
            return own(*args, **kwargs)
        return run(own, tokens, *args, **kwargs)

    served.of_transformers = own  # type: ignore[attr-defined]
    return served


def _passes_carried(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that makes a layer's mask, which leaves a mask with a layout as it is."""

    @functools.wraps(own)
    def create(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        return mask if isinstance(mask, Carried) else own(*args, **kwargs)

    create.of_transformers = own  # type: ignore[attr-defined]
    return create


def _before(
    config: Any, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take a mask and its layout apart; report a layout that did not arrive: the shard would run alone.

    config: None if the model has no attention, of which the name would say that sequences are sharded.
    """
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Carried):
        _current.tokens = mask.tokens
        return args, kwargs | {"attention_mask": mask.mask}
    if config is not None and kwargs.get("layout") is None and config._attn_implementation in registered:
        raise ValueError(NO_LAYOUT.format(type(module).__name__))
    return args, kwargs


def _after(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    _current.tokens = None


def forget_tokens() -> None:
    """Let the functions of a layer that has whole sequences be transformers' own."""
    _current.tokens = None
