# SPDX-License-Identifier: Apache-2.0
"""Small models, and a tokenizer of words in a folder for trainers that load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config

WORDS = [f"w{i}" for i in range(60)]


def write_llama(folder: Path) -> None:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1}
    tokens = {"vocab_size": len(vocabulary), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens)).save_pretrained(folder)


def qwen2_config(**options: Any) -> Qwen2Config:
    """Return a config of 3 heads, which 2 ranks do not divide."""
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    return Qwen2Config(vocab_size=64, **sizes, **heads, **options)
