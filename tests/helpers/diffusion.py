# SPDX-License-Identifier: Apache-2.0
"""Tiny diffusion transformers with random weights, their inputs, and a comparison with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spar import parallelize, unparallelize
from spar._model.report import Report

from .averages import gradients

Group = dist.ProcessGroup
Inputs = dict[str, Any]
HEADS, WIDTH = 3, 12

# ranks are forked from a process that has imported these
_MODELS = ("wan", "flux", "sd3", "chronoedit", "flux2", "ltx", "qwenimage")
_MODELS += ("hunyuan_video",)
PRELOAD = [f"diffusers.models.transformers.transformer_{name}" for name in _MODELS]
PRELOAD += ["diffusers.models.transformers.cogvideox_transformer_3d"]
PRELOAD += ["torch._dynamo.backends.debugging", "torch._inductor.ir"]  # for flex attention


def wan(**config: Any) -> nn.Module:
    sizes = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH, "in_channels": 4, "out_channels": 4}
    sizes |= {"text_dim": 8, "freq_dim": 8, "ffn_dim": 16, "num_layers": 2, "rope_max_seq_len": 32}
    return _made("WanTransformer3DModel", sizes | config)


def chrono_edit() -> nn.Module:
    sizes = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH, "in_channels": 4, "out_channels": 4}
    sizes |= {"text_dim": 8, "freq_dim": 8, "ffn_dim": 16, "num_layers": 2, "rope_max_seq_len": 32}
    return _made("ChronoEditTransformer3DModel", sizes)


def flux(**config: Any) -> nn.Module:
    sizes = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_attention_heads": HEADS}
    sizes |= {"attention_head_dim": WIDTH, "joint_attention_dim": 8, "pooled_projection_dim": 8}
    return _made("FluxTransformer2DModel", sizes | {"axes_dims_rope": (4, 4, 4)} | config)


def flux2() -> nn.Module:
    sizes = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_attention_heads": HEADS}
    sizes |= {"attention_head_dim": WIDTH, "joint_attention_dim": 8, "timestep_guidance_channels": 8}
    return _made("Flux2Transformer2DModel", sizes | {"axes_dims_rope": (4, 4, 2, 2)})


def sd3(**config: Any) -> nn.Module:
    sizes = {"sample_size": 10, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    sizes |= {"attention_head_dim": WIDTH, "num_attention_heads": HEADS, "joint_attention_dim": 8}
    sizes |= {"caption_projection_dim": HEADS * WIDTH, "pooled_projection_dim": 8, "pos_embed_max_size": 8}
    return _made("SD3Transformer2DModel", sizes | config)


def ltx() -> nn.Module:
    sizes = {"in_channels": 4, "out_channels": 4, "num_attention_heads": HEADS, "attention_head_dim": WIDTH}
    sizes |= {"cross_attention_dim": HEADS * WIDTH, "num_layers": 2, "caption_channels": 8}
    return _made("LTXVideoTransformer3DModel", sizes)


def qwen_image() -> nn.Module:
    sizes = {"patch_size": 2, "in_channels": 4, "out_channels": 1, "num_layers": 2, "joint_attention_dim": 8}
    sizes |= {"attention_head_dim": WIDTH, "num_attention_heads": HEADS, "axes_dims_rope": (4, 4, 4)}
    return _made("QwenImageTransformer2DModel", sizes)


def hunyuan_video() -> nn.Module:
    sizes = {"in_channels": 4, "out_channels": 4, "num_attention_heads": HEADS, "attention_head_dim": WIDTH}
    sizes |= {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 8}
    sizes |= {"pooled_projection_dim": 8, "guidance_embeds": False}
    return _made("HunyuanVideoTransformer3DModel", sizes | {"rope_axes_dim": (4, 4, 4)})


def cogvideox() -> nn.Module:
    """It does not call diffusers' dispatcher."""
    sizes = {"in_channels": 4, "out_channels": 4, "num_attention_heads": HEADS, "attention_head_dim": 16}
    sizes |= {"time_embed_dim": 8, "text_embed_dim": 8, "num_layers": 2, "max_text_seq_length": 7}
    return _made("CogVideoXTransformer3DModel", sizes | {"sample_width": 10, "sample_height": 2})


def flux_control_net() -> nn.Module:
    sizes = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_attention_heads": HEADS}
    sizes |= {"attention_head_dim": WIDTH, "joint_attention_dim": 8, "pooled_projection_dim": 8}
    return _made("FluxControlNetModel", sizes | {"axes_dims_rope": (4, 4, 4)})


def _made(name: str, config: dict[str, Any]) -> nn.Module:
    import diffusers

    return drawn(getattr(diffusers, name)(**config))


