# SPDX-License-Identifier: Apache-2.0
"""Autoencoders of diffusers over rows: images, latents and gradients are those of one process.

Latents have 7 rows, which no number of ranks here divides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.averages import averaged
from helpers.decode_peak import peak
from torch import Tensor, nn

from spar import parallelize, unparallelize
from spar._model.report import Report

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
PRELOAD = [f"diffusers.models.autoencoders.autoencoder_kl{name}" for name in ("", "_wan", "_hunyuan_video")]


def kl(**config: Any) -> nn.Module:
    """As SD has it; that of Flux has no convolutions at the latents."""
    import diffusers

    sizes: dict[str, Any] = {"block_out_channels": (8, 8, 16), "latent_channels": 4, "norm_num_groups": 4}
    sizes |= {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    return made(diffusers.AutoencoderKL(layers_per_block=1, **sizes | config))


def wan(**config: Any) -> nn.Module:
    import diffusers

    sizes: dict[str, Any] = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1}
    sizes |= {"temperal_downsample": [False, True], "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    return made(diffusers.AutoencoderKLWan(**sizes | config))


def wan22() -> nn.Module:
    return wan(is_residual=True, patch_size=2, in_channels=12, out_channels=12)


def hunyuan(**config: Any) -> nn.Module:
    import diffusers

    sizes: dict[str, Any] = {"block_out_channels": (8, 8, 16, 16), "latent_channels": 4, "norm_num_groups": 4}
    sizes |= {"down_block_types": ("HunyuanVideoDownBlock3D",) * 4, "layers_per_block": 1}
    sizes |= {"up_block_types": ("HunyuanVideoUpBlock3D",) * 4}
    return made(diffusers.AutoencoderKLHunyuanVideo(**sizes | config))


def made(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            spread = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_(values * spread + float("norm" in key and parameter.dim() == 1))
    return model.double().eval()


# Each with the shapes of latents and of an image or a video.
MODELS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "kl": (kl, (2, 4, 7, 6), (2, 3, 28, 24)),
    "wan": (wan, (1, 4, 3, 7, 6), (1, 3, 5, 28, 24)),
    "wan22": (wan22, (1, 4, 2, 7, 6), (1, 3, 5, 56, 48)),
    "hunyuan": (hunyuan, (1, 4, 3, 7, 6), (1, 3, 9, 56, 48)),
}


def decoded(model: Any, z: Tensor) -> Tensor:
    out: Tensor = model.decode(z).sample
    return out


def encoded(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model.encode(x).latent_dist.parameters
    return out


def trained(model: nn.Module, run: Callable[..., Tensor], x: Tensor, group: Group | None) -> list[Tensor]:
    """Return the output, the gradient of the input, and the averaged gradients of the parameters."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = run(model, x)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    (out * weights).mean().backward()
    gradients = [t.grad.clone() for t in (x, *model.parameters()) if t.grad is not None]
    return [out.detach(), *(gradients if group is None else averaged(gradients, group))]


def check_exact(group: Group, model: nn.Module, run: Callable[..., Tensor], x: Tensor) -> Report:
    expected = trained(model, run, x, None)
    report = parallelize(model, group)
    found = trained(model, run, x, group)
    # Wan upsamples in float32, in which gradients of parts, 3 times the whole's on 3 ranks, round otherwise.
    of_gradients = 1e-6 if "Wan" in type(model).__name__ else 1e-10
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        error = float((a - b).abs().max()) / max(0.01, float(b.abs().max()))
        assert error < (of_gradients if i else 1e-10), (i, error)
    with torch.no_grad():
        torch.testing.assert_close(run(model, x), expected[0], rtol=1e-10, atol=1e-10)
    unparallelize(model)
    return report


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def check_model(rank: int, world: int, group: Group, name: str) -> None:
    make, latents, images = MODELS[name]
    model = make()
    for run, shape in ((decoded, latents), (encoded, images)):
        report = check_exact(group, model, run, inputs(*shape))
        assert not report.functions, str(report)
        assert report.share < 1.1 / world, report  # latents have 7 rows, or 6 columns


