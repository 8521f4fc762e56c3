# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers that take images or sound, with random weights and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Batch = dict[str, Any]
VOCABULARY, IMAGE, TOKENS, ROWS = 64, 63, 41, 2
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 62,
    "vision_start_token_id": 61,
    "vision_end_token_id": 60,
}
GRIDS = [[1, 4, 6], [1, 6, 8]]  # patches of two images, of which four make a token
AUDIO: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 16,
}


def _draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _ids(*images: int, token: int = IMAGE) -> Tensor:
    """Return ids of rows with so many tokens of an image in each."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 59, (ROWS, TOKENS), generator=generator)
    for row, count in enumerate(images):
        ids[row, 3 + row : 3 + row + count] = token
    return ids


def _rope(sections: list[int]) -> Batch:
    return {"rope_type": "default", "mrope_section": sections, "rope_theta": 10000.0}


def _class(name: str, config: Batch) -> nn.Module:
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    model: nn.Module = kind(kind.config_class(**config))
    return model


def llava() -> tuple[nn.Module, Batch]:
    config = {"vision_config": VISION | {"model_type": "clip_vision_model"}, "image_token_id": IMAGE}
    config |= {"text_config": TEXT | {"model_type": "llama"}, "vision_feature_layer": -2}
    return _class("Llava", config), {"input_ids": _ids(16, 16), "pixel_values": _draw(ROWS, 3, 16, 16)}


def qwen2_vl() -> tuple[nn.Module, Batch]:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    text = TEXT | {"rope_parameters": _rope([1, 1, 2])}
    return _class("Qwen2VL", {"text_config": text, "vision_config": vision} | QWEN_TOKENS), _grids()


def qwen3_vl() -> tuple[nn.Module, Batch]:
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "patch_size": 4}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    text = TEXT | {"head_dim": 8, "rope_parameters": _rope([2, 1, 1])}
    return _class("Qwen3VL", {"text_config": text, "vision_config": vision} | QWEN_TOKENS), _grids()


def _grids() -> Batch:
    """Two images of different sizes, one in each row."""
    patches = [rows * columns for _, rows, columns in GRIDS]
    ids = _ids(*[count // 4 for count in patches])
    return {
        "input_ids": ids,
        "pixel_values": _draw(sum(patches), 3 * 2 * 16),
        "image_grid_thw": torch.tensor(GRIDS),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def one_image() -> tuple[nn.Module, Batch]:
    """Qwen3-VL with an image in one row alone, and padding in the other."""
    model, batch = qwen3_vl()
    ids = _ids(0, GRIDS[1][1] * GRIDS[1][2] // 4)
    ids[0, -7:] = 0
    mask = torch.ones_like(ids)
    mask[0, -7:] = 0
    patches = GRIDS[0][1] * GRIDS[0][2]
    batch |= {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == IMAGE).int()}
    return model, batch | {
        "pixel_values": batch["pixel_values"][patches:],
        "image_grid_thw": torch.tensor(GRIDS[1:]),
    }


def gemma3() -> tuple[nn.Module, Batch]:
    """Bidirectional attention inside of images, and windows."""
    config = {"text_config": TEXT | {"head_dim": 8, "sliding_window": 8}, "mm_tokens_per_image": 4}
    config |= {"vision_config": VISION | {"vision_use_head": False}, "image_token_id": IMAGE}
    ids = _ids(4, 4)
    batch = {"input_ids": ids, "pixel_values": _draw(ROWS, 3, 16, 16), "token_type_ids": (ids == IMAGE).int()}
    return _class("Gemma3", config), batch


def paligemma() -> tuple[nn.Module, Batch]:
    """A bidirectional prefix."""
    text = TEXT | {"model_type": "gemma", "head_dim": 8}
    config = {"text_config": text, "projection_dim": 32, "hidden_size": 32, "image_token_id": IMAGE}
    config |= {"vision_config": VISION | {"vision_use_head": False, "projection_dim": 32}}
    ids = _ids(16, 16)
    types = (torch.arange(TOKENS) >= 25).int().expand(ROWS, -1)
    batch = {"input_ids": ids, "pixel_values": _draw(ROWS, 3, 16, 16), "token_type_ids": types}
    return _class("PaliGemma", config), batch


def internvl() -> tuple[nn.Module, Batch]:
    vision = VISION | {"image_size": [16, 16], "patch_size": [4, 4], "norm_type": "layer_norm"}
    config = {"vision_config": vision, "text_config": TEXT | {"model_type": "qwen2"}, "image_token_id": IMAGE}
    return _class("InternVL", config | {"image_seq_length": 4}), {
        "input_ids": _ids(4, 4),
        "pixel_values": _draw(ROWS, 3, 16, 16),
    }


def idefics3() -> tuple[nn.Module, Batch]:
    config = {"vision_config": VISION, "text_config": TEXT | {"model_type": "llama"}, "image_token_id": IMAGE}
    return _class("Idefics3", config | {"scale_factor": 2}), {
        "input_ids": _ids(4, 4),
        "pixel_values": _draw(ROWS, 1, 3, 16, 16),
    }


def mllama() -> tuple[nn.Module, Batch]:
    """Layers of cross attention to the image."""
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 4}
    vision |= {"intermediate_size": 48, "vision_output_dim": 64, "image_size": 16, "patch_size": 4}
    vision |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]], "max_num_tiles": 1}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = TEXT | {"cross_attention_layers": [1], "pad_token_id": 0, "rope_parameters": rope}
    batch = {
        "input_ids": _ids(1, 1, token=62),
        "pixel_values": _draw(ROWS, 1, 1, 3, 16, 16),
        "aspect_ratio_mask": torch.ones(ROWS, 1, 1, dtype=torch.long),
        "aspect_ratio_ids": torch.ones(ROWS, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(ROWS, TOKENS, 1, 1, dtype=torch.long),
    }
    return _class("Mllama", {"vision_config": vision, "text_config": text, "image_token_index": IMAGE}), batch


def qwen2_audio() -> tuple[nn.Module, Batch]:
    config = {"audio_config": AUDIO | {"model_type": "qwen2_audio_encoder"}, "audio_token_index": IMAGE}
    ids = _ids(8, 8)
    batch = {
        "input_ids": ids,
        "input_features": _draw(ROWS, 8, 32),
        "feature_attention_mask": torch.ones(ROWS, 32, dtype=torch.long),
        "attention_mask": torch.ones_like(ids),
    }
    config |= {"text_config": TEXT | {"model_type": "qwen2"}, "audio_token_id": IMAGE}
    return _class("Qwen2Audio", config), batch


def whisper() -> tuple[nn.Module, Batch]:
    config = AUDIO | {"vocab_size": VOCABULARY, "decoder_layers": 2, "decoder_attention_heads": 4}
    config |= {"decoder_ffn_dim": 48, "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1}
    config |= {"eos_token_id": 2, "decoder_start_token_id": 1}
    return _class("Whisper", config), {"input_features": _draw(ROWS, 8, 32), "labels": _ids()}


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    make.__name__: make
    for make in (
        llava,
        qwen2_vl,
        qwen3_vl,
        one_image,
        gemma3,
        paligemma,
        internvl,
        idefics3,
        mllama,
        qwen2_audio,
        whisper,
    )
}


def made(name: str) -> tuple[nn.Module, Batch]:
    """Return a model in float64, its weights drawn alike on all ranks, and its batch with labels."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    ids = batch.get("input_ids")
    if ids is not None:
        labels = ids.masked_fill((ids > 59) | (ids == 0), -100)
        batch = batch | {"labels": labels, "use_cache": False}
    return model.double().eval(), batch