def drawn(model: nn.Module) -> nn.Module:
    """Draw all parameters, also those that begin as zeros or ones; equally on each rank."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            spread = parameter.size(-1) ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_(values * spread + float("norm" in key and parameter.dim() == 1))
    return model


def wan_inputs(size: tuple[int, int, int] = (5, 2, 10), text: int = 7, batch: int = 2) -> Inputs:
    """By default 5 x 1 x 5 = 25 tokens."""
    draw = _draw(1)
    return {
        "hidden_states": draw(batch, 4, *size),
        "timestep": torch.arange(batch) * 100 + 50,
        "encoder_hidden_states": draw(batch, text, 8),
    }


def flux_inputs(image: tuple[int, int] = (5, 5), text: int = 7, batch: int = 2) -> Inputs:
    draw, (height, width) = _draw(2), image
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return {
        "hidden_states": draw(batch, height * width, 4),
        "timestep": (torch.arange(batch) * 100 + 50) / 1000,
        "encoder_hidden_states": draw(batch, text, 8),
        "pooled_projections": draw(batch, 8),
        "img_ids": torch.stack([torch.zeros(height, width), rows, columns], 2).view(-1, 3),
        "txt_ids": torch.zeros(text, 3),
    }


def sd3_inputs(image: tuple[int, int] = (10, 10), text: int = 7, batch: int = 2) -> Inputs:
    draw = _draw(3)
    return {
        "hidden_states": draw(batch, 4, *image),
        "timestep": torch.arange(batch) * 100 + 50,
        "encoder_hidden_states": draw(batch, text, 8),
        "pooled_projections": draw(batch, 8),
    }


def ltx_inputs(text: int = 7) -> Inputs:
    draw, mask = _draw(4), torch.ones(2, text)
    mask[1, 4:] = 0
    return {
        "hidden_states": draw(2, 25, 4),
        "timestep": torch.tensor([100, 500]),
        "encoder_hidden_states": draw(2, text, 8),
        "encoder_attention_mask": mask,
    } | {"num_frames": 1, "height": 5, "width": 5}


def qwen_image_inputs(masked: bool = True) -> Inputs:
    draw, mask = _draw(5), torch.ones(2, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    return {
        "hidden_states": draw(2, 25, 4),
        "timestep": torch.tensor([0.1, 0.5]),
        "encoder_hidden_states": draw(2, 7, 8),
        "encoder_hidden_states_mask": mask if masked else None,
        "img_shapes": [[(1, 5, 5)]] * 2,
    }


def flux2_inputs() -> Inputs:
    draw, at = _draw(6), torch.arange(25)
    text = torch.zeros(2, 7, 4)
    text[:, :, 3] = torch.arange(7)
    return {
        "hidden_states": draw(2, 25, 4),
        "timestep": torch.tensor([0.1, 0.5]),
        "encoder_hidden_states": draw(2, 7, 8),
        "img_ids": torch.stack([at * 0, at // 5, at % 5, at * 0], 1).float().expand(2, -1, -1),
        "txt_ids": text,
        "guidance": torch.tensor([1.0, 2.0]),
    }


def hunyuan_video_inputs() -> Inputs:
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    inputs = wan_inputs((5, 2, 10)) | {"encoder_attention_mask": mask}
    return inputs | {"pooled_projections": _draw(7)(2, 8)}


def cogvideox_inputs() -> Inputs:
    """5 x 1 x 5 = 25 tokens."""
    draw = _draw(8)
    return {
        "hidden_states": draw(2, 5, 4, 2, 10),
        "timestep": torch.tensor([50, 150]),
        "encoder_hidden_states": draw(2, 7, 8),
    }


MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[..., Inputs]]] = {
    "wan": (wan, wan_inputs),
    "flux": (flux, flux_inputs),
    "sd3": (sd3, sd3_inputs),
    "chrono_edit": (chrono_edit, wan_inputs),
    "flux2": (flux2, flux2_inputs),
    "ltx": (ltx, ltx_inputs),
    "qwen_image": (qwen_image, qwen_image_inputs),
}
OTHERS: dict[str, tuple[Callable[..., nn.Module], Callable[..., Inputs]]] = {
    "hunyuan_video": (hunyuan_video, hunyuan_video_inputs),
    "cogvideox": (cogvideox, cogvideox_inputs),
}


def _draw(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


def loss_of(sample: Tensor) -> Tensor:
    """Return a loss that all ranks compute alike."""
    return (sample - _draw(9)(*sample.shape)).square().mean()


def trained(model: nn.Module, inputs: Inputs, average: Group | None = None) -> list[Tensor]:
    """Return the output, and each parameter's gradient, averaged over a group."""
    model.zero_grad()
    sample = model(**inputs)[0]
    loss_of(sample).backward()
    return [sample.detach(), *gradients(model, average)]


def check_exact(group: Group, model: nn.Module, inputs: Inputs, **options: Any) -> Report:
    """Train and run a model on the ranks, and compare the outputs and all gradients with one process."""
    expected = trained(model, inputs)
    used = sum(bool(gradient.any()) for gradient in expected)
    assert used > 0.5 * len(expected)  # some models have parameters that no output uses
    report = parallelize(model, group, **options)
    compare(trained(model, inputs, group), expected, model)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)[0], expected[0], rtol=1e-5, atol=1e-5)
    unparallelize(model)
    return report


def compare(found: list[Tensor], expected: list[Tensor], model: nn.Module) -> None:
    """Compare what `trained` returned, within 1e-5 of each tensor's largest element, or of 0.01."""
    names = ["the output", *(name for name, _ in model.named_parameters())]
    for name, x, y in zip(names, found, expected, strict=True):
        error = float((x - y).abs().max()) / max(0.01, float(y.abs().max()))
        assert error < 1e-5, (name, error)
