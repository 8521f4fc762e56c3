# SPDX-License-Identifier: Apache-2.0
"""The peak of the memory of a rank's tensors while an autoencoder decodes.

Resident memory would not do: for some shapes libraries allocate as much scratch memory as all tensors have.
"""

from __future__ import annotations

import gc
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from spar import parallelize


def peak(rank: int, world: int, group: dist.ProcessGroup, name: str) -> float:
    """Return the peak in MiB of a decoder whose rows are divided among the ranks."""
    torch.manual_seed(1)
    model, shape = _model(name)
    if world > 1:
        parallelize(model, group)
    with torch.no_grad():
        model.decode(torch.randn(*shape[:-2], 4, 4))
        latents = torch.randn(shape)
        gc.collect()  # what was there before is not counted, nor may its end be
        with torch.profiler.profile(profile_memory=True) as profile:
            model.decode(latents)
    events = profile.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return float(max(accumulate([size for _, size in sorted(changes)])) / 2**20)


def _model(name: str) -> tuple[Any, tuple[int, ...]]:
    """Return a model and the shape of latents.

    Videos have so few rows that torch convolves all by one kernel, which copies them: on a CPU another runs
    from 20,480 lines on, without that copy, and a rank's half would need more memory than the whole.
    """
    import diffusers

    sizes: dict[str, Any] = {"latent_channels": 4, "norm_num_groups": 8, "layers_per_block": 1}
    if name == "kl":
        sizes |= {"down_block_types": ("DownEncoderBlock2D",) * 3, "block_out_channels": (32,) * 3}
        sizes |= {"up_block_types": ("UpDecoderBlock2D",) * 3}
        return diffusers.AutoencoderKL(**sizes), (1, 4, 64, 64)
    if name == "hunyuan":
        sizes |= {"down_block_types": ("HunyuanVideoDownBlock3D",) * 4, "block_out_channels": (16,) * 4}
        sizes |= {"up_block_types": ("HunyuanVideoUpBlock3D",) * 4, "mid_block_add_attention": False}
        return diffusers.AutoencoderKLHunyuanVideo(**sizes), (1, 4, 3, 14, 32)
    sizes = {"base_dim": 48, "z_dim": 4, "dim_mult": [1, 1, 1], "num_res_blocks": 1}
    sizes |= {"temperal_downsample": [False, True], "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    return diffusers.AutoencoderKLWan(**sizes), (1, 4, 2, 12, 96)
