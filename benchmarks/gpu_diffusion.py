# SPDX-License-Identifier: Apache-2.0
"""Check small models of diffusers between GPUs: python benchmarks/gpu_diffusion.py [--data FILE].

Outputs and gradients of `spar.parallelize` against one process in float32, over push. Needs diffusers. Starts
a rank for each GPU, or two on one.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import sys
import warnings
from functools import partial

import gpu_ranks
import torch
import torch.distributed as dist
from report import Report

import spar

LIMIT_S = 60  # of an exchange
TOLERANCE = 1e-4  # of a tensor's largest element; kernels of GPUs sum in an order that depends on the size
MODELS = [
    "CogVideoXTransformer3DModel",
    "HunyuanVideoTransformer3DModel",
    "AuraFlowTransformer2DModel",
    "PixArtTransformer2DModel",
    "SkyReelsV2Transformer3DModel",
    "WanTransformer3DModel",
]


def check(name: str, device: torch.device, report: Report) -> None:
    from helpers import diffusion_check  # type: ignore[import-not-found]

    group = dist.group.WORLD
    try:
        model = diffusion_check.made(name, torch.float32).to(device)
    except AttributeError as missing:  # all ranks have the same diffusers
        if "has no attribute" not in str(missing) or "diffusers" not in str(missing):
            raise
        report.row(name, "not in this diffusers", "")
        return
    expected = diffusion_check.trained(model, name)
    sharded = spar.parallelize(model, group)
    found = diffusion_check.trained(model, name, group)
    share = sharded.share
    spar.unparallelize(model)
    count = len(expected) - len(list(model.parameters()))
    ends = slice(0, count), slice(count, None)
    output, gradient = (max(map(diffusion_check.error_of, found[end], expected[end])) for end in ends)
    for what, error in (("outputs", output), ("gradients", gradient)):
        report.expect(error < TOLERANCE, f"{name}: an error of {what} of {error:.0e}")
    report.expect(share < 1, f"{name}: each rank computed the whole model")
    report.row(name, f"{output:.0e}", f"{gradient:.0e}")
    report.figure(name, {"outputs": output, "gradients": gradient, "share": share})


def run(rank: int, world: int, store: str, options: argparse.Namespace) -> None:
    device = gpu_ranks.device_of(options.device, rank)
    limit = datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group(options.backend, f"file://{store}", limit, rank=rank, world_size=world)
    import diffusers

    report = Report(options.data if rank == 0 else None, rank == 0)
    spar.init(None, device)
    transport, wanted = spar.transport(None, device), "push" if options.device == "cuda" else "shm"
    report.expect(transport.name == wanted, str(transport))
    report.say(f"{world} ranks, float32, diffusers {diffusers.__version__}, {transport.name}.")
    report.table("model", "error of the outputs", "error of the gradients, of each one's largest element")
    for name in options.models or MODELS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of diffusers
            gpu_ranks.attempt(report, name, partial(check, name, device, report))
    gpu_ranks.end(report)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu_ranks.add_arguments(parser)
    parser.add_argument("--models", nargs="+", help="check these classes alone")
    options = parser.parse_args()
    if importlib.util.find_spec("diffusers") is None:
        Report(options.data).skip("gpu_diffusion: the package diffusers is not installed")
    if options.device == "cuda":
        os.environ |= {"SPAR_TRANSPORT": "push"}  # or the reason why not
    return gpu_ranks.start(run, options, "gpu_diffusion", shares_gpus=True)


if __name__ == "__main__":
    sys.exit(main())
