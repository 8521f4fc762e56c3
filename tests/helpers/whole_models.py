# SPDX-License-Identifier: Apache-2.0
"""Models with modules that run on the whole sequence on each rank: `shard(..., whole=)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from . import llms
from .llms import compared

FOUR = {"num_hidden_layers": 4}
EXPERTS = llms.EXPERTS | {"shared_expert_intermediate_size": 16}
INDEXER = {"index_topk": 6, "index_n_heads": 2, "index_head_dim": 16}
DSA = llms.LATENT | llms.ROUTED | INDEXER | {"num_key_value_heads": 8, "moe_intermediate_size": 16}
CCA = FOUR | EXPERTS | {"num_experts_per_tok": 1, "num_attention_heads": 4, "sliding_window": 9}
ZAYA = CCA | {"layer_types": ["hybrid", "hybrid_sliding"] * 2}
QWEN4 = (
    FOUR
    | EXPERTS
    | {
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "eos_token_id": 2,
    }
)
NGRAMS = {"ple_layer_ids": [1, 3], "ple_embed_dim": 16, "ngram_vocab_size_base": 31, "heads_per_ngram": 2}
GRIFFIN = {"num_hidden_layers": 3, "num_attention_heads": 4, "lru_width": 32, "sliding_window": 9}
ATTENTION = ["model.layers.*.self_attn"]
TYPES: dict[str, tuple[str, dict[str, Any], list[str]]] = {  # its class, config, and what runs whole
    "recurrent_gemma": ("RecurrentGemma", GRIFFIN, ["model.layers.*.temporal_block"]),
    "its recurrent blocks alone": ("RecurrentGemma", GRIFFIN, ["model.layers.[01].temporal_block"]),
    "rwkv": ("Rwkv", {}, ["rwkv.blocks.*.attention", "rwkv.blocks.*.feed_forward"]),
    "xlstm": ("xLSTM", {"num_heads": 4, "embedding_dim": 32}, ["backbone.blocks.*.mlstm_layer"]),
    "zaya": ("Zaya", ZAYA, ATTENTION),
    "its projections alone": ("Zaya", ZAYA, ["*.qkv_proj"]),
    "qwen4_exp": ("Qwen4Exp", QWEN4, ATTENTION),
    "with embeddings of n-grams": ("Qwen4Exp", QWEN4 | NGRAMS, ["*.self_attn", "*.ple"]),
    "deepseek_v32": ("DeepseekV32", DSA | {"first_k_dense_replace": 1}, ATTENTION),
    "glm_moe_dsa": ("GlmMoeDsa", DSA, ATTENTION),
    "nemotron": ("Nemotron", {}, ATTENTION),
    "stablelm": ("StableLm", {}, ATTENTION),
    "doge": ("Doge", {}, ATTENTION),
    "mamba": ("Mamba", {"state_size": 6, "time_step_rank": 4}, ["backbone.layers.0.mixer"]),
    "layers": ("Qwen3", llms.MIXED | {"use_sliding_window": True}, ["model.layers.1"]),
    "eager": ("Gemma2", {"sliding_window": 9}, ["model.layers.*.self_attn"]),
    "sinks": ("GptOss", llms.MIXED | {"num_local_experts": 4}, ["model.layers.0.self_attn"]),
    "all": ("Qwen3", {}, ["model"]),
}
# float32 of routers and of gates, by the processor; `test_gradients_in_float64` compares them without it
ROUNDING = {
    **dict.fromkeys(["zaya", "its projections alone"], 1e-3),
    **dict.fromkeys(["qwen4_exp", "with embeddings of n-grams"], 4e-4),
}


def maker(name: str, **changes: Any) -> Callable[[], Any]:
    kind, config, _ = TYPES[name]
    build = llms.maker(kind, **config | changes)

    def make() -> Any:
        made = build()
        for path, p in made.named_parameters():
            if p.numel() > 1 and p.unique().numel() == 1 and not path.endswith("norm.weight"):
                nn.init.normal_(p, std=0.2)  # as biases, which begin with zeros
        return made.train()

    return make


def check_exact(name: str, batch: dict[str, Any], group: llms.Group, make: Any = None, **given: Any) -> None:
    tolerance = given.pop("tolerance", ROUNDING.get(name, llms.TOLERANCE))
    patterns = given.pop("whole", TYPES[name][2])
    report = compared(make or maker(name), batch, group, whole=patterns, **given)
    for entry in report.entries:
        zero = entry.reference_norm < 1e-6 and entry.max_abs_error < 1e-6  # rounding of a gradient of 0
        assert zero or entry.max_rel_error < tolerance, f"{entry}, {given}\n{report}"
    assert report.entries[1].name == "logits" and report.reference_loss > 1
