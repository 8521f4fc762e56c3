# SPDX-License-Identifier: Apache-2.0
"""Images and sound in the formats in which the multimodal types of transformers take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Any]
Format = Callable[[Any], Iterator[Batch]]
SIDE, FRAMES, SAMPLES, ROWS = 16, 32, 1600, 2  # of an image, and of sound
IMAGE, VIDEO, AUDIO = 60, 59, 58  # the tokens that stand for them


def part(config: Any, *words: str) -> Any:
    """Return the config of a tower, such as "vision", or else the config."""
    for word in words:
        for name in config.sub_configs or {}:
            if word in name and getattr(config, name, None) is not None:
                return getattr(config, name)
    return config


def draw(model: Any, *shape: int) -> Tensor:
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _first(config: Any, names: str, default: Any) -> Any:
    values = (getattr(config, name, None) for name in names.split())
    found = next((value for value in values if value is not None), default)
    return found[0] if isinstance(found, list | tuple) else found


def grids(model: Any) -> Iterator[Batch]:
    """Yield patches of two images of different sizes, behind each other."""
    vision = part(model.config, "vision")
    side = _first(vision, "patch_size", 4)
    merge = _first(vision, "spatial_merge_size merge_size merge_kernel_size", 2)
    frames = _first(vision, "temporal_patch_size patch_temporal", 1)
    sizes = torch.tensor([[1, 2 * merge, 3 * merge], [1, 2 * merge, 2 * merge]])
    count = int(sizes.prod(1).sum())
    merges = {"image_merge_sizes": torch.tensor([merge] * ROWS)}
    for shape in (
        (count, 3 * frames * side**2),
        (count, 3 * side**2),
        (count, 3, side, side),
        (1, count, 3, side, side),
    ):
        yield {"pixel_values": draw(model, *shape), "image_grid_thw": sizes} | merges
    blocks = torch.tensor([[1, 2, 3], [1, 2, 2]])  # of patches that make a token
    pixels = draw(model, 10, merge * side, merge * side, 3)
    yield {"pixel_values": pixels, "image_grid_thw": blocks}


def images(model: Any) -> Iterator[Batch]:
    """Yield an image for each row, or tiles of one."""
    vision = part(model.config, "vision")
    side = _first(vision, "image_size", SIDE)
    sizes = {"image_sizes": torch.tensor([[side, side]] * ROWS)}
    for shape in ((ROWS, 3, side, side), (ROWS, 3, 3, side, side), (ROWS, 1, 3, side, side)):
        pixels = {"pixel_values": draw(model, *shape), "high_res_pixel_values": draw(model, *shape)}
        yield pixels
        yield pixels | sizes


def patches(model: Any) -> Iterator[Batch]:
    """Yield patches of an image for each row, of which the second has fewer."""
    vision = part(model.config, "vision")
    side = _first(vision, "model_patch_size patch_size", 4)
    factor = getattr(model.config, "downsample_factor", None) or _first(vision, "pooling_kernel_size", 1)
    shapes = torch.tensor([[factor * 2, factor * 4], [factor * 2, factor * 2]])
    most = int(shapes[0].prod())
    valid = torch.arange(most) < shapes.prod(1)[:, None]
    places = torch.arange(most).expand(ROWS, -1)
    grid = torch.stack([places % shapes[:, 1:], places // shapes[:, 1:]], -1)
    yield {
        "pixel_values": draw(model, ROWS, most, 3 * side**2),
        "spatial_shapes": shapes,
        "pixel_attention_mask": valid.long(),
        "image_position_ids": grid.masked_fill(~valid[..., None], -1),
    }


def strips(model: Any) -> Iterator[Batch]:
    """Yield patches side by side, as one image of a patch's height."""
    side = _first(part(model.config, "vision"), "patch_size", 4)
    sizes = torch.tensor([[4, 8], [4, 4]], dtype=torch.int32)
    width = side * int(sizes.prod(1).sum())
    yield {"pixel_values": draw(model, 1, 3, side, width), "target_sizes": sizes}


def sounds(model: Any) -> Iterator[Batch]:
    """Yield a spectrum for each row."""
    audio = part(model.config, "audio", "encoder")
    bins = _first(audio, "num_mel_bins mel_bins n_mels input_feat_per_channel input_dim", 8)
    for frames, count in ((FRAMES, bins), (200, bins), (FRAMES, 7 * bins), (FRAMES, 160)):
        mask = torch.ones(ROWS, frames, dtype=torch.long)
        masks = {"feature_attention_mask": mask, "input_features_mask": mask, "padding_mask": mask}
        for shape in ((ROWS, count, frames), (ROWS, frames, count)):
            yield {"input_features": draw(model, *shape)} | masks
            yield {"input_features": draw(model, *shape)} | {name: x.bool() for name, x in masks.items()}


def waves(model: Any) -> Iterator[Batch]:
    yield {"input_values": draw(model, ROWS, SAMPLES)}
    mask = torch.ones(ROWS, SAMPLES, dtype=torch.long)
    yield {"input_values": draw(model, ROWS, 1, SAMPLES), "padding_mask": mask}


def _fuyu(model: Any) -> Iterator[Batch]:
    yield {"pixel_values": draw(model, ROWS, 16, 3 * 4 * 4)}


def _masked_tiles(model: Any) -> Iterator[Batch]:
    pixels = draw(model, ROWS, 2, 3, SIDE, SIDE)
    mask = torch.ones(ROWS, 2, dtype=torch.bool)
    yield {"pixel_values": pixels, "pixel_attention_mask": mask}


