# SPDX-License-Identifier: Apache-2.0
"""Run tiny diffusion transformers of diffusers over several ranks, and the same models in one process.

    torchrun --standalone --nproc-per-node 2 examples/diffusion.py

A Wan with random weights is trained for a few steps to move noise towards one clip, and samples it. Both runs
start from the same weights and noise, so their losses, weights and clips must agree. A HunyuanVideo computes
an output and all gradients; diffusers' own context parallelism has no plan for it. If anything differs, all
ranks exit with an error. Needs diffusers: pip install -e '.[models]'.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from typing import NamedTuple

import torch
import torch.distributed as dist
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoTransformer3DModel,
    WanTransformer3DModel,
)
from torch import Tensor, nn

import spar

TOLERANCE = 1e-4  # relative, of losses, weights and the clip in float32
FRAMES, HEIGHT, WIDTH = 5, 10, 14  # of the latents: 5 x 5 x 7 = 175 tokens, which no number of ranks divides
HEADS = 3
TEXT = 7  # tokens of the prompt
GUIDANCE = 2.0


class Result(NamedTuple):
    losses: list[float]
    weights: list[Tensor]
    clip: Tensor
    seconds: float


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--train-steps", type=int, default=20)
    parser.add_argument("--sample-steps", type=int, default=6)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --standalone --nproc-per-node 2 examples/diffusion.py")
    for name in ("train_steps", "sample_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    return args


def make_hunyuan() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=24,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        guidance_embeds=False,
        text_embed_dim=16,
        pooled_projection_dim=16,
        rope_axes_dim=(8, 8, 8),
    )
    return model


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same weights on all ranks
    model: nn.Module = WanTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=128,
        num_layers=2,
        rope_max_seq_len=32,
    )
    return model


def make_clip() -> Tensor:
    """Return latents [1, 4, frames, height, width] in which a wave moves to the right."""
    frame, row, column = torch.meshgrid(
        *(torch.arange(float(n)) for n in (FRAMES, HEIGHT, WIDTH)), indexing="ij"
    )
    waves = [torch.sin(0.4 * (column - 2 * frame) + 0.3 * channel * row) for channel in range(4)]
    return torch.stack(waves)[None]


def train(model: nn.Module, steps: int, prompt: Tensor) -> list[float]:
    """Learn the velocity from noise to the clip; every rank computes the same loss from the whole output."""
    noise_of = torch.Generator().manual_seed(1)  # the same noise and timesteps on all ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    clip, losses = make_clip().expand(2, -1, -1, -1, -1), []
    for _ in range(steps):
        noise, sigma = torch.randn(clip.shape, generator=noise_of), torch.rand(2, generator=noise_of)
        at = sigma.view(2, 1, 1, 1, 1)
        predicted = model(at * noise + (1 - at) * clip, 1000 * sigma, prompt).sample
        loss = (predicted - (noise - clip)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def sample(model: nn.Module, steps: int, prompt: Tensor) -> Tensor:
    """Denoise with classifier-free guidance: the prompt and no prompt are a batch of 2."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(steps)
    latents = torch.randn(make_clip().shape, generator=torch.Generator().manual_seed(2))
    for timestep in scheduler.timesteps:
        output = model(latents.expand(2, -1, -1, -1, -1), timestep.expand(2), prompt).sample
        wanted, unwanted = output.chunk(2)
        guided = unwanted + GUIDANCE * (wanted - unwanted)
        latents = scheduler.step(guided, timestep, latents, return_dict=False)[0]
    return latents


def run(args: Namespace, model: nn.Module, wrapped: nn.Module) -> Result:
    """wrapped: the model, or DDP around it, which averages gradients."""
    start = time.perf_counter()
    prompt = torch.randn(1, TEXT, 16, generator=torch.Generator().manual_seed(3))
    prompt = torch.cat([prompt, torch.zeros_like(prompt)])
    losses = train(wrapped, args.train_steps, prompt)
    clip = sample(model, args.sample_steps, prompt)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return Result(losses, weights, clip, time.perf_counter() - start)


def trained_once(model: nn.Module, world: int) -> tuple[Tensor, list[Tensor]]:
    """Return HunyuanVideo's output for two prompts, and its gradients averaged over the ranks."""
    draw = torch.Generator().manual_seed(4)
    mask = torch.ones(2, TEXT, dtype=torch.int64)
    mask[1, TEXT // 2 :] = 0
    output = model(
        hidden_states=make_clip().expand(2, -1, -1, -1, -1),
        timestep=torch.tensor([100, 700]),
        encoder_hidden_states=torch.randn(2, TEXT, 16, generator=draw),
        encoder_attention_mask=mask,
        pooled_projections=torch.randn(2, 16, generator=draw),
    ).sample
    (output - make_clip()).square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if world > 1:
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= world
    return output.detach(), gradients


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference, relative to each tensor's largest element."""
    pairs = zip(found, expected, strict=True)
    return max(float((x - y).abs().max() / y.abs().max().clamp(min=1e-3)) for x, y in pairs)


def main() -> int:
    args = parse_arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)

    model = make_model()
    spar.parallelize(model)
    sharded = run(args, model, nn.parallel.DistributedDataParallel(model))

    hunyuan = make_hunyuan()
    report = spar.parallelize(hunyuan)  # filled by the first forward
    output, gradients = trained_once(hunyuan, world)

    agrees = torch.ones(1)
    if rank == 0:
        plain = make_model()
        alone = run(args, plain, plain)
        whole_output, whole_gradients = trained_once(make_hunyuan(), 1)
        errors = {
            "losses": largest_error([torch.tensor(sharded.losses)], [torch.tensor(alone.losses)]),
            "weights": largest_error(sharded.weights, alone.weights),
            "clip": largest_error([sharded.clip], [alone.clip]),
            "HunyuanVideo's output": largest_error([output], [whole_output]),
            "HunyuanVideo's gradients": largest_error(gradients, whole_gradients),
        }
        tokens = FRAMES * (HEIGHT // 2) * (WIDTH // 2)
        shares = spar.cal_split_sizes(tokens, world)
        print(
            f"{tokens} tokens as {shares} on {world} ranks, {HEADS} heads, transport {spar.transport().name}"
        )
        print(f"loss {sharded.losses[0]:.4f} -> {sharded.losses[-1]:.4f} in {args.train_steps} steps")
        print(f"{world} ranks {sharded.seconds:.1f} s, one process {alone.seconds:.1f} s")
        print(f"HunyuanVideo: {report}")
        if HunyuanVideoTransformer3DModel._cp_plan is None:  # nor does enable_parallelism run on CPUs
            print("diffusers' own enable_parallelism has no plan for HunyuanVideo")
        for name, error in errors.items():
            print(f"largest relative difference of {name}: {error:.1e}")
        agrees[0] = float(all(error < TOLERANCE for error in errors.values()))
    dist.broadcast(agrees, 0)
    ok = bool(agrees.item())
    if rank == 0:
        print(
            f"Proved: {world} ranks train Wan, denoise a clip and differentiate HunyuanVideo as one process "
            f"does, within {TOLERANCE:.0e}"
            if ok
            else f"FAILED: {world} ranks and one process differ by more than {TOLERANCE:.0e}"
        )
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
