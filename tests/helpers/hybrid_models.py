# SPDX-License-Identifier: Apache-2.0
"""Models with layers without attention, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import Tensor, nn

import spar

from . import llms
from .llms import left_padded

PRELOAD = [*llms.PRELOAD, "torch.distributed.fsdp"]
POOL = (2, 3, 4)  # of the modules that import it
# Gradients of A_log and dt_bias are sums over all tokens that almost cancel. transformers computes the gates
# in float32, whose rounding depends on the processor (1.74e-4 with AVX2); `test_gates_in_float64` compares
# them without it.
GATES, ROUNDING = ("A_log.grad", "dt_bias.grad"), 2e-4

FOUR = {"num_hidden_layers": 4}
EXPERTS = llms.EXPERTS | {"shared_expert_intermediate_size": 16, "num_local_experts": 4}
LATENT = llms.LATENT | {"q_lora_rank": None, "num_key_value_heads": 8, "n_group": 1, "topk_group": 1}
LINEAR = FOUR | {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,  # fewer than of values, and than ranks
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
KDA = LINEAR | LATENT | EXPERTS | {"linear_num_heads": 5, "linear_head_dim": 8}
MAMBA2 = FOUR | {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
MAMBA = {"state_size": 6, "time_step_rank": 4}
CONVOLUTION = FOUR | {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
TYPES: dict[str, tuple[str, dict[str, Any]]] = {  # type: its class's name without ForCausalLM, and config
    "qwen3_next": ("Qwen3Next", LINEAR | EXPERTS),
    "qwen3_5_text": ("Qwen3_5", LINEAR),
    "qwen3_5_moe_text": ("Qwen3_5Moe", LINEAR | EXPERTS),
    "olmo_hybrid": ("OlmoHybrid", LINEAR | {"linear_num_key_heads": 4, "initializer_range": 0.05}),
    "kimi_linear": ("KimiLinear", KDA),
    "bailing_hybrid": ("BailingHybrid", KDA),
    "bamba": ("Bamba", MAMBA2 | {"attn_layer_indices": [1, 3]}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        MAMBA2 | EXPERTS | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 16},
    ),
    "falcon_h1": ("FalconH1", MAMBA2 | {"num_hidden_layers": 2, "mamba_d_ssm": 64}),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 5,
            "mamba_head_dim": 8,
            "ssm_state_size": 6,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    "zamba2": (
        "Zamba2",
        FOUR
        | {
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "mamba_d_state": 6,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "mamba_expand": 2,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
        },
    ),
    "mamba2": (
        "Mamba2",
        {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "chunk_size": 8, "expand": 2},
    ),
    "lfm2": ("Lfm2", CONVOLUTION | {"block_multiple_of": 8}),
    "lfm2_moe": ("Lfm2Moe", CONVOLUTION | EXPERTS | {"num_dense_layers": 1}),
    "lfm3": (
        "Lfm3",
        CONVOLUTION
        | {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"], "sliding_window": 9},
    ),
    "jamba": (
        "Jamba",
        FOUR
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 6, "mamba_dt_rank": 4},
    ),
    "minimax": (
        "MiniMax",
        LINEAR | EXPERTS | {"num_attention_heads": 5, "num_key_value_heads": 5, "block_size": 8},
    ),
    "recurrent_gemma": (
        "RecurrentGemma",
        {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 9, "num_key_value_heads": 1},
    ),
    "rwkv": ("Rwkv", {"context_length": 64}),
    "mamba": ("Mamba", MAMBA),
    "falcon_mamba": ("FalconMamba", MAMBA),
    "zamba": (
        "Zamba",
        FOUR
        | {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 64, "attention_head_dim": 8}
        | {"mamba_d_state": 6, "mamba_dt_rank": 4, "n_mamba_heads": 2, "num_key_value_heads": 8},
    ),
}


def maker(name: str, **changes: Any) -> Callable[[], Any]:
    """Return a function that builds a model of a type in which each head is another one."""
    kind, config = TYPES[name]

    def make() -> Any:
        model = getattr(transformers, f"{kind}ForCausalLM")
        made = model(model.config_class(**llms.SMALL | {"initializer_range": 0.1} | config | changes))
        for path, p in made.named_parameters():
            if p.numel() > 1 and p.unique().numel() == 1 and not path.endswith("norm.weight"):
                nn.init.normal_(p, std=0.2)  # as dt_bias and D, which begin with ones
        return made.train()

    return make


def padded() -> dict[str, Tensor]:
    """Return a batch with padding before the first sample; no token that is padding predicts one."""
    batch = left_padded()
    batch["labels"][0, 11] = -100
    return batch


FEW = {  # two heads, for more ranks
    "qwen3_next": {"linear_num_value_heads": 2, "linear_num_key_heads": 1},
    "bamba": {"mamba_n_heads": 2, "mamba_d_head": 32, "mamba_n_groups": 1},
}

ONE_OF_EACH: dict[str, dict[str, Any]] = {  # the changes of a type's config
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "qwen3_5_text": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "mamba": {"num_hidden_layers": 1},
}


def sent() -> tuple[int, int]:
    """Return the bytes that this process sent, and its exchanges."""
    stats = spar.memory_stats()
    sums = [sum(n for name, n in stats.items() if name.startswith(kind)) for kind in ("sent.", "calls.")]
    return sums[0], sums[1]