@pytest.mark.parametrize("name", MODELS)
def test_autoencoders_are_exact(ranks: Ranks, name: str) -> None:
    ranks(3, check_model, name)


def check_options(rank: int, world: int, group: Group) -> None:
    model = kl()
    model.enable_slicing()  # type: ignore[operator]
    check_exact(group, model, decoded, inputs(2, 4, 7, 6))
    model.enable_gradient_checkpointing()  # type: ignore[operator]
    check_exact(group, model.train(), decoded, inputs(1, 4, 7, 6))
    tiled = wan()
    tiled.enable_tiling(32, 32, 24, 24)  # type: ignore[operator]
    check_exact(group, tiled, decoded, inputs(1, 4, 2, 9, 6))
    framewise = hunyuan()
    check_exact(group, framewise, decoded, inputs(1, 4, 6, 4, 3))
    flux = kl(use_quant_conv=False, use_post_quant_conv=False)
    check_exact(group, flux, lambda model, x: model(x).sample, inputs(1, 3, 28, 24))


def test_options_are_exact(ranks: Ranks) -> None:
    ranks(2, check_options)


def check_odd_images(rank: int, world: int, group: Group) -> None:
    """30 rows are 15 behind the first stride, which the second one does not divide."""
    report = check_exact(group, kl(), encoded, inputs(1, 3, 30, 24))
    assert not report.functions


def check_few_rows(rank: int, world: int, group: Group) -> None:
    check_exact(group, kl(), decoded, inputs(1, 4, 3, 2))  # one row for each rank
    assert check_exact(group, kl(), decoded, inputs(1, 4, 1, 8)).share < 0.6  # columns
    assert check_exact(group, kl(), decoded, inputs(1, 4, 1, 1)).share == 1


def check_low_precision(rank: int, world: int, group: Group) -> None:
    for model, x in ((kl(), inputs(1, 4, 7, 6)), (wan(), inputs(1, 4, 2, 7, 6))):
        with torch.no_grad():
            expected = decoded(model, x)
            model.bfloat16()
            whole = decoded(model, x.bfloat16()).double()
            parallelize(model, group)
            found = decoded(model, x.bfloat16()).double()
        # As far from the right image as one process's
        assert (found - expected).square().mean() < 1.5 * (whole - expected).square().mean() + 1e-6


def check_sizes(rank: int, world: int, group: Group) -> None:
    check_odd_images(rank, world, group)
    check_few_rows(rank, world, group)
    check_low_precision(rank, world, group)


@pytest.mark.parametrize("world", [2, 3])
def test_sizes_and_types(ranks: Ranks, world: int) -> None:
    ranks(world, check_sizes)


@pytest.mark.parametrize("name", ["kl", "wan"])
def test_a_rank_of_two_needs_half_of_the_memory(ranks: Ranks, name: str) -> None:
    assert max(ranks(2, peak, name)) < 0.6 * ranks(1, peak, name)[0]


def sound() -> nn.Module:
    import diffusers

    sizes: dict[str, Any] = {"encoder_hidden_size": 4, "decoder_channels": 4, "decoder_input_channels": 4}
    return diffusers.AutoencoderOobleck(**sizes, downsampling_ratios=[2, 2], channel_multiples=[1, 2])


def check_errors(rank: int, world: int, group: Group) -> None:
    with pytest.raises(ValueError, match="AutoencoderOobleck has no decoder of 2-D or 3-D convolutions"):
        parallelize(sound(), group)
    model = kl()
    with pytest.raises(ValueError, match=r"blocks is .'decoder'.; expected None for an autoencoder"):
        parallelize(model, group, blocks=["decoder"])
    with pytest.raises(ValueError, match='method is "hybrid"; expected another for an autoencoder'):
        parallelize(model, group, method="hybrid")
    parallelize(model, group)
    with pytest.raises(ValueError, match="parallelized already"):
        parallelize(model, group)
    with pytest.raises(ValueError, match="another value on rank 1"):
        decoded(model, inputs(1, 4, 7, 6) + rank)
    unparallelize(model)
    assert not any(name.startswith("_spar") for module in model.modules() for name in vars(module))


def test_errors(ranks: Ranks) -> None:
    ranks(2, check_errors)
