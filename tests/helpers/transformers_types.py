# SPDX-License-Identifier: Apache-2.0
"""A small model, and a batch, of each type in transformers' registries of language models.

`python -m helpers.transformers_types` from tests/, or `make models-table`, compares each on 2 ranks with
one process, and writes docs/models.md. `--task causal llama gpt2` runs these types alone, `--failed` those
that are not right on that page; the page keeps the rows of others. build/models.json has the errors and
lines in full. All take about 15 minutes on 2 cores.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from . import multimodal_types

VOCABULARY, LENGTH, PADDING, LABELS = 61, 21, 4, 3


class Task(NamedTuple):
    """A registry of transformers."""

    title: str
    registry: str


TASKS = {
    "causal": Task("Causal language models", "CAUSAL_LM"),
    "sequence": Task("Sequence classification and reward models", "SEQUENCE_CLASSIFICATION"),
    "token": Task("Token classification", "TOKEN_CLASSIFICATION"),
    "masked": Task("Masked language models", "MASKED_LM"),
    "seq2seq": Task("Encoder-decoders", "SEQ_TO_SEQ_CAUSAL_LM"),
    "multimodal": Task("Images, video and sound with text", "MULTIMODAL_LM"),
    "speech": Task("Speech recognition", "SPEECH_SEQ_2_SEQ"),
}
TOWERS = ("multimodal", "speech")  # whose batches have images or sound


def types(task: str) -> dict[str, str]:
    """Return the names of a registry's types, and of their classes."""
    found = getattr(modeling_auto, f"MODEL_FOR_{TASKS[task].registry}_MAPPING_NAMES")
    return {kind: name if isinstance(name, str) else name[0] for kind, name in found.items()}


# ---- sizes: what a config is given of its attributes with these names ----