def _questions(model: Any) -> Iterator[Batch]:
    """Yield images with a text for the tokens that ask them."""
    ids = torch.arange(5, 14).expand(ROWS, -1)
    extra = {"qformer_input_ids": ids, "qformer_attention_mask": torch.ones_like(ids)}
    yield {"pixel_values": draw(model, ROWS, 3, SIDE, SIDE)} | extra


def _videos(model: Any) -> Iterator[Batch]:
    for found in _questions(model):
        yield found | {"pixel_values": draw(model, ROWS, 4, 3, SIDE, SIDE)}


def _crossed_tiles(model: Any) -> Iterator[Batch]:
    yield {
        "pixel_values": draw(model, ROWS, 1, 1, 3, SIDE, SIDE),
        "aspect_ratio_ids": torch.ones(ROWS, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(ROWS, 1, 1, dtype=torch.long),
    }


def _flat_patches(model: Any) -> Iterator[Batch]:
    """Yield patches, each behind its row and column."""
    side = _first(part(model.config, "vision"), "patch_size", 4)
    places = torch.arange(1, 17)
    at = torch.stack([(places - 1) // 4 + 1, (places - 1) % 4 + 1], -1).expand(ROWS, -1, -1)
    yield {"flattened_patches": torch.cat([at, draw(model, ROWS, 16, 3 * side**2)], -1)}


def _proteins(model: Any) -> Iterator[Batch]:
    ids = torch.randint(5, 20, (ROWS, 11), generator=torch.Generator().manual_seed(2))
    yield {"protein_input_ids": ids, "protein_attention_mask": torch.ones_like(ids)}


def _pooled(model: Any) -> Iterator[Batch]:
    """Yield patches of two crops, and which of them make a token."""
    indexes = torch.arange(16).view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)
    yield {
        "pixel_values": draw(model, 2, 16, 3 * 4 * 4),
        "image_token_pooling": torch.cat([indexes, indexes + 16]),
        "image_grids": torch.tensor([[2, 2, 0, 0]] * ROWS),
    }


def _crops(model: Any) -> Iterator[Batch]:
    yield {
        "image_pixel_values": draw(model, ROWS, 2, 3, SIDE, SIDE),
        "image_sizes": torch.tensor([[SIDE, SIDE]] * ROWS),
        "image_attention_mask": torch.ones(ROWS, 2, 4, 4, dtype=torch.bool),
    }


def _robot(model: Any) -> Iterator[Batch]:
    chunk = model.config.chunk_size
    actions = draw(model, ROWS, chunk, 32)
    yield {
        "pixel_values": draw(model, ROWS, 1, 3, SIDE, SIDE),
        "pixel_attention_mask": torch.ones(ROWS, 1, dtype=torch.bool),
        "state": draw(model, ROWS, 32),
        "actions": actions,
        "noise": actions.flip(0),
        "timestep": torch.tensor([0.3, 0.6], dtype=actions.dtype),
    }


def _one_image(model: Any) -> Iterator[Batch]:
    yield {"pixel_values": draw(model, ROWS, 1, 3, SIDE, SIDE)}


def _sized_grids(model: Any) -> Iterator[Batch]:
    sizes = torch.tensor([[4, 6], [4, 4]])
    yield {"pixel_values": draw(model, 40, 3 * 4 * 4), "image_grid_hw": sizes}


def _boxed_image(model: Any) -> Iterator[Batch]:
    yield {"pixel_values": draw(model, ROWS, 3, SIDE, SIDE)}


def _embedded_sound(model: Any) -> Iterator[Batch]:
    yield {"input_features": draw(model, ROWS, FRAMES, model.config.d_model)}


def _unmasked_sound(model: Any) -> Iterator[Batch]:
    yield {"input_features": draw(model, ROWS, FRAMES, 8)}


def _sound_of_each_token(model: Any) -> Iterator[Batch]:
    yield {"input_features": draw(model, ROWS, 8, 8 * 17)}


FAMILIES: dict[str, tuple[int, Format]] = {
    "evolla": (IMAGE, _proteins),
    "fuyu": (IMAGE, _fuyu),
    "granite_docling": (IMAGE, _masked_tiles),
    "granite_speech": (AUDIO, _unmasked_sound),
    "granite_speech_plus": (AUDIO, _unmasked_sound),
    "idefics": (IMAGE, _one_image),
    "instructblip": (IMAGE, _questions),
    "instructblipvideo": (VIDEO, _videos),
    "kosmos-2.5": (IMAGE, _flat_patches),
    "mllama": (IMAGE, _crossed_tiles),
    "molmo2": (VIDEO, _pooled),
    "nemotron_h_omni": (IMAGE, _sized_grids),
    "phi4_multimodal": (IMAGE, _crops),
    "pi0": (IMAGE, _robot),
    "pix2struct": (IMAGE, _flat_patches),
    "pop2piano": (AUDIO, _embedded_sound),
    "speech-encoder-decoder": (AUDIO, waves),
    "udop": (IMAGE, _boxed_image),
    "voxtral_realtime": (AUDIO, _sound_of_each_token),
}
# Tokens of each row, where no method of the model returns its features; None: they have no place in the text.
PLACES: dict[str, list[int] | None] = {
    "kosmos-2.5": None,
    "phi4_multimodal": [13, 13],
    "pi0": [16, 16],
    "molmo2": [4, 4],
    "pix2struct": None,
    "qwen2_audio": [8, 8],
    "pop2piano": None,
    "speech-encoder-decoder": None,
    "udop": None,
    "voxtral_realtime": None,
}
