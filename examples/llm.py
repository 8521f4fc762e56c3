# SPDX-License-Identifier: Apache-2.0
"""A small byte-level model of transformers and its text, for transformers_train.py and packed.py."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor


def make_model(seed: int = 0) -> Any:
    """Build a Qwen3 model with random weights, equal on all ranks: 6 query heads, 2 key heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config)


def documents() -> list[Tensor]:
    """Return the topics of Python's own documentation, which pydoc shows, as bytes."""
    texts = [topics[name].strip().encode() for name in sorted(topics)]
    return [torch.tensor(list(text), dtype=torch.int64) for text in texts]


def largest_difference(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two lists of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