def _all(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


_LAYERS = """num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers
    encoder_num_hidden_layers num_encoder_layers num_codec_layers depth"""
_ATTENTION = """num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads
    decoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads
    sliding_window_num_attention_heads num_global_attention_heads encoder_num_attention_heads"""
_WIDTH = """hidden_size d_model n_embd dim embed_dim emb_dim word_embed_proj_dim embedding_size lru_width
    attention_hidden_size output_embedding_size hidden_size_global input_embedding_size output_hidden_size
    width"""
_INNER = """intermediate_size n_inner ffn_dim d_ff d_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size
    intermediate_size_mlp encoder_intermediate_size dim_ff hidden_dim prefix_dense_intermediate_size
    expert_ffn_hidden_size"""
_KEYS = "num_key_value_heads num_global_key_value_heads"
_SMALL_WIDTH = """head_dim d_kv d_head qk_rope_head_dim qk_nope_head_dim v_head_dim kv_channels swa_head_dim
    swa_v_head_dim hidden_size_per_layer_input global_head_dim state_size mamba_d_state ssm_state_size
    mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim index_head_dim indexer_head_dim
    attention_head_size rotary_dim attention_head_dim linear_head_dim"""
_RANKS = "q_lora_rank kv_lora_rank o_lora_rank time_step_rank mamba_dt_rank"
_EXPERTS = """num_experts num_local_experts n_routed_experts moe_num_experts num_shared_experts
    expert_num n_experts"""
_EXPERT_WIDTH = "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"
_POSITIONS = """max_position_embeddings n_positions n_ctx max_seq_len max_length_positions
    max_source_positions max_target_positions max_sequence_length context_length max_2d_position_embeddings
    original_max_position_embeddings"""
_DROPOUTS = """dropout attention_dropout hidden_dropout activation_dropout resid_pdrop embd_pdrop attn_pdrop
    layerdrop decoder_layerdrop encoder_layerdrop hidden_dropout_prob attention_probs_dropout_prob
    lsh_attention_probs_dropout_prob local_attention_probs_dropout_prob"""

SIZES: dict[str, Any] = {
    **_all(_LAYERS, 2),
    **_all(_ATTENTION, 4),
    **_all(_WIDTH, 32),
    **_all(_INNER, 48),
    **_all(_KEYS, 2),
    **_all(_SMALL_WIDTH, 8),
    **_all(_RANKS, 8),
    **_all(_EXPERTS, 4),
    **_all(_EXPERT_WIDTH, 16),
    **_all(_POSITIONS, 64),
    **_all(_DROPOUTS, 0.0),
    **_all("num_experts_per_tok top_k moe_topk moe_k num_experts_per_token experts_per_token topk", 2),
    **_all("n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace moe_layer_start", 1),
    **_all("sliding_window local_attention window_size attention_window_size local_window_size", 8),
    **_all("attention_chunk_size chunk_size mamba_chunk_size linear_chunk_size", 8),
    **_all("linear_num_key_heads", 2),
    **_all("linear_num_value_heads index_n_heads indexer_n_heads", 4),
    **_all("mamba_n_heads mamba_num_heads n_mamba_heads", 8),
    "mamba_d_ssm": 64,
    **_all("mamba_n_groups n_groups mamba_ngroups", 2),
    **_all("index_topk indexer_budget", 6),
    **_all("initializer_range init_std initializer_factor", 0.2),
    **_all("vocab_size vocab_size_per_layer_input text_vocab_size", VOCABULARY),
    **_all("num_mtp_layers num_nextn_predict_layers num_kv_shared_layers", 0),
    **_all("block_size index_block_size local_attn_chunk_length lsh_attn_chunk_length local_radius", 4),
    **_all("attention_window swa_num_key_value_heads linear_num_heads num_kv_heads num_query_groups", 4),
    **_all("shared_intermediate_size dense_intermediate_size feed_forward_size dff", 48),
    **_all("decoder_vocab_size src_vocab_size tgt_vocab_size unpadded_vocab_size entity_vocab_size", 61),
    **_all("max_encoder_position_embeddings max_decoder_position_embeddings segment_means_seq_len", 64),
    **_all("keep_window_size sliding_window_size local_attention_window_len rel_extent", 8),
    **_all("dim_head mamba_headdim o_groups index_topk_blocks gated_norm_rank adapter_rank", 8),
    **_all("embedding_dim pooler_hidden_size backbone_hidden_size prediction_head_size", 32),
    **_all("num_landmarks num_latents num_hash", 4),
    **_all("num_expert_group num_layers_per_stack hc_lowrank zero_expert_num", 2),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
    "image_size": 16,
    "patch_size": 8,
    "norm_topk_prob": True,
}


class Unbuilt(Exception):
    """No small model of a type was found that runs in one process."""


# What the rule below does not make a model of, by type.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_TWO = ["sliding_attention", "full_attention"]
_GEMMA4 = {"global_head_dim": 8, "layer_types": _TWO, "num_hidden_layers": 2}
_DOTS3: dict[str, Any] = {
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
}
_DOTS3 |= {f"swa_{name}": 8 for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")}
_DOTS3 |= {"swa_num_attention_heads": 4, "swa_head_dim": 16, "swa_qk_rope_head_dim": 8}
_QWEN4: dict[str, Any] = {
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "num_hidden_layers": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {
        "layer_types": _TWO,
        "rope_parameters": dict.fromkeys(_TWO, _ROPE),
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 48},
    },
    "bros": {"hidden_size": 64},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": _DOTS3,
    "dots3_note_text": _DOTS3,
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lilt": {"hidden_size": 48},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "nystromformer": {"num_landmarks": LENGTH, "segment_means_seq_len": LENGTH},
    "perceiver": {"d_latents": 32, "num_self_attends_per_block": 2, "max_position_embeddings": LENGTH},
    "qwen4_exp": _QWEN4,
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 6), "hash_seed": 3},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
    },
    "zamba2": {"attention_hidden_size": 64, "hybrid_layer_ids": [1]},
    "zaya": {"num_experts_per_tok": 1},
}
CAUSAL: dict[str, dict[str, Any]] = {}  # in this task alone
# What some configs may not have, and others lack: in turn, until a model runs.
VARIANTS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    ((), {}),
    (("head_dim",), {}),
    ((), {"num_key_value_heads": 4}),
    ((), {"head_dim": 8}),
    (("head_dim",), {"num_key_value_heads": 4}),
)


