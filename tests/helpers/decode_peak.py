# SPDX-License-Identifier: Apache-2.0
"""Decode by an autoencoder in a fresh process, and print the peak of its tensors' memory, in MiB.

Resident memory would not do: for some shapes libraries allocate as much scratch memory as all tensors have.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any


def peak(world: int, name: str, folder: Path) -> float:
    """Return the largest rank's peak, of several processes that decode together."""
    command = [sys.executable, __file__, name, str(folder / f"meeting of {world} {name}"), str(world)]
    started = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(world)]
    return max([float(process.communicate(timeout=300)[0].split()[-1]) for process in started])


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


def _main(name: str, meeting: str, world: int, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from spar.integrations.diffusers import enable

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    torch.manual_seed(1)
    model, shape = _model(name)
    if world > 1:
        enable(model)
    with torch.no_grad():
        model.decode(torch.randn(*shape[:-2], 4, 4))
        latents = torch.randn(shape)
        with torch.profiler.profile(profile_memory=True) as profile:
            model.decode(latents)
    events = profile.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    print(max(accumulate([size for _, size in sorted(changes)])) / 2**20)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
