# SPDX-License-Identifier: Apache-2.0
"""A batch with images or sound for each multimodal type in transformers' registries, and small configs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from .multimodal_media import (
    AUDIO,
    FAMILIES,
    FRAMES,
    IMAGE,
    PLACES,
    ROWS,
    SIDE,
    VIDEO,
    Batch,
    Format,
    grids,
    images,
    patches,
    sounds,
    strips,
    waves,
)

START, END, SOUND_START, SOUND_END, FIRST_SPECIAL = 57, 56, 55, 54, 54
TEXT, PADDING, WIDTH = 17, 3, 32


def _all(names: str, value: Any) -> Batch:
    return dict.fromkeys(names.split(), value)


# Beside those of language models.
SIZES: Batch = {
    **_all("image_token_id image_token_index img_token_id image_patch_id", IMAGE),
    **_all("video_token_id video_token_index", VIDEO),
    **_all("audio_token_id audio_token_index", AUDIO),
    **_all("vision_start_token_id image_start_token_id boi_token_id boi_token_index", START),
    **_all("vision_end_token_id image_end_token_id eoi_token_id eoi_token_index", END),
    **_all("im_start_id low_res_image_start_token_id frame_start_token_id", START),
    **_all("im_end_id frame_end_token_id im_newline_id", END),
    **_all("audio_start_token_id audio_bos_token_id", SOUND_START),
    **_all("audio_end_token_id audio_eos_token_id video_end_token_id", SOUND_END),
    "video_start_token_id": SOUND_START,
    **_all("out_hidden_size projection_dim vision_output_dim text_hidden_size projector_hidden_size", WIDTH),
    **_all("audio_hidden_size output_dim qformer_hidden_size encoder_hidden_size vision_hidden_size", WIDTH),
    **_all("projector_input_dim projector_output_dim image_token_embed_dim decoder_hidden_size", WIDTH),
    **_all("projection_hidden_dim downsample_hidden_size projection_hidden_size latent_channels", WIDTH),
    **_all("mm_hidden_size output_channels base_channels subsampling_conv_channels conv_channels", WIDTH),
    **_all("projection_intermediate_size mlp_dim patch_embed_hidden_size", 48),
    **_all("post_conv_in_channels post_conv_mid_channels post_conv_out_channels mm_embed_dim", WIDTH),
    **_all("output_proj_dims", WIDTH),
    **_all("num_position_embeddings position_embedding_size num_patches_", 64),
    **_all("num_mel_bins mel_bins n_mels input_feat_per_channel", 8),
    **_all("layers num_blocks depth", 2),
    **_all("pos_emb_height pos_emb_width posemb_grid_size", 8),
    **_all("mm_tokens_per_image num_query_tokens num_image_tokens image_seq_length latent_query_num", 4),
    **_all("drop_path_rate dropout_rate dropout_prob drop_path dropout_positions", 0.0),
    "num_patches": 64,
    "crop_size": SIDE,
    "max_source_positions": FRAMES // 2,
    "vision_use_head": False,
    "patch_size": 4,
}


def _rope(*section: int, **more: Any) -> Batch:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*section]}
    return {"rope_parameters": rope | more}


_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_WINDOW = {"vision_config": {"window_size": 16, "fullatt_block_indexes": [1]}}
_DEEP = {"vision_config": {"deepstack_visual_indexes": [0, 1]}, "text_config": _rope(2, 1, 1)}
_GLM4V = {"text_config": _rope(1, 1, 2, partial_rotary_factor=1.0)}
_PINPOINTS = {"image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE]]}
_WIDE_SOUND = {"audio_config": dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 4 * WIDTH)}
_LATENT = {"text_config": {"num_key_value_heads": 4}}
_OMNI = {"vision_start_token_id": START, "audio_start_token_id": SOUND_START, "vision_end_token_id": END}
_OMNI |= {"audio_end_token_id": SOUND_END}
_CROSSED = {"pad_token_id": 0, "decoder_start_token_id": 1}
_CROSSED |= {"decoder": {"is_decoder": True, "add_cross_attention": True}}
_CODES = {f"IMGIMG{chr(ord('A') + code)}Z": FIRST_SPECIAL + code for code in range(6)}
_MOE = {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1}
_SAM = {"image_size": 64, "patch_size": 4, "global_attn_indexes": [1], "window_size": 4, "mlp_dim": 48}
OVERRIDES: dict[str, Batch] = {
    "apertus1p5": {
        "vision_config": {"codebook_size": 6},
        "audio_config": {"codebook_size": 6, "codebook_dim": WIDTH},
        "image_token_offset": 20,
        "audio_token_offset": 26,
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "chameleon": {
        "vocabulary_map": {"<image>": IMAGE} | _CODES,
        "vq_config": {"num_embeddings": 6, "resolution": SIDE, "channel_multiplier": [1, 1], "embed_dim": 32},
    },
    "cohere_compass": _DEEP
    | {"text_config": {"rope_parameters": {"sliding_attention": _PLAIN, "full_attention": _PLAIN}}},
    "cosmos3_edge": {"text_config": _rope(2, 1, 1)},
    "deepseek_ocr2": {
        "vision_config": {"sam_config": _SAM | {"downsample_channels": [32, 32]}},
        "text_config": _MOE,
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [1], "window_size": 2}},
    "diffusion_gemma": {
        "canvas_length": 8,
        "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    },
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [16, 16], "mlp_layer_types": ["dense", "sparse"]}
        | _rope(1, 1, 2)
    },
    "florence2": {
        "vision_config": {
            "depths": [1, 1],
            "patch_size": [3, 3],
            "patch_stride": [2, 2],
            "patch_padding": [1, 1],
            "patch_prenorm": [False, True],
            "embed_dim": [16, 32],
            "num_heads": [2, 4],
            "num_groups": [2, 4],
            "window_size": 4,
        }
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": WIDTH // 4}},
    "gemma4": {
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        }
    },
    "gemma4_unified": {
        "vision_config": {"model_type": "gemma4_unified_vision", "patch_size": 2, "pooling_kernel_size": 2}
        | dict.fromkeys(("mm_embed_dim", "output_proj_dims"), WIDTH)
        | {"mm_posemb_size": 16}
    },
    "glm5_next": {
        "text_config": {"num_key_value_heads": 4, "index_kpool": 2, "qk_rope_head_dim": 0, "head_dim": 0}
    },
    "glmasr": _WIDE_SOUND,
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-2, 0]],
        "spatial_target_layers": [1],
        "vision_config": {"hidden_size": 64},
    }
    | _PINPOINTS,
    **_all(
        "granite_speech granite_speech_plus",
        {"window_size": 6, "downsample_rate": 3, "encoder_config": {"context_size": 8, "num_heads": 4}},
    ),
    "granite_docling": {"vision_config": {"scale_factor": 2, "deepstack_visual_indexes": [0]}},
    "hunyuan_vl": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "alpha": 1000.0,
                "factor": 1.0,
                "mrope_section": [2, 1, 1],
            },
            "head_dim": 8,
        }
    },
    "hy_v4_vl": {"text_config": _rope(2, 1, 1)},
    "instructblip": {"image_token_index": IMAGE},
    "instructblipvideo": {"video_token_index": VIDEO},
    "janus": {"vq_config": {"channel_multiplier": [1, 1], "num_embeddings": 16, "num_patches": 4}},
    "kimi_k25": _LATENT,
    "llama4": {"vision_config": {"intermediate_size": 4 * WIDTH}},
    "llava_next": _PINPOINTS,
    "llava_next_video": _PINPOINTS,
    "llava_onevision": _PINPOINTS,
    "minicpm_ocr": {"vision_config": {"insert_layer_id": 0}, "insert_layer_id": 0},
    "minicpmv4_6": {"vision_config": {"insert_layer_id": 0}, "insert_layer_id": 0},
    "minicpmv4_7": {"vision_config": {"insert_layer_id": 0}, "insert_layer_id": 0},
    "mistral_large4": _LATENT,
    "mllama": {
        "vision_config": {
            "num_global_layers": 1,
            "intermediate_layers_indices": [0],
            "supported_aspect_ratios": [[1, 1]],
            "max_num_tiles": 1,
            "vision_output_dim": 2 * WIDTH,
        },
        "text_config": {"cross_attention_layers": [1], "rope_parameters": _PLAIN},
    },
    "molmo2": {
        "vision_config": {"image_size": [SIDE, SIDE], "num_position_embeddings": 16},
        "adapter_config": {"vision_feature_layer": [-1, -2]},
    },
    "muse_glimmer": {"out_hidden_size": 4 * WIDTH},
    "muse_spark": {
        "out_hidden_size": 4 * WIDTH,
        "audio_config": {"patch_sizes": [4, 2], "hidden_sizes": [16, 32], "depths": [1, 1]},
    },
    "nemo_speechlm": {
        "audio_config": {
            "asr_config": {"num_key_value_heads": 4},
            "diarization_config": {"audio_config": {"num_key_value_heads": 4}},
        },
        "word_timestamp_config": {"blank_token_id": IMAGE, "num_key_value_heads": 4},
    },
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2, "patch_dim": 48, "video_patch_dim": 96},
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "audio_token_id": AUDIO,
    },
    "qwen2_5_omni_thinker": _OMNI | _WINDOW | {"text_config": _rope(1, 1, 2)},
    "qwen2_5_vl": _WINDOW | {"text_config": _rope(1, 1, 2)},
    "qwen2_audio": {"audio_token_id": AUDIO},
    "qwen2_vl": {"text_config": _rope(1, 1, 2)},
    "qwen3_omni_moe_thinker": _OMNI | _DEEP,
    "step3p7": {"text_config": {"sliding_window": 8}},
    "unlimited_ocr": {"vision_config": {"sam_config": _SAM | {"downsample_channels": [32, 32]}}},
    "vipllava": {"vision_feature_layer": [-2, -1]},
    **_all("vision-encoder-decoder speech-encoder-decoder", _CROSSED),
    "voxtral": _WIDE_SOUND,
    "voxtral_realtime": _WIDE_SOUND,
    **_all("exaone4_5 hyperclovax_vision_v2", _WINDOW),
    **_all("glm46v glm4v glm4v_moe glm_ocr glmga", _GLM4V),
    **_all("qwen3_vl qwen3_vl_moe cosmos3_omni", _DEEP),
}


def media(kind: str, config: Any, names: Any) -> list[tuple[int, Format]]:
    """Return the formats of what a model takes beside text, each with its token."""
    if kind in FAMILIES:
        return [FAMILIES[kind]]
    found: list[tuple[int, Format]] = []
    if "image_grid_thw" in names:
        found.append((IMAGE, grids))
    elif "target_sizes" in names:
        found.append((IMAGE, strips))
    elif "spatial_shapes" in names or "image_position_ids" in names:
        found.append((IMAGE, patches))
    elif "pixel_values" in names:
        found.append((IMAGE, images))
    has_sound = getattr(config, "audio_config", True) is not None
    if "input_features" in names and has_sound:
        found.append((AUDIO, sounds))
    elif "input_values" in names:
        found.append((AUDIO, waves))
    return found


def batch(kind: str, model: Any) -> Batch:
    """Return rows of text with an image or sound in each, of which the second is padded on its right."""
    names = inspect.signature(model.forward).parameters
    made: Batch = {}
    tokens: list[tuple[int, list[int]]] = []
    for token, formats in media(kind, model.config, names):
        given, found = suited(kind, model, token, formats)
        made |= {name: x for name, x in given.items() if name in names}
        if found is not None:
            tokens.append((token, found))
    return made | text(kind, model, made, tokens)


def suited(kind: str, model: Any, token: int, formats: Format) -> tuple[Batch, list[int] | None]:
    """Return the first format that the model's tower takes, and how many tokens each row has of it."""
    failed: Exception | None = None
    for given in formats(model):
        if kind in PLACES:
            return given, PLACES[kind]
        try:
            return given, counts(model, given, {IMAGE: "image", VIDEO: "video", AUDIO: "audio"}[token])
        except Exception as error:
            failed = failed or error
    assert failed is not None
    raise failed