def small(
    config: Any, changes: dict[str, Any], dropped: tuple[str, ...], sizes: dict[str, Any]
) -> dict[str, Any]:
    """Return arguments of a small config of the kind of a default one, and of the configs within it."""
    kind = type(config)
    config.allow_global_per_layer_attribute_access = True  # of configs whose layers differ
    made: dict[str, Any] = {}

    def has(name: str) -> bool:
        own = kind.attribute_map.get(name, name)
        return hasattr(config, name) and not isinstance(getattr(kind, own, None), property)

    for name, value in sizes.items():
        if has(name) and (getattr(config, name) is not None or name.endswith(("token_id", "vocab_size"))):
            made[name] = value
    if getattr(config, "is_encoder_decoder", False):
        made["decoder_start_token_id"] = 1
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if len(kinds) > 1 and has("layer_types"):  # a layer of each kind
        made |= {name: len(kinds) for name in _LAYERS.split() if name in made}
        made["layer_types"] = kinds
    parts = {**(kind.sub_configs or {}), **getattr(kind, "sub_configs_defaults", {})}
    for name in parts:
        part = getattr(config, name, None)
        if part is None and name in changes:
            made[name] = changes[name]
        elif part is not None:
            made[name] = type(part)(**small(part, changes.get(name, {}), dropped, sizes))
    made = {name: value for name, value in made.items() if name not in dropped}
    return made | {name: value for name, value in changes.items() if name not in parts}


def configs(task: str, kind: str) -> Iterator[Any]:
    """Yield small configs of a type, or errors, of which the first that makes a model is used."""
    cls = getattr(transformers, types(task)[kind]).config_class or transformers.CONFIG_MAPPING[kind]
    changes = OVERRIDES.get(kind, {}) | (CAUSAL.get(kind, {}) if task == "causal" else {})
    sizes = SIZES
    if task in TOWERS:
        sizes = SIZES | multimodal_types.SIZES
        parts = {name: getattr(cls(), name, None) for name in cls.sub_configs or {}}
        known = {
            name: OVERRIDES[part.model_type]
            for name, part in parts.items()
            if part and part.model_type in OVERRIDES
        }
        changes = known | changes | multimodal_types.OVERRIDES.get(kind, {})
    if task == "causal":
        changes = {"is_decoder": True} | changes
    elif task in ("sequence", "token"):
        changes = {"num_labels": LABELS} | changes
    for dropped, added in VARIANTS:
        try:
            config = cls(**small(cls(), added | changes, dropped, sizes))
        except Exception as error:
            yield error
        else:
            yield config


def build(task: str, config: Any, kind: str) -> nn.Module:
    """Return a model with weights of usual size, in which no bias is 0 and no norm's weight 1."""
    torch.manual_seed(0)
    cls = getattr(transformers, types(task)[kind])
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(config).parameters())
    if count > 30_000_000:
        raise Unbuilt(f"{count / 1e6:.0f} million parameters; at most 30 are run")
    model: nn.Module = cls(config)
    for p in model.parameters():
        if p.is_floating_point() and (p.numel() < 2 or (p == p.flatten()[0]).all() or not p.isfinite().all()):
            value = torch.nan_to_num(p.detach())
            p.data = value + 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped_mm has no float64
    return model.train(kind == "reformer")  # whose backward runs in training alone


def batch(task: str, kind: str, model: Any) -> dict[str, Tensor]:
    """Return two rows, of which the second has padding on its right."""
    if task in TOWERS:
        return multimodal_types.batch(kind, model)
    length = 24 if kind == "reformer" else LENGTH  # which is trained with whole chunks
    ids = torch.randint(5, VOCABULARY - 1, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, -PADDING:] = 0
    ids = ids.masked_fill(mask == 0, 0)
    ids[0, -1] = ids[1, -PADDING - 1] = 2  # the end, of which some classifiers read the state
    if task == "sequence":
        labels = torch.tensor([0, 2])
    elif task == "token":
        labels = (ids % LABELS).masked_fill(mask == 0, -100)
    else:
        labels = ids.masked_fill(mask == 0, -100)
    made = {"input_ids": ids, "attention_mask": mask, "labels": labels} | INPUTS.get(kind, {})
    if kind in ("musicgen", "musicgen_melody"):  # 4 codebooks
        made["input_ids"] = ids.repeat(4, 1)
        made["labels"] = labels[..., None].repeat(1, 1, 4)
    names = inspect.signature(model.forward).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in names.values())
    return {name: x for name, x in made.items() if takes_all or name in names}


_BOX = torch.tensor([1, 2, 5, 7]).expand(2, LENGTH, 4)
INPUTS: dict[str, dict[str, Tensor]] = {
    "bros": {"bbox": _BOX / 10},
    "git": {"pixel_values": torch.linspace(-1, 1, 1536).view(2, 3, 16, 16)},
}


if __name__ == "__main__":
    from helpers.transformers_table import main

    main()
