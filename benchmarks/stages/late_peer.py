# SPDX-License-Identifier: Apache-2.0
"""Time attention beside an exchange over push whose peer is 3 ms late: the CTAs that wait hold SMs.

Two ranks are streams of this process. Rank 0's call is in the stream of spar's asynchronous calls; rank 1's
begins 3 ms later, behind a kernel of one thread, and copies on the same GPU. Attention is that of 16,384
tokens, 32 heads and 8 key heads of 128, causal, bfloat16, forward alone.
"""

from __future__ import annotations

import os
import statistics
import sys
from ctypes import c_void_p
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as in concurrent_ranks.py

import gpu_core
import torch
from concurrent_ranks import even_exchange
from gpu_core import MIB, Gpu
from helpers import core  # type: ignore[import-not-found]
from helpers.core_abi import check  # type: ignore[import-not-found]
from push_streams import Group, PushCall, slot_limit
from report import Report, stage
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from spar._transports.cuda import _side_stream

LATE_MS = 3
TOKENS, HEADS, KEY_HEADS, WIDTH = 16_384, 32, 8, 128
TURNS = 9
SIZES = (2 << 10, 24 * MIB)  # bytes of a rank's call: a CTA, and all of a launch
KERNELS: tuple[SDPBackend, ...] = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


def cycles_of(milliseconds: float) -> int:
    """Return the cycles for which a kernel is to spin."""
    many = 10_000_000
    if gpu_core.machine.device != "cuda":
        return many
    us = statistics.median(gpu_core.machine.time(lambda: torch.cuda._sleep(many)) for _ in range(3))
    return int(many * milliseconds * 1000 / us)


def side_stream() -> Any:
    """Return the stream of spar's asynchronous calls, with the priority and the CTAs that it has."""
    on_gpu = gpu_core.machine.device == "cuda"
    ordinal = torch.cuda.current_device() if on_gpu else 0
    stream = _side_stream(torch.device("cuda", ordinal)) if on_gpu else gpu_core.machine.new_stream()
    # The package tells its own core. That of the kit is another library.
    check(core.library().spar_cuda_set_side_stream(ordinal, c_void_p(stream.cuda_stream)))
    return stream


class Beside:
    """Attention in the current stream, and a call of two ranks in streams of their own."""

    def __init__(self, tokens: int, slot: int) -> None:
        self.group = Group(2, slot, streams=[side_stream(), gpu_core.machine.new_stream()])
        device, dtype = gpu_core.machine.device, torch.bfloat16
        shapes = [(1, heads, tokens, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        self.tensors = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
        self.cycles = cycles_of(LATE_MS)

    def attend(self) -> None:
        q, k, v = self.tensors
        scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def both(self, calls: list[PushCall]) -> None:
        gpu_core.machine.fork(self.group.streams)
        gpu_core.machine.delay(self.group.streams[1], self.cycles)
        for rank, call in enumerate(calls):
            self.group.run(rank, call)
        self.attend()

    def milliseconds(self, calls: list[PushCall] | None) -> float:
        """Return the median time from the begin of attention to its end; the call may end later."""
        found = []
        for _ in range(TURNS):
            work = self.attend if calls is None else lambda: self.both(calls)
            found.append(gpu_core.machine.time(work, 2_000_000) / 1000)
            gpu_core.machine.synchronize()
        return statistics.median(found[2:])


def measure(report: Report, beside: Beside, kernel: SDPBackend, size: int) -> None:
    exchange = even_exchange(2, size, 16)
    pairs = zip(exchange.plans, exchange.inputs, strict=True)
    calls = [beside.group.call(rank, plan, x) for rank, (plan, x) in enumerate(pairs)]
    gpu_core.machine.synchronize()
    name = f"{kernel.name.partition('_')[0].lower()}, {size >> 10} KiB"
    with sdpa_kernel(kernel):
        try:
            alone = beside.milliseconds(None)
        except RuntimeError as error:  # this torch or GPU does not have the kernel
            report.row(name, str(error).partition("\n")[0], "", "")
            return
        both = beside.milliseconds(calls)
    failures = beside.group.failures()
    report.expect(not failures, f"{name}: {failures}")
    for rank, (call, wanted) in enumerate(zip(calls, exchange.wanted, strict=True)):
        report.expect(torch.equal(call.output, wanted), f"{name}: wrong bytes on rank {rank}")
    report.row(name, f"{alone:.2f} ms", f"{both:.2f} ms", f"{both / alone:.2f}")
    report.figure(f"ms, {name}", {"alone": alone, "beside": both, "ratio": both / alone})


def main() -> int:
    report, options = stage(__doc__)
    tokens, sizes, kernels = TOKENS, SIZES, KERNELS
    if options.stand_ins:
        gpu_core.use_stand_ins()
        tokens, sizes, kernels = 64, (2 << 10, MIB // 8), (SDPBackend.MATH,)
    elif not gpu_core.machine.available():
        report.skip("torch has no CUDA device")
    gpu_core.use_core(f"{options.kit}/core.so")
    gpu_core.machine.prepare()
    Gpu()
    beside = Beside(tokens, MIB if options.stand_ins else slot_limit(2))
    report.say(f"A peer that is {LATE_MS} ms late, by kernel of attention and bytes of a rank's call:")
    report.table("", "attention alone", "beside the call", "ratio (at most 1.05)")
    for kernel in kernels:
        for size in sizes:
            measure(report, beside, kernel, size)
    beside.group.close()
    return report.status()


if __name__ == "__main__":
    sys.exit(main())
