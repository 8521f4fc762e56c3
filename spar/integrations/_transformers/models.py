# SPDX-License-Identifier: Apache-2.0
"""What `shard` must know of a model, and which models it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from .attention import registered
from .given_masks import attention_kinds
from .heads import head_of, why_no_head
from .masks import WINDOWS, shortest_window
from .mixers import (
    KINDS,
    RECURRENT,
    WITHOUT_TOKENS,
    Mixer,
    convolutions_of,
    mixers_of,
    serve,
    why_refused,
)
from .router import has_other_router_loss, has_router_loss, sum_router_loss
from .sources import (
    bare_attention,
    has_attention,
    is_attention,
    mask_builder,
    masks_of_forward,
    takes_mask,
)
from .whole import hint, inside, layers_of, left_over

_LAYERS = {"full_attention", *WINDOWS, *KINDS, *WITHOUT_TOKENS}
# they mix neighbouring tokens; those of state spaces and linear attention are served: mixers.py
_MIXERS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.RNNBase)


def stock(model: Any) -> Any:
    """Return the transformers model inside PEFT, DDP, FSDP and torch.compile."""
    if hasattr(model, "get_base_model"):
        for name, adapter in model.peft_config.items():
            if getattr(adapter, "is_prompt_learning", False):
                raise _refused(model, f"the adapter {name!r} adds virtual tokens ({adapter.peft_type})")
        return stock(model.get_base_model())
    for name in ("module", "_orig_mod"):
        if isinstance(inner := getattr(model, name, None), torch.nn.Module):
            return stock(inner)
    return model


def checked_config(
    model: Any,
    longest: int,
    learns: bool,
    positions: bool,
    padded: bool,
    documents: bool,
    whole: dict[str, torch.nn.Module],
) -> Any:
    """Return a model's config; refuse a model that would compute something else over a sharded sequence.

    Args:
        model: the result of `stock`.
        longest: the highest position, plus one.
        learns: whether there are labels.
        positions: whether the batch has position_ids.
        padded: whether it has a mask that is not of ones alone.
        documents: whether position_ids separate packed documents.
        whole: the modules that run on the whole sequence on each rank, by their paths.

    Raises:
        TypeError: not a model of transformers.
        ValueError: the model cannot be sharded, or uses another attention.
    """
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"shard: model is a {type(model).__name__}; expected a transformers.PreTrainedModel")
    config = model.config
    if config.get_text_config() is not config:
        raise _refused(model, "it is not of text alone: its config has another one for text")
    covered = inside(whole)
    mixers = [mixer for mixer in mixers_of(model) if mixer.module not in covered]
    _check_layers(model, config, mixers, covered)
    if why := why_no_head(model, learns):
        raise _refused(model, why)
    _check_masks(model, config, documents)
    if not positions:
        _check_positions(model, padded)
    if config._attn_implementation not in registered and has_attention(model):
        raise ValueError(
            f"shard: {type(model).__name__} uses the attention {config._attn_implementation!r}; call "
            'spar.integrations.transformers.register() and model.set_attn_implementation("spar") first'
        )
    _check_rope(model, config, longest)
    serve(model, mixers)
    if learns and head_of(model) is None and getattr(model, "loss_function", None) is not ForCausalLMLoss:
        raise _refused(model, "its loss is not that of causal language models; pass no labels")
    if getattr(config, "output_router_logits", False):
        if has_other_router_loss(model):
            why = "config.output_router_logits is True, which adds a loss that is not the usual one of"
            raise _refused(model, f"{why} load balancing (load_balancing_loss_func); set it to False")
        if has_router_loss(model):
            sum_router_loss(model)
    return config


def _check_layers(
    model: torch.nn.Module, config: Any, mixers: list[Mixer], whole: frozenset[torch.nn.Module]
) -> None:
    """Refuse layers through which tokens see each other, but for causal attention and served mixers.

    whole: the modules that see all tokens.
    """
    causal = getattr(config, "is_causal", True) and not getattr(config, "is_encoder_decoder", False)
    if not causal or not all(getattr(module, "is_causal", True) for module in model.modules()):
        raise _refused(model, "its attention is not causal")
    kinds = list(getattr(config, "layer_types", None) or ())[: getattr(config, "num_hidden_layers", None)]
    left = _left_over(model, config, mixers, whole)
    if others := [path for index, kind in enumerate(kinds) if kind not in _LAYERS for path in left(index)]:
        why = f"it has layers of {', '.join(unknown_kinds(config))}, which pass more between tokens"
        raise _refused(model, why + hint(others))
    served_whole = {index for index, kind in enumerate(kinds) if kind in KINDS and not left(index)}
    if unknown := why_refused(config, mixers, served_whole):
        unserved = [path for index, kind in enumerate(kinds) if kind in KINDS for path in left(index)]
        raise _refused(model, unknown + hint(unserved))
    _check_modules(model, mixers, whole)
    if mixers or (has_attention(model) and not getattr(model, "_is_stateful", False)):
        return
    others = [path for index in range(max(1, len(layers_of(model, config)))) for path in left(index)]
    if masks_of_forward(model).functions and not has_attention(model):
        others = []  # it makes masks for attention code of its own, of the tokens that it receives
    elif whole and not others:
        return
    stateful = getattr(model, "_is_stateful", False)
    reason = (
        "it has a state that passes from token to token"
        if stateful
        else "its layers do not call the attention that set_attn_implementation sets: they have attention "
        "code of their own, or none"
    )
    raise _refused(model, reason + hint(others))


def check_known_without_whole(model: torch.nn.Module, config: Any, whole: dict[str, torch.nn.Module]) -> None:
    """Refuse modules that run whole because of what passes between tokens there: it may ignore spans."""
    try:
        _check_layers(model, config, mixers_of(model), frozenset())
    except ValueError as error:
        raise ValueError(
            f"shard: batch['attention_mask'] has spar.Spans, which modules of whole={sorted(whole)} may not "
            f"honour; expected [B, S] or a 4-D tensor, which they receive as in one process ({error})"
        ) from None


def unknown_kinds(config: Any) -> list[str]:
    """Return the kinds of a model's layers of which spar does not know what passes between tokens."""
    return sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)


