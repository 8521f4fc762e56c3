"""What `shard` must know of a model, and which models it refuses."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .attention import registered

_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# they mix neighbouring tokens: state spaces, linear attention and convolutions are made of them
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


def checked_config(model: Any, longest: int, learns: bool) -> Any:
    """Return a model's config; refuse a model that would compute something else over a sharded sequence.

    Args:
        model: the result of `stock`.
        longest: the highest position, plus one.
        learns: whether there are labels.

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
    _check_layers(model, config)
    if config._attn_implementation not in registered:
        raise ValueError(
            f"shard: {type(model).__name__} uses the attention {config._attn_implementation!r}; call "
            'spar.integrations.transformers.register() and model.set_attn_implementation("spar") first'
        )
    _check_rope(model, config, longest)
    if learns and getattr(model, "loss_function", None) is not ForCausalLMLoss:
        raise _refused(model, "its loss is not that of causal language models; pass no labels")
    if getattr(config, "output_router_logits", False):
        why = "config.output_router_logits is True, which adds a load-balancing loss"
        raise _refused(model, f"{why} that is not a sum over tokens; set it to False")
    return config


def _check_layers(model: torch.nn.Module, config: Any) -> None:
    """Refuse layers through which tokens see each other other than by causal attention."""
    causal = getattr(config, "is_causal", True) and not getattr(config, "is_encoder_decoder", False)
    if not causal or not all(getattr(module, "is_causal", True) for module in model.modules()):
        raise _refused(model, "its attention is not causal")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if others:
        raise _refused(model, f"it has layers of {', '.join(others)}, which pass more between tokens")
    for path, module in model.named_modules():
        if isinstance(module, _MIXERS):
            kind = type(module).__name__
            raise _refused(model, f"{path} is a {kind}, which mixes tokens outside of attention")
        if isinstance(module, torch.nn.Embedding) and _takes_mask(module):
            raise _refused(model, f"{path} derives positions from the attention mask")
    if getattr(model, "_is_stateful", False):
        raise _refused(model, "it has a state that passes from token to token")


def _takes_mask(module: torch.nn.Module) -> bool:
    return "attention_mask" in inspect.signature(module.forward).parameters


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
        other_head = name.startswith(("classifier", "summary"))  # of models with the same config
        if "drop" in name and not other_head and isinstance(value, (int, float)) and value > 0:
            return True
    drops = torch.nn.modules.dropout._DropoutNd
    return any(isinstance(module, drops) and module.p > 0 and module.training for module in model.modules())


def _refused(model: Any, why: str) -> ValueError:
    return ValueError(f"shard: {type(model).__name__} cannot run over a sharded sequence: {why}")
