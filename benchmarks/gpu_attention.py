# SPDX-License-Identifier: Apache-2.0
"""Check spar.attention between GPUs: python benchmarks/gpu_attention.py [--data FILE].

Every method with every kernel that can compute a case, outputs and gradients, against float64 on each rank.
Needs spar and torch with CUDA. Starts ranks as gpu_ops.py does. `--device cpu` runs the kernels of CPUs.
`--flex` checks flex_attention alone, for which torch compiles a graph for each case and direction; `--cases`
checks only these.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import gpu_ranks
import torch
import torch.distributed as dist
from report import Report
from torch import Tensor

import spar
from spar import SequenceLayout, Spans

METHODS = ("ulysses", "gather", "ring")
HEADS, KEY_HEADS, WIDTH = 8, 2, 128
TOLERANCES = {torch.bfloat16: 1.5e-2, torch.float16: 3e-3, torch.float32: 2e-5}  # of norms
Kernels = dict[torch.dtype, tuple[str | None, ...]]
FLEX: Kernels = {torch.bfloat16: ("flex",), torch.float32: ("flex",)}
KERNELS: dict[str, Kernels] = {
    "cuda": {
        torch.bfloat16: (None, "cudnn", "flash", "blockwise"),
        torch.float16: (None, "cudnn", "flash"),
        torch.float32: (None, "blockwise"),
    },
    "cpu": {torch.float32: (None, "flash", "blockwise"), torch.bfloat16: (None,)},
}


class Case(NamedTuple):
    name: str
    options: dict[str, Any]  # of spar.attention
    mask: Tensor | None  # which keys a query attends to: [S, S], or [H, S, S]
    softcap: float | None = None
    has_sinks: bool = False
    lengths: tuple[int, ...] = ()  # of packed documents


def cases(tokens: int, device: torch.device) -> Iterator[Case]:
    place, window, first = torch.arange(tokens, device=device), tokens // 10, tokens * 3 // 10
    causal = place[:, None] >= place
    ids = (place >= first).int() + (place > first)  # three documents, of which the second has one token
    near = causal & (place[:, None] - place <= window)
    yield Case("full", {}, None)
    yield Case("causal", {"causal": True}, causal)
    yield Case("window", {"causal": True, "window": (window, 0)}, near)
    documents, own = Spans.causal(tokens) & Spans.documents(ids[None]), causal & (ids[:, None] == ids)
    yield Case("documents", {"mask": documents}, own)
    yield Case("packed", {"causal": True}, own, lengths=(first, 1, tokens - first - 1))
    yield Case("lse", {"causal": True, "return_lse": True}, causal)
    yield Case("softcap", {"causal": True, "softcap": 5.0}, causal, softcap=5.0)
    yield Case("sinks", {"causal": True}, causal, has_sinks=True)
    random = torch.Generator().manual_seed(1)
    drawn = torch.rand(HEADS, tokens, tokens, generator=random).to(device) < 0.7
    drawn |= torch.eye(tokens, dtype=torch.bool, device=device)
    yield Case("a mask", {"causal": True, "mask": drawn}, causal & drawn)


def whole_attention(case: Case, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> list[Tensor]:
    """Compute a case in float64, with all scores in memory; tensors are [1, S, H, D].

    Returns the output, and the log-sum-exp [1, S, H] if the case has it.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * WIDTH**-0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.mask is not None:
        scores = scores.masked_fill(~case.mask, -torch.inf)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(1, HEADS, q.size(2), 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : k.size(2)]
    found = [weights @ v, scores.logsumexp(-1)]
    return [x.transpose(1, 2) for x in found[: 1 + case.options.get("return_lse", False)]]


