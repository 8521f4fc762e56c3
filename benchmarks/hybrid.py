# SPDX-License-Identifier: Apache-2.0
"""Time the exchanges of a linear attention layer, and count their bytes, beside the usual code over gloo.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/hybrid.py 2048 8192 32768

spar: what a layer of a parallelized model of transformers runs, a convolution of own tokens whose first
results a halo corrects, and `by_heads` for the recurrence. The usual code, as in Megatron: six
all_to_all_single with permutes before the convolution (q, k, v, z, beta, alpha), and one behind it. The
convolution and the recurrence take no time in either: they return memory that is there. Forward and backward,
median of the slowest rank.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/hybrid.py --memory 8192

With --memory: the peak of the process's memory over that before, in a training step of a small Qwen3.5 of
transformers under `spar.parallelize`, of the rank that needs most. With 1, 2 and 4 processes it falls as
1 / P.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

import spar
from spar import SequenceLayout
from spar.ops.convolution import convolve

KEY_HEADS, VALUE_HEADS, WIDTH, TAPS = 4, 8, 64, 4


class UsualExchange(torch.autograd.Function):
    """Tokens for heads of [S_local, H, D], or back, by permute, all_to_all_single and permute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_heads: bool) -> Tensor:
        ctx.to_heads = to_heads
        return UsualExchange.exchange(x, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return UsualExchange.exchange(grad, not ctx.to_heads), None

    @staticmethod
    def exchange(x: Tensor, to_heads: bool) -> Tensor:
        world = dist.get_world_size()
        split = 1 if to_heads else 0
        parts = x.unflatten(split, (world, -1)).movedim(split, 0).contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return received.flatten(0, 1) if to_heads else received.movedim(0, 1).flatten(1, 2)


class Recurrence(torch.autograd.Function):
    """What stands for it: the output is v, and the gradients of the others are memory that is there."""

    memory: ClassVar[dict[tuple[int, torch.Size], Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, v: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [x.shape for x in others]
        return v.view_as(v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        memory = Recurrence.memory
        for key in enumerate(ctx.shapes):
            if key not in memory:
                memory[key] = torch.zeros(key[1])
        return grad, *(memory[key].detach() for key in enumerate(ctx.shapes))


class Convolution(torch.autograd.Function):
    """What stands for it: tensors of the same shape, which nobody computes, and which are allocated once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, result: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.gradient.detach(), None, None


class Convolved:
    """The function of `convolve`: its tensors are those of the shapes that it was called with."""

    def __init__(self) -> None:
        self.memory: dict[torch.Size, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape not in self.memory:
            self.memory[x.shape] = torch.zeros_like(x), torch.zeros_like(x)
        y: Tensor = Convolution.apply(x, *self.memory[x.shape])  # type: ignore[no-untyped-call]
        return y


def recurrence(*tensors: Tensor) -> Tensor:
    y: Tensor = Recurrence.apply(*tensors)  # type: ignore[no-untyped-call]
    return y


SIZES = [KEY_HEADS * WIDTH, KEY_HEADS * WIDTH, VALUE_HEADS * WIDTH]


def usual(mixed: Tensor, z: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
    parts = [x.unflatten(1, (-1, WIDTH)) for x in mixed.split(SIZES, 1)]
    tensors = [UsualExchange.apply(x, True) for x in (*parts, z, beta, alpha)]  # type: ignore[no-untyped-call]
    q, k, v, *others = tensors
    y: Tensor = UsualExchange.apply(recurrence(v, q, k, *others), False)  # type: ignore[no-untyped-call]
    return y


def by_spar(
    layout: SequenceLayout,
    convolution: Convolved,
    mixed: Tensor,
    z: Tensor,
    beta: Tensor,
    alpha: Tensor,
) -> Tensor:
    convolved = convolve(convolution, mixed[None].transpose(1, 2), layout, TAPS - 1, False).transpose(1, 2)
    q, k, v = (x.unflatten(2, (-1, WIDTH)) for x in convolved.split(SIZES, 2))
    y = spar.by_heads(recurrence, [v, q, k, beta[None], alpha[None]], layout)
    return recurrence(y.squeeze(0), z)  # whose gradient is a view, unlike that of y[0]


def seconds_of(call: Callable[..., Tensor], tensors: list[Tensor], upper: Tensor, turns: int) -> float:
    times = []
    for _ in range(turns + 1):
        dist.barrier()
        begin = time.perf_counter()
        torch.autograd.grad(call(*tensors), tensors, upper)
        elapsed = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        times.append(float(elapsed))
    return statistics.median(times[1:])


def status(name: str) -> int:
    """Return a line of this process's status in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024


def peak_of_step(total: int) -> int:
    """Return by how much this process's peak memory in a step is over its memory before it."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=total,
        use_cache=False,
    )
    model = transformers.Qwen3_5ForCausalLM(config)
    spar.parallelize(model, outputs="parts")

    def step(tokens: int) -> None:
        ids = torch.arange(tokens)[None] % 64
        model(input_ids=ids, labels=ids).loss.backward()

    step(256)  # allocates gradients, and what is kept between steps
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # resets VmHWM
    before = status("VmRSS")
    step(total)
    return status("VmHWM") - before


def sent() -> int:
    """Return the bytes that this rank's exchanges sent to others so far."""
    return sum(size for name, size in spar.memory_stats().items() if name.startswith("sent."))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tokens", nargs="*", type=int, default=[2048, 8192, 32768], help="of the sequence")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="measure the peak memory of a model instead")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.memory:
        for total in args.tokens:
            peak = torch.tensor(peak_of_step(total))
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            if rank == 0:
                print(f"{world} ranks, {total} tokens: {peak / 2**20:.0f} MiB", flush=True)
        dist.destroy_process_group()
        return
    if rank == 0:
        print(
            f"{world} ranks, {os.cpu_count()} cores, torch {torch.__version__}, float32, {KEY_HEADS} key and"
        )
        print(f"{VALUE_HEADS} value heads of {WIDTH}; bytes a token: sent in forward by all ranks, expected")
        print(f"{'tokens':>7} {'usual ms':>9} {'spar ms':>8} {'ratio':>6} {'bytes':>7} {'expected':>9}")
    for total in args.tokens:
        local = total // world
        shapes = [(local, sum(SIZES)), (local, VALUE_HEADS, WIDTH), *[(local, VALUE_HEADS, 1)] * 2]
        tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
        upper = torch.ones(local, VALUE_HEADS, WIDTH)
        layer = partial(by_spar, SequenceLayout.even(total), Convolved())
        theirs = seconds_of(usual, tensors, upper, args.turns)
        ours = seconds_of(layer, tensors, upper, args.turns)
        before = sent()
        layer(*tensors)
        bytes_ = torch.tensor(float(sent() - before))
        dist.all_reduce(bytes_)
        count = float(bytes_) / total
        # q, k, v, beta and alpha out, the output back; the halo is of the sequence, not of its tokens.
        numbers = WIDTH * (2 * KEY_HEADS + 2 * VALUE_HEADS) + 2 * VALUE_HEADS
        halo = (TAPS - 1) * WIDTH * (2 * KEY_HEADS + VALUE_HEADS) * (world - 1) / world
        expected = 4 * (numbers * (world - 1) / world + halo / local)
        if rank == 0:
            figures = (
                f"{1e3 * theirs:9.1f} {1e3 * ours:8.1f} {ours / theirs:6.2f} {count:7.0f} {expected:9.0f}"
            )
            print(f"{total:7} {figures}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
