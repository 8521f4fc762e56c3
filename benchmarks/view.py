# SPDX-License-Identifier: Apache-2.0
"""Time a forward of Wan in a view and in one process, and the host's time for a torch function and a layer.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/view.py

Wan of 6 blocks, width 256, 1,152 tokens, in turns; median of the slowest rank; eager, and with its blocks
compiled. A function's time is CPU time on a small tensor, without a view, under an empty TorchFunctionMode,
and in a view: what a chain of 100 times 20 functions takes longer than one of 50. A block's is what that
takes longer still if each 20 functions are a block, which receives a whole tensor to shard. A layer's is what
a small decoder layer of a chain takes outside of its two exchanges, which wait for the other ranks: eager,
compiled by layer and as one graph, on a rank's tokens without a view, and in a view.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import spar

FUNCTIONS = 20
BLOCKS = 50
# Of more, CPython 3.11 maps a part of its stack anew in each exchange: a graph is one frame with all tensors.
LAYERS = 4, 12
WARM_UP = 3  # forwards; the second compiles what the first ran


class Functions(nn.Module):
    """A block of 20 functions of different kinds, three of them reads of sizes."""

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        h = F.linear(x, weight) + y
        h = h.view(batch, tokens, 4, -1).transpose(1, 2) * 2
        h = h.transpose(1, 2).flatten(2)
        a, b = F.layer_norm(h, (width,)).chunk(2, -1)
        h = F.gelu(torch.cat([a, b], -1))
        h = h.unsqueeze(1).squeeze(1).float().to(torch.float32)
        h = h[:, :, None][:, :, 0].view(h.size(0), h.size(1), width)
        return h.mean(-1, keepdim=True) * x


class Empty(TorchFunctionMode):
    """The least that a mode costs which is written in Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


class Chain(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Functions() for _ in range(blocks)])

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, y, weight)
        return x


def slowest(seconds: float) -> float:
    found = torch.tensor(seconds)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.chain = Chain(blocks)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = self.chain(x, y, weight)
        return found


def in_empty_mode(model: nn.Module, *args: Tensor) -> None:
    with Empty():
        model(*args)


def functions() -> tuple[list[float], float]:
    """Return the microseconds of CPU of a function plain, in an empty mode and in a view, and of a block.

    Each is the least of some turns.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, 64, 32, generator=generator) for _ in range(2))
    weight = torch.randn(32, 32, generator=generator) / 6
    # The part's size without a view, so that the kernels take as long.
    part = 64 // dist.get_world_size()
    runs: list[Callable[[], Any]] = []
    for blocks in (BLOCKS, 2 * BLOCKS):
        plain, viewed, divided = (Model(blocks) for _ in range(3))
        spar.parallelize(viewed, blocks=["chain"])
        spar.parallelize(divided, blocks=["chain.blocks.*"])
        local = x[:, :part], y[:, :part], weight
        runs += [partial(plain, *local), partial(in_empty_mode, plain, *local)]
        runs += [partial(viewed, x, y, weight), partial(divided, x, y, weight)]
    least = [float("inf")] * len(runs)
    for _ in range(20):
        for i, run in enumerate(runs):
            begin = time.process_time()
            run()
            least[i] = min(least[i], time.process_time() - begin)
    kinds = len(runs) // 2
    of_block = [1e6 * (least[kinds + i] - least[i]) / BLOCKS for i in range(kinds)]
    return [each / FUNCTIONS for each in of_block[:3]], of_block[3] - of_block[2]


class Layer(nn.Module):
    """A small decoder layer: attention of 4 heads, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 4, 8)).transpose(1, 3).unbind(2)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(h)
        found: Tensor = x + self.mlp(self.second(x))
        return found


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def outside_exchanges(run: Callable[[], Any]) -> float:
    """Return the seconds of a run outside of exchanges, which wait for the other ranks."""
    before = spar.memory_stats()
    begin = time.perf_counter()
    run()
    took = time.perf_counter() - begin
    after = spar.memory_stats()
    within = 1e-6 * sum(after[name] - before[name] for name in after if name.startswith("time."))
    return took - within


def layers(backend: str) -> dict[str, float]:
    """Return the microseconds of a layer outside of its exchanges, the least of some turns."""
    x = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(0))
    part = x[:, : 64 // dist.get_world_size()]
    runs: dict[str, list[Callable[[], Any]]] = {}
    for count in LAYERS:
        for name, is_viewed, compiled in (
            ("plain", False, ""),
            ("in a view", True, ""),
            ("compiled by layer", False, "layers"),
            ("in a view, compiled by layer", True, "layers"),
            ("one graph", False, "model"),
            ("in a view, one graph", True, "model"),
        ):
            torch.manual_seed(0)
            model = Layers(count)
            if is_viewed:
                spar.parallelize(model, method="ulysses")
            for module in {"layers": [*model.layers], "model": [model], "": []}[compiled]:
                module.compile(backend=backend)
            runs.setdefault(name, []).append(partial(model, x if is_viewed else part))
    least = {name: [float("inf")] * 2 for name in runs}
    for name, pair in runs.items():
        for i, run in enumerate(pair):
            dist.barrier()
            for _ in range(50):
                least[name][i] = min(least[name][i], outside_exchanges(run))
    further = LAYERS[1] - LAYERS[0]
    return {name: 1e6 * (long - short) / further for name, (short, long) in least.items()}


def wan(turns: int, backend: str) -> dict[str, float]:
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=64,
        in_channels=16,
        out_channels=16,
        text_dim=64,
        ffn_dim=1024,
        num_layers=6,
        rope_max_seq_len=64,
    )
    inputs = {
        "hidden_states": torch.randn(1, 16, 8, 24, 24),
        "timestep": torch.tensor([10.0]),
        "encoder_hidden_states": torch.randn(1, 32, 64),
    }
    models = {name: copy.deepcopy(model) for name in ("one process", "view", "compiled", "compiled view")}
    for name, each in models.items():
        if name.endswith("view"):
            spar.parallelize(each)
        if name.startswith("compiled"):
            each.compile_repeated_blocks(backend=backend)
    times: dict[str, list[float]] = {name: [] for name in models}
    outputs = {}
    for _ in range(turns + WARM_UP):
        for name, each in models.items():
            dist.barrier()
            begin = time.perf_counter()
            outputs[name] = each(**inputs).sample
            times[name].append(slowest(time.perf_counter() - begin))
    for name, out in outputs.items():
        torch.testing.assert_close(out, outputs["one process"], rtol=1e-3, atol=1e-4, msg=name)
    return {name: statistics.median(found[WARM_UP:]) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    with torch.no_grad():
        (plain, empty, viewed), block = functions()
        of_layers = layers(options.backend)
        times = wan(options.turns, options.backend)
    if dist.get_rank() == 0:
        print(f"a function: {plain:.2f} us, in an empty mode {empty:.2f}, with a view {viewed:.2f}; ", end="")
        print(f"a block {block:.0f} us")
        print("a layer: " + ", ".join(f"{name} {took:.0f} us" for name, took in of_layers.items()))
        print(", ".join(f"Wan, {name}: {seconds * 1e3:.0f} ms" for name, seconds in times.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
