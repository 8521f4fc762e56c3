# SPDX-License-Identifier: Apache-2.0
"""Time the copy kernels: against a device-to-device copy, with factors, and a launch's host time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import gpu_core
import torch
from gpu_core import MIB, Gpu, Ways, microseconds, strided_plan, whole_wires
from helpers import core  # type: ignore[import-not-found]
from helpers.core_abi import Route, Scale, ScaleType  # type: ignore[import-not-found]
from report import Report

ROWS = (128, 256, 512, 1024, 2048, 4096, 8192)
WAYS = ("copy", "pack", "unpack", "permute")


def time_shape(gpu: Gpu, plan: core.Plan, x: torch.Tensor, turns: int) -> dict[str, float]:
    """Return the microseconds of each of WAYS, for a plan of strided_plan."""
    wire, y = torch.empty_like(x).flatten(), torch.empty_like(x)
    flat, spans = x.flatten(), whole_wires(plan, wire)
    ways: Ways = {
        "copy": partial(y.view(-1).copy_, flat),
        "pack": gpu.copy(plan, Route.PACK, spans, [x], []),
        "unpack": gpu.copy(plan, Route.UNPACK, spans, [], [y]),
        "permute": x.transpose(0, 1).contiguous,
    }
    return microseconds(ways, turns)


def shares(us: dict[str, float]) -> tuple[float, float]:
    """Return how fast packing and unpacking are, as parts of a copy's speed."""
    return us["copy"] / us["pack"], us["copy"] / us["unpack"]


def cells(total: int, us: dict[str, float]) -> list[str]:
    """Return a table's cells under COLUMNS."""
    speed = f"{us['copy']:.1f} us, {2 * total / us['copy'] / 1e3:.0f} GB/s"
    times = [f"{us[way]:.1f} us" for way in WAYS[1:]]
    return [speed, *times, *(f"{share:.0%}" for share in shares(us))]


COLUMNS = (*WAYS, "pack, of copy", "unpack, of copy")


def time_copies(gpu: Gpu, report: Report, sizes: Sequence[int], turns: int) -> None:
    report.table("MiB", "row", *COLUMNS)
    low = []
    for total in sizes:
        for row in ROWS:
            us = time_shape(gpu, *strided_plan(row, total), turns)
            report.row(f"{total / MIB:g}", str(row), *cells(total, us))
            if row >= 1024 and min(shares(us)) < 0.9:
                low.append(f"{total / MIB:g} MiB of {row} bytes")
    report.say()
    report.say(f"Below 90 % of a copy, from 1 KB rows: {', '.join(low) or 'none'}.")


def time_scales(
    gpu: Gpu, report: Report, kinds: Iterable[tuple[ScaleType, torch.dtype]], total: int, turns: int
) -> None:
    report.table("factor", "unscaled", "multiplied", "divided by 3")
    for kind, dtype in kinds:
        plan, _ = strided_plan(1024, total)
        x = torch.ones(total // dtype.itemsize, dtype=dtype, device=gpu_core.machine.device)
        spans = whole_wires(plan, wire := torch.empty_like(x))
        factors = {"unscaled": None, "multiplied": Scale(kind, 0, 0.3), "divided": Scale(kind, 1, 3.0)}
        us = microseconds(
            {name: gpu.copy(plan, Route.PACK, spans, [x], [], scale) for name, scale in factors.items()},
            turns,
        )
        del wire
        report.row(str(dtype)[6:], *(f"{value:.1f} us" for value in us.values()))


def time_host(gpu: Gpu, report: Report) -> None:
    plan, x = strided_plan(512, 64 * 1024)
    wire = torch.empty_like(x).flatten()
    pack = gpu.copy(plan, Route.PACK, whole_wires(plan, wire), [x], [])
    best = gpu_core.host_microseconds(lambda: [pack() for _ in range(100)]) / 100
    report.figure("launch_us", best)
    report.say()
    report.say(f"Host time of one launch of 8 spans, including this script's Python: {best:.1f} us.")
