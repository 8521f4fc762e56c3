"""What `shard` must know of a model, and which models it refuses."""

from __future__ import annotations

from typing import Any

import torch

from .attention import is_registered

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
        longest: the highest position, plus one.
        learns: whether there are labels.

    Raises:
        TypeError: not a model of transformers.
        ValueError: the model cannot be sharded, or uses another attention.
    """
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"shard: model is a {type(model).__name__}; expected a PreTrainedModel of transformers")
    config = model.config
    if config.get_text_config() is not config:
        raise _refused(model, "it has a config of its own for text, as models of images or audio; pass its text model")
    if getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True):
        raise _refused(model, "it is no causal decoder")
    name = config._attn_implementation
    if not is_registered(name):
        raise ValueError(
            f"shard: {type(model).__name__} uses the attention {name!r}; call "
            'spar.integrations.transformers.register() and model.set_attn_implementation("spar") first'
        )
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if others:
        raise _refused(model, f"it has layers of {', '.join(others)}, whose state passes from token to token")
    causal = [getattr(module, "is_causal", True) for module in model.modules()]
    for path, module in model.named_modules():
        if isinstance(module, _MIXERS):
            raise _refused(model, f"{path} is a {type(module).__name__}, which mixes tokens outside of attention")
    if getattr(model, "_is_stateful", False):
        raise _refused(model, "its state passes from token to token")
    if not all(causal):
        raise _refused(model, "its attention is not causal")
    _check_rope(model, config, longest)
    if learns and getattr(model, "loss_function", None) is not ForCausalLMLoss:
        raise _refused(model, "its loss is not that of causal language models; pass no labels")
    if getattr(config, "output_router_logits", False):
        raise _refused(
            model,
            "config.output_router_logits adds a router loss of each rank's own tokens. Set it to False; outputs have "
            "router_logits if you pass output_router_logits=True to model.model",
        )
    return config


def _check_rope(model: Any, config: Any, longest: int) -> None:
    """Refuse frequencies that a model derives from the highest position that it sees: ranks see others."""
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in ropes.values() if all(isinstance(rope, dict) for rope in ropes.values()) else [ropes]:
        kind = rope.get("rope_type", "default")
        limit = config.max_position_embeddings if kind == "dynamic" else None
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        if limit is not None and longest > limit:
            raise _refused(
                model,
                f"its rotary embedding is {kind!r}: beyond {limit} positions it depends on the highest position that "
                f"a rank holds, and there are {longest}",
            )


def has_dropout(model: torch.nn.Module, config: Any) -> bool:
    """Whether the model draws random numbers in a forward pass."""
    if model.training and getattr(config, "attention_dropout", 0.0):
        return True
    drops = torch.nn.modules.dropout._DropoutNd
    return any(isinstance(module, drops) and module.p > 0 and module.training for module in model.modules())


def _refused(model: Any, why: str) -> ValueError:
    return ValueError(f"shard: {type(model).__name__} cannot run over a sharded sequence: {why}")
