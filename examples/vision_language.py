# SPDX-License-Identifier: Apache-2.0
"""Train a tiny Qwen3-VL of transformers on images with text, over several ranks beside one process.

    torchrun --standalone --nproc-per-node 4 examples/vision_language.py

Each row has two images of different sizes, each of one of 8 patterns, and the text names them. The tower's
patches and the text's tokens are sharded. Both runs start from the same weights and batches, so their losses
must agree in each step. If they do not, all ranks exit with an error.
Needs transformers: pip install -e '.[models]'.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

import spar

TOLERANCE = 1e-4  # relative, of losses in float32
IMAGE, VIDEO, START, END, NAMES = 63, 62, 61, 60, 8  # names of patterns are the tokens from 0 on
PATCH, SIZES, ROWS = 4, ((6, 10), (8, 6)), 4  # sizes of the images of a row, in patches: 15 and 12 tokens


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=("ulysses", "gather", "ring"), help="of attention")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --standalone --nproc-per-node 4 examples/vision_language.py")
    if args.steps < 2:
        parser.error(f"--steps must be at least 2, got {args.steps}")
    return args


def make_model() -> Qwen3VLForConditionalGeneration:
    heads: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
    vision = heads | {"depth": 2, "num_heads": 4, "patch_size": PATCH, "spatial_merge_size": 2}
    vision |= {"temporal_patch_size": 1, "out_hidden_size": 64, "num_position_embeddings": 64}
    vision |= {"deepstack_visual_indexes": [0]}
    text = heads | {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    torch.manual_seed(0)
    config = Qwen3VLConfig(text_config=text, vision_config=vision, vision_end_token_id=END, **tokens)
    return Qwen3VLForConditionalGeneration(config)


def make_batch(step: int) -> dict[str, Any]:
    """Return rows of two images, each behind its text: the same whole batch on all ranks."""
    generator = torch.Generator().manual_seed(step)
    patterns = torch.randn(NAMES, 3 * PATCH * PATCH, generator=torch.Generator().manual_seed(0))
    names = torch.randint(NAMES, (ROWS, len(SIZES)), generator=generator)
    rows, pixels = [], []
    for row in names.tolist():
        tokens: list[int] = []
        for name, (height, width) in zip(row, SIZES, strict=True):
            noise = torch.randn(height * width, 3 * PATCH * PATCH, generator=generator)
            pixels.append(patterns[name] + 0.5 * noise)
            tokens += [START, *[IMAGE] * (height * width // 4), END, 10, name]
        rows.append(tokens)
    ids = torch.tensor(rows)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids >= NAMES, -100),  # the names alone
        "pixel_values": torch.cat(pixels),
        "image_grid_thw": torch.tensor([[1, height, width] for height, width in SIZES] * ROWS),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "use_cache": False,
    }


def train(model: Any, args: Namespace) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    losses = []
    for step in range(args.steps):
        loss: Tensor = model(**make_batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    known = [train(make_model(), args) if rank == 0 else []]
    dist.broadcast_object_list(known, src=0)
    (single,) = known
    begin = time.perf_counter()
    model = make_model()
    report = spar.parallelize(
        model, method=args.method
    )  # before DDP, which averages gradients over the ranks
    losses = train(DistributedDataParallel(model), args)
    seconds = time.perf_counter() - begin
    error = max(abs(x - y) / abs(y) for x, y in zip(losses, single, strict=True))
    if rank == 0:
        print(" step   one process   sharded")
        for step, (one, other) in enumerate(zip(single, losses, strict=True)):
            print(f"{step:5}   {one:11.6f}   {other:.6f}")
        print(f"{world} ranks: {len(losses)} steps in {seconds:.1f} s")
        print(report)
    dist.destroy_process_group()
    if not error < TOLERANCE or not losses[-1] < losses[0]:
        sys.exit(f"losses differ by {error:.1e}, relative; allowed: {TOLERANCE:.0e}. They must also fall")
    if rank == 0:
        print(f"proved: a stock Qwen3-VL learns the same over {world} ranks as in one process.")
        print(f"All {len(losses)} losses agree within {error:.0e}, after {len(losses) - 1} updates.")


if __name__ == "__main__":
    main()
