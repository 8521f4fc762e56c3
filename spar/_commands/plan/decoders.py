# SPDX-License-Identifier: Apache-2.0
"""How the decoders of transformers that `plan` counts differ from Llama: a row for each type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Decoder:
    """What a layer is made of, and what it keeps until backward.

    Attributes:
        norms: of the hidden states, in a layer.
        floats, items: numbers that a norm keeps of each element, in float32 and in the model's dtype.
        inputs: hidden states that attention and the MLP read: 1 if both read the same.
        normed: whether queries and keys are normed, where the config has no `use_qk_norm`.
        matrices: of an MLP or an expert.
        wide: how many tensors of the MLP's width it keeps.
        experts: whether layers have experts.
        in_floats: whether what experts return is weighted in float32, as the router's scores are.
        latent: whether queries, keys and values are made of latent ones (MLA).
        defaults: what a config.json may leave out.
    """

    norms: int = 2
    floats: int = 1
    items: int = 1
    inputs: int = 2
    normed: bool = False
    matrices: int = 3
    wide: int = 4
    experts: bool = False
    in_floats: bool = False
    latent: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_TIED = {"tie_word_embeddings": True}
_LLAMA = Decoder()
_NORMED = Decoder(normed=True)
_FLOATS = Decoder(floats=2, items=0)  # The norm is multiplied by its weight in float32.
_GEMMA = replace(_FLOATS, defaults=_TIED)
_COHERE = Decoder(norms=1, floats=3, items=0, inputs=1, defaults=_TIED)
_EXPERTS = Decoder(experts=True)
_IN_FLOATS = Decoder(experts=True, in_floats=True)
_LATENT = replace(_IN_FLOATS, latent=True)
_GEMMA3 = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}

TYPES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen2_vl_text": _LLAMA,
    "qwen2_5_vl_text": _LLAMA,
    "phi3": _LLAMA,
    "granite": _LLAMA,
    "smollm3": Decoder(defaults=_TIED),
    "ernie4_5": Decoder(defaults=_TIED),
    "qwen3": _NORMED,
    "qwen3_vl_text": _NORMED,
    "hunyuan_v1_dense": _NORMED,
    "exaone4": _NORMED,
    "olmo2": replace(_FLOATS, normed=True),
    "olmo3": replace(_FLOATS, normed=True),
    "glm4": Decoder(norms=4),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4),
    "gemma3_text": replace(_GEMMA, norms=4, normed=True, defaults=_TIED | _GEMMA3),
    "starcoder2": Decoder(floats=0, matrices=2, wide=2, defaults=_TIED),
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "mixtral": _IN_FLOATS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": replace(_EXPERTS, normed=True),
    "qwen3_vl_moe_text": replace(_EXPERTS, normed=True),
    "olmoe": replace(_EXPERTS, normed=True),
    "minimax_m2": replace(_IN_FLOATS, normed=True),
    "gpt_oss": replace(_FLOATS, wide=7, experts=True),
    "glm4_moe": _IN_FLOATS,
    "dots1": replace(_IN_FLOATS, normed=True),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
}
