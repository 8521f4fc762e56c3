# SPDX-License-Identifier: Apache-2.0
"""Modules that run on the whole sequence on each rank, because the user named them: `shard(..., whole=)`.

`install` puts hooks on them. Before a module's forward its inputs are gathered (whole_inputs.py); behind it
this rank's part of the outputs is kept (whole_outputs.py). Each rank's loss depends on its own part alone, so
the gather's backward sums input gradients, and gradients of parameters sum over the ranks as all others do.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module

from ...sequence_layout import SequenceLayout
from .attention import NO_LAYOUT, registered
from .mixers import forget_tokens
from .sources import has_attention, is_attention, mixing_children
from .tokens import Carried
from .whole_inputs import Site, gathered
from .whole_outputs import own_parts
from .whole_state import Carrying, enter, leave, state

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")  # of modules in a model
_MOST_NAMES = 3  # close ones in an error


# ---- which modules ----


def modules_of(model: Module, patterns: Any) -> dict[str, Module]:
    """Return the outermost modules whose paths match one of the patterns.

    Raises:
        TypeError: patterns is not a list of str.
        ValueError: a pattern matches no module, or only lists of modules, which are not called.
    """
    if patterns is None:
        return {}
    if (
        isinstance(patterns, str)
        or not isinstance(patterns, Sequence)
        or not all(isinstance(pattern, str) for pattern in patterns)
    ):
        raise TypeError(
            f"shard: whole is {patterns!r:.200}; expected a list of patterns of module paths, such as "
            "['model.layers.*.self_attn']"
        )
    paths = {_path(name): _unwrapped(module) for name, module in model.named_modules() if name}
    found: dict[str, Module] = {}
    for pattern in patterns:
        matched = {path: m for path, m in paths.items() if fnmatch.fnmatchcase(path, pattern)}
        called = {path: module for path, module in matched.items() if _is_called(module)}
        if not called:
            raise ValueError(f"shard: whole has {pattern!r}, {_why_nothing(model, pattern, matched, paths)}")
        found |= called
    return {path: module for path, module in found.items() if not _is_inside(path, found)}


def _path(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _unwrapped(module: Module) -> Module:
    for name in _WRAPPERS:
        if isinstance(inner := getattr(module, name, None), Module):
            return _unwrapped(inner)
    return module


def _is_called(module: Module) -> bool:
    """Whether a module has a forward: lists and dicts of modules have none."""
    forward: Any = type(module).forward
    return getattr(forward, "__name__", "") != "_forward_unimplemented"


def _is_inside(path: str, found: dict[str, Module]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:count]) in found for count in range(1, len(parts)))


def _why_nothing(model: Module, pattern: str, matched: dict[str, Module], paths: dict[str, Module]) -> str:
    if matched:
        path, module = next(iter(matched.items()))
        return f"and {path} is a {type(module).__name__}, which is not called; pass {path + '.*'!r}"
    # paths of layers differ by a number alone
    names = list(dict.fromkeys(as_pattern(path) for path, module in paths.items() if _is_called(module)))
    close = difflib.get_close_matches(pattern, names, _MOST_NAMES, 0.5)
    hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else f"There are {names[:8]!r:.300}"
    of = type(model).__name__
    return f"which matches no module of {of}; expected a pattern of its named_modules(). {hint}"


def as_pattern(path: str) -> str:
    """Return a pattern of the same module in all layers."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def hint(paths: Sequence[str]) -> str:
    """Return what an error about modules says of this way out."""
    patterns = list(dict.fromkeys(as_pattern(path) for path in paths if path))
    if not patterns:
        return ""
    return f". Pass whole={patterns} to run it on the whole sequence on each rank (slower, exact)"


def inside(modules: dict[str, Module]) -> frozenset[Module]:
    """Return the modules, and all those inside them."""
    return frozenset(child for module in modules.values() for child in module.modules())


def layers_of(model: Module, config: Any) -> list[tuple[str, Module]]:
    """Return a model's layers with their paths; none if they are not found."""
    count = getattr(config, "num_hidden_layers", None)
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and _is_called(module[0]):
            return [(_path(f"{path}.{index}"), _unwrapped(layer)) for index, layer in enumerate(module)]
    return []


def left_over(
    path: str, layer: Module, whole: frozenset[Module], served: frozenset[Module], strict: bool
) -> list[str]:
    """Return the paths of modules in a layer that mix tokens, and of which each would see a shard alone.

    A layer passes a cache, a state or a mask to a module that mixes tokens: generation needs it.

    whole: the modules that run whole. served: those of which spar computes the functions.
    strict: whether attention by the registered function is not all that passes between tokens.
    """
    if layer in whole or layer in served:
        return []
    passed = mixing_children(layer)
    children = [(f"{path}.{name}", _unwrapped(getattr(layer, name))) for name in passed]
    if is_attention(layer):
        # a module that receives the mask of attention selects keys, which are then those of a shard
        selects = any("attention_mask" in names for names in passed.values())
        covered = not selects and all(child in whole for _, child in children)
        return [] if covered and (children or not strict) else [path]
    if not children:
        return [path]
    return [each for name, child in children for each in left_over(name, child, whole, served, strict)]


