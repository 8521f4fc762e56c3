"""Tiny diffusion transformers with random weights, their inputs, and a comparison with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import conftest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import spar
from spar.integrations.diffusers import disable, enable

Group = dist.ProcessGroup
Inputs = dict[str, Any]
HEADS, WIDTH = 3, 12

# ranks are forked from a process that has imported them
conftest.PRELOAD += [
    f"diffusers.models.transformers.transformer_{name}" for name in ("wan", "flux", "sd3")
]


def wan(**config: Any) -> nn.Module:
    from diffusers import WanTransformer3DModel

    sizes = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH, "in_channels": 4, "out_channels": 4}
    sizes |= {"text_dim": 8, "freq_dim": 8, "ffn_dim": 16, "num_layers": 2, "rope_max_seq_len": 32}
    return _drawn(WanTransformer3DModel(**sizes | config))


def flux(**config: Any) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    sizes = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_attention_heads": HEADS}
    sizes |= {"attention_head_dim": WIDTH, "joint_attention_dim": 8, "pooled_projection_dim": 8}
    return _drawn(FluxTransformer2DModel(**sizes | {"axes_dims_rope": (4, 4, 4)} | config))


def sd3(**config: Any) -> nn.Module:
    from diffusers import SD3Transformer2DModel

    sizes = {"sample_size": 10, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    sizes |= {"attention_head_dim": WIDTH, "num_attention_heads": HEADS, "joint_attention_dim": 8}
    sizes |= {"caption_projection_dim": HEADS * WIDTH, "pooled_projection_dim": 8, "pos_embed_max_size": 8}
    return _drawn(SD3Transformer2DModel(**sizes | config))


def _drawn(model: nn.Module) -> nn.Module:
    """Draw all parameters, also those that begin as zeros or ones; equally on each rank."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            spread = parameter.size(-1) ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_(values * spread + float("norm" in name and parameter.dim() == 1))
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


def _draw(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


def trained(model: nn.Module, inputs: Inputs, average: Group | None = None) -> list[Tensor]:
    """Return the output, and each parameter's gradient; averaged over a group, as DDP does.

    The output is a tuple's only tensor, or a dataclass's.
    """
    model.zero_grad()
    output = model(**inputs)
    sample = output[0]
    target = _draw(9)(*sample.shape)
    (sample - target).square().mean().backward()
    found = [sample.detach()]
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if average is not None:
            dist.all_reduce(gradient, group=average)
            gradient /= average.size()
        found.append(gradient)
    return found


def check_exact(group: Group, model: nn.Module, inputs: Inputs, plan: Any = None) -> None:
    """Train and run a model on the ranks, and compare the outputs and all gradients with one process."""
    expected = trained(model, inputs)
    assert sum(bool(gradient.any()) for gradient in expected) > len(expected) * 0.9
    enable(model, group, plan)
    compare(trained(model, inputs, group), expected, model)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)[0], expected[0], rtol=1e-5, atol=1e-5)
    disable(model)


def compare(found: list[Tensor], expected: list[Tensor], model: nn.Module) -> None:
    names = ["the output", *(name for name, _ in model.named_parameters())]
    for name, x, y in zip(names, found, expected, strict=True):
        scale = max(1.0, float(y.abs().max()))
        torch.testing.assert_close(x / scale, y / scale, rtol=0, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023


__all__ = ["Group", "Inputs", "check_exact", "compare", "disable", "enable", "flux", "flux_inputs"]
__all__ += ["sd3", "sd3_inputs", "spar", "trained", "wan", "wan_inputs"]
