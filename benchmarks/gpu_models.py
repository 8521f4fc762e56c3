# SPDX-License-Identifier: Apache-2.0
"""Check small models of transformers between GPUs: python benchmarks/gpu_models.py [--data FILE].

Losses and gradients of `spar.parallelize` against one process in float32, over the transport that spar
chooses. Needs transformers. Starts a rank for each GPU, or two on one. Leaves out a model that this
transformers does not have.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu_ranks
import torch
import torch.distributed as dist
from report import Report
from torch import Tensor

import spar

LIMIT_S = 60  # of an exchange
TOLERANCE = 1e-4  # of a tensor's largest element; kernels of GPUs sum in an order that depends on the size
TOKENS = 301
MODELS = ["Llama", "Mistral", "Gemma2", "GptOss", "Qwen3Moe", "Bloom", "mamba2", "qwen3_next", "bamba"]
MODELS += ["falcon_h1", "nemotron_h"]


def maker(name: str, device: torch.device) -> Callable[[], Any]:
    from helpers import hybrid_models, llms  # type: ignore[import-not-found]

    if name in hybrid_models.TYPES:
        make = hybrid_models.maker(name)
    else:
        make = llms.maker(name, **({"num_local_experts": 4} | llms.MIXED if name == "GptOss" else {}))
    return lambda: make().to(device)


def parallelized(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    spar.parallelize(model)
    return batch


def check(name: str, device: torch.device, batch: dict[str, Tensor], report: Report) -> None:
    from helpers import hybrid_models

    try:
        found = spar.testing.compare(maker(name, device), batch, parallelized, show=False, reduce="mean")
    except AttributeError as error:  # all ranks have the same transformers
        if "has no attribute" not in str(error) or "module transformers" not in str(error):
            raise
        report.row(name, "not in this transformers", "")
        return
    real = [each for each in found.entries if each.reference_norm > 1e-6 or each.max_abs_error > 1e-6]
    worst = max(real, key=lambda each: each.max_rel_error if each.max_rel_error >= 0 else float("inf"))
    is_gate = worst.name.endswith(hybrid_models.GATES)
    limit = hybrid_models.ROUNDING if is_gate else TOLERANCE
    report.expect(worst.max_rel_error < limit, f"{name}: {worst}")
    report.row(name, f"{found.entries[0].max_rel_error:.0e}", f"{worst.max_rel_error:.0e} ({worst.name})")


def run(rank: int, world: int, store: str, options: argparse.Namespace) -> None:
    device = gpu_ranks.device_of(options.device, rank)
    limit = datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group(options.backend, f"file://{store}", limit, rank=rank, world_size=world)
    import transformers
    from helpers import llms

    report = Report(options.data if rank == 0 else None, rank == 0)
    batch = {name: x.to(device) for name, x in llms.whole(2, options.tokens).items()}
    spar.init(None, device)
    report.say(f"{world} ranks, {options.tokens} tokens, transformers {transformers.__version__}.")
    transport = spar.transport(None, device)
    report.say(f"Transport {transport.name}: {transport.reason}.")
    report.table("model", "error of the loss", "largest error of a tensor, of its largest element")
    for name in MODELS:
        if name in (options.models or MODELS):
            gpu_ranks.attempt(report, name, partial(check, name, device, batch, report))
    gpu_ranks.end(report)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu_ranks.add_arguments(parser)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--models", nargs="+", help="check these alone, such as Llama")
    options = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        Report(options.data).skip("gpu_models: the package transformers is not installed")
    return gpu_ranks.start(run, options, "gpu_models", shares_gpus=True)


if __name__ == "__main__":
    sys.exit(main())
