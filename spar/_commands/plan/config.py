# SPDX-License-Identifier: Apache-2.0
"""A decoder's sizes, from a config of transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..ranks import UsageError
from .decoders import TYPES
from .model import Experts, Latent, Model


class _Config(NamedTuple):
    name: str
    values: dict[str, Any]

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"--model {self.name}: {key} is {value!r}; expected an int from {least} on")
        return value

    def listed(self, key: str) -> list[Any]:
        value = self.values.get(key, [])
        if not isinstance(value, list):
            raise UsageError(f"--model {self.name}: {key} is {value!r}; expected a list")
        return value


def read_model(name: str) -> Model:
    """Read a config.json, that of a folder, or that of a model which transformers has on this machine.

    Of a config of several models, its text model is read.

    Raises:
        UsageError: there is none, or it is of a type that the command does not count.
    """
    whole = _read(name)
    text = whole.get("text_config", whole)
    kind = text.get("model_type") if isinstance(text, dict) else None
    if f"{kind}_text" in TYPES:  # text's sizes are beside a vision_config
        kind = f"{kind}_text"
    if not isinstance(kind, str) or kind not in TYPES:
        raise UsageError(f"--model {name} is of type {kind!r}; expected one of {', '.join(TYPES)}")
    decoder = TYPES[kind]
    given = {key: value for key, value in text.items() if value is not None}
    config = _Config(name, {**decoder.defaults, **given})
    normed, tied = [config.values.get(key) for key in ("use_qk_norm", "tie_word_embeddings")]
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    width = config.size("head_dim", hidden // heads)
    sizes = {"width": width, "value_width": width, "key_heads": config.size("num_key_value_heads", heads)}
    latent = None
    if decoder.latent:
        latent = _latent(config)
        width = config.size("qk_nope_head_dim") + latent.rotated
        sizes = {"width": width, "value_width": config.size("v_head_dim"), "key_heads": heads}
    experts = _experts(config) if decoder.experts else None
    return Model(
        decoder=decoder if normed is None else replace(decoder, normed=bool(normed)),
        layers=config.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        **sizes,
        intermediate=config.size("intermediate_size"),
        vocabulary=config.size("vocab_size"),
        tied=bool(whole.get("tie_word_embeddings", tied)),
        capped=bool(config.values.get("final_logit_softcapping")),
        is_part=text is not whole or "vision_config" in whole,
        experts=experts if experts and experts.layers else None,
        latent=latent,
    )


def _latent(config: _Config) -> Latent:
    return Latent(
        queries=config.size("q_lora_rank", 0, least=0),
        keys=config.size("kv_lora_rank"),
        rotated=config.size("qk_rope_head_dim"),
    )


def _experts(config: _Config) -> Experts:
    names = "num_local_experts", "n_routed_experts", "num_experts"
    count = next((name for name in names if name in config.values), names[-1])
    width = config.size("moe_intermediate_size", config.values.get("intermediate_size"))
    beside = width * config.size("n_shared_experts", 0, least=0)
    return Experts(
        layers=_sparse(config),
        count=config.size(count),
        chosen=config.size("num_experts_per_tok"),
        width=width,
        shared=config.size("shared_expert_intermediate_size", beside, least=0),
    )


def _sparse(config: _Config) -> int:
    """Return how many layers have experts: those of a list, or all but the first and what is left out."""
    if kinds := config.listed("mlp_layer_types"):
        return kinds.count("sparse")
    first, step = config.size("first_k_dense_replace", 0, least=0), config.size("decoder_sparse_step", 1)
    dense = config.listed("mlp_only_layers")
    return sum((i + 1) % step == 0 and i not in dense for i in range(first, config.size("num_hidden_layers")))


def _read(name: str) -> dict[str, Any]:
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        return _of_transformers(name)
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:  # JSON's errors are ValueErrors
        raise UsageError(f"--model {name} cannot be read: {error}; expected a config.json") from None
    if not isinstance(config, dict):
        raise UsageError(
            f"--model {name} holds a {type(config).__name__}; expected the dict of a config.json"
        )
    return config


def _of_transformers(name: str) -> dict[str, Any]:
    """Return the config that transformers has on this machine under a name; nothing is downloaded."""
    missing = f"--model {name} is no file or folder, and transformers"
    if not find_spec("transformers"):
        raise UsageError(f"{missing} is not installed; expected a config.json")
    from transformers import AutoConfig

    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(name, local_files_only=True).to_dict()
    except (OSError, ValueError):
        raise UsageError(f"{missing} has no such model on this machine; expected a config.json") from None
    return config
