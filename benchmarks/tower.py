# SPDX-License-Identifier: Apache-2.0
"""Time a training step of Qwen3-VL, of which the tower is nearly all, on ranks and in one process.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/tower.py

Two equal images, in turns. Medians of the slowest rank: wall-clock and CPU time of the tower's forward, and
of a step. CPU time is that of the rank's own work where other processes use the cores, too.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

import spar

IMAGE = 63


def config(layers: int, width: int) -> Qwen3VLConfig:
    vision: dict[str, Any] = {
        "depth": layers,
        "hidden_size": width,
        "num_heads": 8,
        "intermediate_size": 4 * width,
    }
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    text: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 48,
    }
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    tokens = {"image_token_id": IMAGE, "video_token_id": 62, "vision_start_token_id": 61}
    return Qwen3VLConfig(text_config=text, vision_config=vision, vision_end_token_id=60, **tokens)


def batch(side: int) -> dict[str, Tensor]:
    """Return a row with two images of side x side patches."""
    tokens = side * side // 4
    text = [[5, 6, 61], [60, 7, 61], [60, 8, 9]]
    ids = torch.tensor([[*text[0], *[IMAGE] * tokens, *text[1], *[IMAGE] * tokens, *text[2]]])
    pixels = torch.randn(2 * side * side, 3 * 2 * 16, generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids > 59, -100),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, side, side]] * 2),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def now() -> Tensor:
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


class Timed:
    """Wall-clock and CPU time of a module's last forward."""

    def __init__(self, module: nn.Module) -> None:
        self.seconds = self._start = now()
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._start = now()

    def _end(self, *_: Any) -> None:
        self.seconds = now() - self._start


def step(model: Any, inputs: dict[str, Tensor], tower: Timed) -> list[float]:
    model.zero_grad()
    dist.barrier()
    start = now()
    model(**inputs, use_cache=False).loss.backward()
    found = torch.cat([tower.seconds, now() - start])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("layers", 4), ("width", 256), ("side", 32), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    whole = Qwen3VLForConditionalGeneration(config(given.layers, given.width))
    sharded, inputs = copy.deepcopy(whole), batch(given.side)
    report = spar.parallelize(sharded)
    models = {
        "one process": (whole, Timed(whole.model.visual)),
        "ranks": (sharded, Timed(sharded.model.visual)),
    }
    seconds: dict[str, list[list[float]]] = {name: [] for name in models}
    for _ in range(given.repeats + 1):
        for name, (model, tower) in models.items():
            if name == "one process" and dist.get_rank():  # alone, as its cores are others' too
                dist.barrier()
                dist.all_reduce(torch.zeros(4, dtype=torch.float64), dist.ReduceOp.MAX)
            else:
                seconds[name].append(step(model, inputs, tower))
    if dist.get_rank() == 0:
        for i, what in enumerate(("tower's forward", "CPU of it", "step", "CPU of it")):
            one, ranks = (statistics.median(each[i] for each in seconds[name][1:]) for name in models)
            print(f"{what}: {one:.3f} s; {dist.get_world_size()} ranks: {ranks:.3f} s, {ranks / one:.2f}")
        print(report)


if __name__ == "__main__":
    main()