def check_router(model: Any, config: Any, modules: dict[str, Module]) -> None:
    """Refuse router logits of all tokens, where those of own tokens are expected."""
    if not getattr(config, "output_router_logits", False):
        return
    from transformers.utils.output_capturing import OutputRecorder

    specs = getattr(model, "_can_record_outputs", None) or {}
    recorded = specs.get("router_logits", ())
    for spec in recorded if isinstance(recorded, list) else [recorded]:
        kind = spec.target_class if isinstance(spec, OutputRecorder) else spec
        for path, module in modules.items():
            if isinstance(kind, type) and any(isinstance(child, kind) for child in module.modules()):
                raise ValueError(
                    f"shard: whole has {path}, with a {kind.__name__} in it, and config.output_router_logits "
                    "is True: its router logits would be those of all tokens. Name a smaller module, or set "
                    "it to False"
                )


# ---- hooks ----


def install(model: Any, modules: dict[str, Module]) -> None:
    """Let these modules run whole, and no others."""
    wanted = {id(module): _site(model, path, module) for path, module in modules.items()}
    present = {
        id(module): hook.args[0]
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
        if getattr(hook, "func", None) is _before
    }
    if present != wanted:
        remove(model)
        for module in modules.values():
            module.register_forward_pre_hook(functools.partial(_before, wanted[id(module)]), with_kwargs=True)
            # first, so that other hooks see the outputs of own tokens
            module.register_forward_hook(functools.partial(_after), always_call=True, prepend=True)
        for entrance in _entrances(model) if modules else ():
            entrance.register_forward_pre_hook(functools.partial(_enter_model), with_kwargs=True)
            entrance.register_forward_hook(functools.partial(_leave_model), always_call=True)
    for layer in model.modules() if modules else ():
        checkpoint = layer.__dict__.get("_gradient_checkpointing_func")
        if checkpoint is not None and not isinstance(checkpoint, Carrying):
            layer.__dict__["_gradient_checkpointing_func"] = Carrying(checkpoint)


def remove(model: Module) -> None:
    """Remove all that `install` left in a model."""
    hooks = (_before, _after, _enter_model, _leave_model)
    for module in model.modules():
        for entries in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in entries.items() if getattr(hook, "func", None) in hooks]:
                del entries[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
        checkpoint = module.__dict__.get("_gradient_checkpointing_func")
        if isinstance(checkpoint, Carrying):
            module.__dict__["_gradient_checkpointing_func"] = checkpoint.checkpoint


def _entrances(model: Module) -> list[Module]:
    """Return the models that the caller may call with what `shard` returns."""
    from transformers import PreTrainedModel

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _site(model: Any, path: str, module: Module) -> Site:
    configs = {
        id(child.config): child.config
        for child in module.modules()
        if hasattr(getattr(child, "config", None), "_attn_implementation_internal")
    }
    forward: Callable[..., Any] = module.forward
    attentions = [child for child in module.modules() if is_attention(child)]
    windows = [getattr(child, "sliding_window", None) for child in attentions]
    numbers = [n for n in vars(model.config).values() if isinstance(n, int) and not isinstance(n, bool)]
    return Site(
        path=path,
        names=tuple(inspect.signature(forward).parameters),
        configs=tuple(configs.values()),
        config=model.config if has_attention(model) else None,
        attention="sdpa" if getattr(model, "_supports_sdpa", False) else "eager",
        has_attention=bool(attentions),
        window=min([n for n in windows if isinstance(n, int)], default=None),
        numbers=frozenset(numbers),
    )


def _enter_model(module: Module, args: Any, kwargs: dict[str, Any]) -> None:
    if state.layout is None and isinstance(kwargs.get("layout"), SequenceLayout):
        state.layout, state.owner = kwargs["layout"], module


def _leave_model(module: Module, args: Any, output: Any) -> None:
    if state.owner is module:
        state.layout = state.owner = None


def _before(
    site: Site, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Gather the inputs; let attention inside be that of one process."""
    layout = _layout_of(args, kwargs)
    if layout is None:
        _check_is_whole(site, module)
        return None
    args, kwargs = gathered(site, layout, args, kwargs)
    forget_tokens()
    enter(site, layout)
    return args, kwargs


def _after(module: Module, args: Any, output: Any) -> Any:
    """Keep this rank's part of the outputs."""
    entered = leave()
    if entered is None or output is None:
        return None
    return own_parts(entered.site.path, entered.layout, output)


def _layout_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SequenceLayout | None:
    given: SequenceLayout | None = kwargs.get("layout")
    if given is not None:
        return given
    for value in (*args, *kwargs.values()):
        if isinstance(value, Carried):
            return value.tokens.layout
    return state.layout


def _check_is_whole(site: Site, module: Module) -> None:
    """Report a layout that did not arrive: the module would run on a shard."""
    if site.config is not None and site.config._attn_implementation in registered:
        raise ValueError(NO_LAYOUT.format(type(module).__name__))
    if torch.compiler.is_compiling() or state.is_known:
        return
    if torch._C._current_graph_task_id() != -1:
        raise ValueError(
            f"{site.path} runs again in backward, and the layout of its sequence is not known there; "
            "expected gradient checkpointing by model.gradient_checkpointing_enable(), called before shard"
        )