def error_of(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def check_case(
    case: Case, method: str, kernel: str | None, whole: list[Tensor], grad: Tensor, sinks: Tensor | None
) -> float:
    """Return the largest error, relative to norms, of the outputs and of the gradients of q, k and v."""
    total = whole[0].size(1)
    layout = SequenceLayout.packed(case.lengths) if case.lengths else SequenceLayout.even(total)
    exact = [x.double().requires_grad_() for x in whole]
    wanted = whole_attention(case, exact[0], exact[1], exact[2], sinks)
    grads = [grad, grad[..., 0].float()][: len(wanted)]  # of the output, and of the log-sum-exp
    torch.autograd.backward(wanted, [each.double() for each in grads])
    parts = [layout.shard(x, 1).clone().requires_grad_() for x in whole]
    found = spar.attention(
        parts[0], parts[1], parts[2], layout, method=method, kernel=kernel, sinks=sinks, **case.options
    )
    outs = [found] if isinstance(found, Tensor) else list(found)
    torch.autograd.backward(outs, [layout.shard(each, 1) for each in grads])
    errors = [error_of(layout.gather(x.detach(), 1), y.detach()) for x, y in zip(outs, wanted, strict=True)]
    for part, x in zip(parts, exact, strict=True):
        assert part.grad is not None and x.grad is not None
        errors.append(error_of(layout.gather(part.grad, 1), x.grad))
    return max(errors)


def check_methods(
    report: Report, case: Case, kernel: str | None, tensors: list[Tensor], sinks: Tensor | None, what: str
) -> str:
    """Check a case by all methods; return the cell of a table: the largest error, or that it was refused."""
    errors, refused = [], []

    def check(method: str) -> None:
        try:
            error = check_case(case, method, kernel, tensors[:3], tensors[3], sinks)
        except ValueError:  # the same on all ranks: the kernel cannot compute this
            refused.append(method)
            return
        report.expect(error < TOLERANCES[tensors[0].dtype], f"{what} by {method}: an error of {error:.0e}")
        errors.append(error)

    for method in METHODS:
        gpu_ranks.attempt(report, f"{what} by {method}", partial(check, method))
    return "refused" if refused else f"{max(errors, default=float('inf')):.0e}"


def check_kernel(
    report: Report,
    chosen: list[Case],
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    kernel: str | None,
) -> None:
    random = torch.Generator().manual_seed(0)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    tensors = [torch.randn(1, tokens, h, WIDTH, generator=random).to(device, dtype) for h in heads]
    all_sinks = torch.randn(HEADS, generator=random).to(device)
    name = f"{str(dtype)[6:]}, {kernel or 'chosen'}"
    cells = [name]
    for case in chosen:
        if kernel == "flex" and dtype == torch.float32 and not case.softcap:  # they compile for minutes
            cells.append("")
            continue
        sinks = all_sinks if case.has_sinks else None
        cells.append(check_methods(report, case, kernel, tensors, sinks, f"{name}, {case.name}"))
    report.row(*cells)


def run(rank: int, world: int, store: str, options: argparse.Namespace) -> None:
    device = gpu_ranks.device_of(options.device, rank)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group(options.backend, f"file://{store}", limit, rank=rank, world_size=world)
    report = Report(options.data if rank == 0 else None, rank == 0)
    tokens = options.tokens
    report.say(f"{world} ranks, {tokens} tokens. The largest error of outputs and gradients, of their norm:")
    chosen = [case for case in cases(tokens, device) if case.name in (options.cases or [case.name])]
    report.table("dtype, kernel", *(case.name for case in chosen))
    for dtype, kernels in (FLEX if options.flex else KERNELS[device.type]).items():
        for kernel in kernels:
            check_kernel(report, chosen, tokens, device, dtype, kernel)
    gpu_ranks.end(report)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu_ranks.add_arguments(parser)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--flex", action="store_true", help="check flex_attention alone")
    parser.add_argument("--cases", nargs="+", help="check these cases alone, such as softcap")
    options = parser.parse_args()
    if options.device == "cuda" and torch.cuda.device_count() == 1:
        os.environ.setdefault("SPAR_TRANSPORT", "push")  # NCCL may refuse two ranks on a GPU
    return gpu_ranks.start(run, options, "gpu_attention", shares_gpus=True)


if __name__ == "__main__":
    sys.exit(main())
