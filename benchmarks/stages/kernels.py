# SPDX-License-Identifier: Apache-2.0
"""Time packing and unpacking of attention's layout [1, S, H, 128] in bf16, against a device-to-device copy.

CTAs of 256 threads, 4 units for each thread and a CTA for each tile are constants of kernels.cu, so that they
are not varied here. Above 4 GiB the bytes are compared, too: there offsets exceed 32 bits.
"""

from __future__ import annotations

import sys

import gpu_core
import gpu_times
import torch
from gpu_core import MIB, Gpu, strided_plan, whole_wires
from helpers.core_abi import Route  # type: ignore[import-not-found]
from report import Report, stage

WORLDS, HEADS = (2, 4, 8), (8, 32, 128)
SIZES: tuple[int, ...] = (32 * MIB, 256 * MIB, 1024 * MIB)
LARGE = 5 * 1024 * MIB


def sweep(gpu: Gpu, report: Report, sizes: tuple[int, ...], turns: int) -> None:
    figures = []
    report.table("MiB", "S", "H", "P", "row", *gpu_times.COLUMNS)
    for total in sizes:
        for heads in HEADS:
            for world in WORLDS:
                row = heads // world * 128 * 2
                plan, x = strided_plan(row, total, world)
                us = gpu_times.time_shape(gpu, plan, x, turns)
                shape = (f"{total / MIB:g}", str(x.size(0)), str(heads), str(world), str(row))
                report.row(*shape, *gpu_times.cells(x.numel(), us))
                figures.append({"bytes": x.numel(), "heads": heads, "ranks": world, "row": row, **us})
    report.figure("shapes", figures)
    worst = min(figures, key=lambda each: min(gpu_times.shares(each)))
    report.say()
    report.say(
        f"Slowest against a copy: {worst['bytes'] / MIB:.0f} MiB, rows of {worst['row']} bytes, "
        f"{min(gpu_times.shares(worst)):.0%}."
    )


def check_large(gpu: Gpu, report: Report, total: int) -> None:
    """Pack and unpack more than 2^32 bytes, and compare them."""
    report.say()
    if gpu_core.machine.free_bytes() < 8 * total:  # inputs, outputs and references of all ways
        free = gpu_core.machine.free_bytes() / MIB
        report.say(f"Not run with {total / MIB:g} MiB: only {free:.0f} MiB are free.")
        return
    world, row = 4, 2048
    plan, x = strided_plan(row, total, world)
    wire, y = torch.zeros(x.numel(), dtype=torch.uint8, device=x.device), torch.zeros_like(x)
    spans = whole_wires(plan, wire)
    gpu.copy(plan, Route.PACK, spans, [x], [])()
    wanted = x.transpose(0, 1).contiguous().flatten()
    report.expect(torch.equal(wire, wanted), f"packed, {total / MIB:g} MiB")
    gpu.copy(plan, Route.UNPACK, spans, [], [y])()
    report.expect(
        torch.equal(y.flatten(), wire), f"unpacked, {total / MIB:g} MiB"
    )  # rank 0 gathers whole parts
    us = gpu_times.time_shape(gpu, plan, x, 3)
    report.say(f"{total / MIB:g} MiB in rows of {row} bytes, {world} ranks: the bytes are right.")
    report.say()
    report.say(", ".join(f"{way} {value / 1e3:.2f} ms" for way, value in us.items()) + ".")
    report.figure("large", {"bytes": total, **us})


def main() -> int:
    report, options = stage(__doc__)
    sizes, large, turns = SIZES, LARGE, 10
    if options.stand_ins:
        gpu_core.use_stand_ins()
        sizes, large, turns = (MIB // 4,), MIB, 1
    gpu_core.use_core(f"{options.kit}/core.so")
    gpu = Gpu()
    check_large(gpu, report, large)
    sweep(gpu, report, sizes, turns)
    gpu_core.machine.synchronize()
    return report.status()


if __name__ == "__main__":
    sys.exit(main())
