# SPDX-License-Identifier: Apache-2.0
"""Time the host's part of a layer and of a forward of 8, in one process and in a view of two ranks.

Layers are nn.TransformerEncoderLayer: pre-norm, width 256, 4 heads, 512 tokens, float32. A time ends when the
forward has returned, not when the GPU has: kernels that take less are bound by the host.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable

import gpu_ranks
import torch
import torch.distributed as dist
from report import Report, stage
from torch import Tensor, nn

import spar

LAYERS = (2, 8)
WIDTH, TOKENS = 256, {"cuda": 512, "cpu": 16}
TURNS = {"cuda": 25, "cpu": 3}
FIRST = 5  # turns that do not count, of a GPU
LIMIT_S = 30  # of an exchange


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def host_us(forward: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the median microseconds until a forward has returned; all ranks begin together."""
    found = []
    for _ in range(TURNS[x.device.type]):
        synchronize(x.device)
        dist.barrier()
        begin = time.perf_counter()
        y = forward(x)
        found.append((time.perf_counter() - begin) * 1e6)
        del y
    synchronize(x.device)
    return statistics.median(found[FIRST:] or found)


def encoder(layers: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True, device=device
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def measure(report: Report, device: torch.device) -> None:
    us: dict[tuple[str, bool], list[float]] = {}
    x = torch.randn(1, TOKENS[device.type], WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    for layers in LAYERS:
        models = {"one process": encoder(layers, device)}
        models["view"] = copy.deepcopy(models["one process"])
        spar.parallelize(models["view"])
        with torch.no_grad():
            wanted, found = (model(x) for model in models.values())
        error = float((found - wanted).abs().max())
        report.expect(error < 1e-4, f"{layers} layers in a view: an error of {error:.0e}")
        for has_gradients in (False, True):
            with torch.set_grad_enabled(has_gradients):
                for name, model in models.items():
                    us.setdefault((name, has_gradients), []).append(host_us(model, x))
    report.table("host time", "a layer", "a forward of 8", "a layer, gradients", "a forward of 8, gradients")
    for name in models:
        cells = []
        for has_gradients in (False, True):
            short, long = us[name, has_gradients]
            layer = (long - short) / (LAYERS[1] - LAYERS[0])
            cells += [f"{layer / 1000:.2f} ms", f"{long / 1000:.1f} ms"]
            what = f"us, {name}{', gradients' if has_gradients else ''}"
            report.figure(what, {"layer": layer, "forward": long})
        report.row(name, *cells)


def run(rank: int, world: int, store: str, options: argparse.Namespace) -> None:
    device, limit = gpu_ranks.device_of(options.device, rank), datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", f"file://{store}", limit, rank=rank, world_size=world)
    report = Report(options.data if rank == 0 else None, rank == 0)
    spar.init(None, device)
    report.say(
        f"{world} ranks over {spar.transport(None, device).name}, {len(os.sched_getaffinity(0))} cores."
    )
    measure(report, device)
    gpu_ranks.end(report)


def main() -> int:
    report, options = stage(__doc__)
    options.device, options.ranks, options.backend = "cpu" if options.stand_ins else "cuda", 2, "gloo"
    if options.device == "cuda" and not torch.cuda.is_available():
        report.skip("torch has no CUDA device")
    return gpu_ranks.start(run, options, "view_host", shares_gpus=True)


if __name__ == "__main__":
    sys.exit(main())