def counts(model: Any, given: Batch, word: str) -> list[int] | None:
    """Run a tower: return the tokens of each row, or None if they have no place in the text."""
    for owner in (model.base_model, model, getattr(model, "thinker", None)):
        method = getattr(owner, f"get_{word}_features", None)
        if method is not None:
            return _rows(_run(method, given))
    if model.config.is_encoder_decoder:
        _run(model.get_encoder(), given)
    return None


def _run(function: Any, given: Batch) -> Any:
    names = inspect.signature(getattr(function, "forward", function)).parameters
    with torch.no_grad():
        return function(**{name: x for name, x in given.items() if name in names})


def _rows(found: Any) -> list[int]:
    for name in ("pooler_output", "last_hidden_state"):
        if getattr(found, name, None) is not None:
            found = getattr(found, name)
            break
    else:
        if getattr(found, "deepstack_features", None) is not None:
            found = found.deepstack_features[0][1]
    if isinstance(found, Tensor) and found.dim() == 2:
        return [len(found) // ROWS] * ROWS
    if len(found) > ROWS:  # tiles, of as many in each row
        each = len(found) // ROWS
        return [sum(x.numel() // x.shape[-1] for x in found[i * each : (i + 1) * each]) for i in range(ROWS)]
    return [x.numel() // x.shape[-1] for x in found]


def text(kind: str, model: Any, made: Batch, tokens: list[tuple[int, list[int]]]) -> Batch:
    """Return ids with so many placeholders, and what goes with them."""
    names = inspect.signature(model.forward).parameters
    extra = max((sum(found[row] + 2 for _, found in tokens) for row in range(ROWS)), default=0)
    length = TEXT + extra + extra % 2  # odd
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, FIRST_SPECIAL, (ROWS, length), generator=generator)
    types = torch.zeros_like(ids)
    for row in range(ROWS):
        at = 5 + row
        for token, found in tokens:
            ids[row, at] = SOUND_START if token == AUDIO else START
            ids[row, at + 1 : at + 1 + found[row]] = token
            types[row, at + 1 : at + 1 + found[row]] = {IMAGE: 1, VIDEO: 2, AUDIO: 3}[token]
            ids[row, at + 1 + found[row]] = SOUND_END if token == AUDIO else END
            at += found[row] + 2
    mask = torch.ones_like(ids)
    mask[1, -PADDING:] = 0
    ids = ids.masked_fill(mask == 0, 0)
    labels = ids.masked_fill((mask == 0) | (ids >= FIRST_SPECIAL), -100)
    if kind == "pp_formulanet":
        return {"labels": labels, "decoder_input_ids": ids}
    if model.config.is_encoder_decoder and not tokens and kind != "udop":  # whose encoder reads media alone
        return {"labels": labels}
    placed = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    placed |= {"mm_token_type_ids": types.int(), "token_type_ids": (types == 1).int()}
    if kind.startswith("kosmos"):
        images_at = torch.zeros_like(ids)
        images_at[:, 3 : 3 + model.config.latent_query_num] = 1
        placed["image_embeds_position_mask"] = images_at
    placed["image_attention_mask"] = torch.ones(ROWS, length, 1, dtype=torch.long)
    placed["bbox"] = torch.tensor([1, 2, 5, 7]).expand(ROWS, length, 4) / 10
    return {name: x for name, x in placed.items() if name in names and name not in made}