def _left_over(
    model: torch.nn.Module, config: Any, mixers: list[Mixer], whole: frozenset[torch.nn.Module]
) -> Callable[[int], list[str]]:
    """Return a function of a layer's number: the paths of modules that would mix tokens of a shard alone."""
    layers, served = layers_of(model, config), frozenset(mixer.module for mixer in mixers)
    kinds = getattr(config, "layer_types", None) or ()

    def left(index: int) -> list[str]:
        if index >= len(layers):
            return [""]  # it was not found
        strict = index < len(kinds) and kinds[index] not in _LAYERS
        return left_over(*layers[index], whole, served, strict)

    return left


def _check_modules(model: torch.nn.Module, mixers: list[Mixer], whole: frozenset[torch.nn.Module]) -> None:
    """Refuse modules that mix neighbours, build masks or lose the layout, but for those that run whole."""
    convolutions = convolutions_of(mixers)
    for path, module in model.named_modules():
        if module in whole:
            continue
        if isinstance(module, _MIXERS) and module not in convolutions:
            kind = type(module).__name__
            parent = path.rpartition(".")[0]
            raise _refused(
                model, f"{path} is a {kind}, which mixes tokens outside of attention" + hint([parent])
            )
        if takes_mask(module) and "position_ids" not in inspect.signature(module.forward).parameters:
            raise _refused(model, f"{path} derives positions from the attention mask")
        if is_attention(module) and (builder := mask_builder(module)):
            why = f"{path} builds masks itself ({builder}), of the tokens that a rank has"
            raise _refused(model, why + hint([path]))
    for bare in bare_attention(model, whole):
        if not bare.has_mask:  # which would have the layout
            kind, name = type(bare.parent).__name__, bare.path.rpartition(".")[2]
            why = f"{kind} passes {name} no keyword arguments and no attention_mask, which have the layout"
            raise _refused(model, why + hint([bare.path]))


def _check_masks(model: torch.nn.Module, config: Any, documents: bool) -> None:
    """Refuse a model whose masks are other ones than those that `masks_of` builds with transformers."""
    from transformers import masking_utils

    shortest_window(config)
    masks = masks_of_forward(model)
    if not has_attention(model):
        return
    if not masks.functions:
        raise _refused(model, "it builds attention masks by its own code, of the tokens that a rank has")
    if documents and not masks.documents:
        raise _refused(
            model,
            "it passes no position_ids to its masks, so that in one process, too, packed documents attend to "
            "each other. Pass them one by one, or spar.Spans or a 4-D attention_mask",
        )
    if hasattr(model, "create_masks_for_generate"):
        return
    kinds = attention_kinds(config)
    table = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
    unknown = sorted(kind for kind in kinds if not callable(table.get(kind)))
    if unknown:
        raise _refused(
            model, f"transformers does not say which masks its layers of {', '.join(unknown)} have"
        )
    functions = [table[kind] for kind in kinds if kind not in RECURRENT]
    missing = {getattr(function, "func", function).__name__ for function in functions} - masks.functions
    if missing:
        raise _refused(
            model,
            f"by its config its masks are those of {', '.join(sorted(missing))}, and its forward calls "
            f"{', '.join(sorted(masks.functions))}",
        )


def _check_positions(model: torch.nn.Module, padded: bool) -> None:
    """Refuse a model that derives positions from the tokens that it receives: not 0, 1, .."""
    for path, module in model.named_modules():
        if padded and takes_mask(module):
            raise _refused(
                model,
                f"{path} may derive positions from the attention mask, and the batch has one. Pass "
                "position_ids of the whole sequence too, those of the model in one process",
            )
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise _refused(
                model,
                f"{path} derives positions from input_ids, as RoBERTa does, whose positions begin at "
                "pad_token_id + 1. Pass position_ids of the whole sequence",
            )


def _check_rope(model: Any, config: Any, longest: int) -> None:
    """Refuse frequencies that depend on the highest position that a rank holds."""
    ropes = getattr(config, "rope_parameters", None) or {}
    by_layer = all(isinstance(rope, dict) for rope in ropes.values())
    for rope in ropes.values() if by_layer else [ropes]:
        kind, limit = rope.get("rope_type", "default"), config.max_position_embeddings
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings", limit)
        if kind in ("dynamic", "longrope") and longest > limit:
            why = f"its rotary embedding is {kind!r}: beyond {limit} positions, and there are {longest}, it"
            raise _refused(model, f"{why} depends on the highest position that a rank holds")


def has_dropout(model: torch.nn.Module, config: Any) -> bool:
    """Whether the model draws random numbers in a forward pass: by a module, or by what its config says."""
    if not model.training:
        return False
    for name, value in vars(config).items():
        other_head = name.startswith(("classifier", "summary"))  # heads of other models with this config
        draws = ("drop" in name or "jitter" in name) and not other_head
        if draws and isinstance(value, (int, float)) and value > 0:
            return True
    drops = torch.nn.modules.dropout._DropoutNd
    return any(isinstance(module, drops) and module.p > 0 and module.training for module in model.modules())


def _refused(model: Any, why: str) -> ValueError:
    return ValueError(
        f"shard: {type(model).__name__} cannot run over a sharded sequence: {why}. "
        "spar.parallelize(model, group) runs models of any kind, from the whole batch"
    )
