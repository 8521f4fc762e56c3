# SPDX-License-Identifier: Apache-2.0
"""Check spar on a GPU, and time it: python benchmarks/gpu_check.py [--quick] [--out FILE].

Needs this repository, torch with CUDA, and a C compiler. If the machine with the GPU has no compiler, build
the core elsewhere (`make bring-up-kit`) and pass that file (--core build/bring-up/core.so). Writes a page of
results. The exit status is 1 if something is wrong, and 2 if there is no GPU.

Correctness:

- each kernel against the CPU's copies, to the bit, with spans that begin anywhere;
- multiplication against torch on the device;
- capture and replay.

Speed (gpu_times.py):

- packing and unpacking, against a device-to-device copy of the same bytes and the usual permute;
- the host time of a call.

Then gpu_ops.py runs all operations between ranks, with the extension that is built, or one built for it.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import gpu_core
import gpu_times
import kit
import torch
from gpu_core import MIB, Gpu, strided_plan, whole_wires
from helpers import core  # type: ignore[import-not-found]
from helpers.core_abi import Route, Scale, ScaleType  # type: ignore[import-not-found]
from report import SKIPPED, Report

KINDS = {  # spar's type: torch's dtype, and the widths of its kernels
    ScaleType.UNSCALED: (torch.uint8, (16, 8, 4, 2, 1)),
    ScaleType.F16: (torch.float16, (16, 4, 2)),
    ScaleType.BF16: (torch.bfloat16, (16, 4, 2)),
    ScaleType.F32: (torch.float32, (16, 4)),
    ScaleType.F64: (torch.float64, (16, 8)),
    ScaleType.C64: (torch.complex64, (16, 8)),
    ScaleType.C128: (torch.complex128, (16,)),
}
LONG = {"cuda": 4099, "cpu": 99}  # units of the longest rows


def random_bytes(count: int, draw: random.Random) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def shifted(data: torch.Tensor, shift: int) -> torch.Tensor:
    """Copy the bytes to the device, `shift` bytes behind a multiple of 256."""
    room = torch.full((data.numel() + shift + 16,), 0xEE, dtype=torch.uint8, device=gpu_core.machine.device)
    room[shift : shift + data.numel()] = data.flatten().to(gpu_core.machine.device)
    return room[shift : shift + data.numel()].view(data.shape)


def same_bits(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether bytes that are items of dtype are equal; any NaN equals any NaN."""
    if torch.equal(got, wanted):
        return True
    if not dtype.is_floating_point and not dtype.is_complex:
        return False
    a, b = (x.flatten().view(dtype.to_real() if dtype.is_complex else dtype) for x in (got, wanted))
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def check_copies(
    gpu: Gpu, kind: ScaleType, width: int, shape: tuple[int, ...], world: int, draw: random.Random
) -> str:
    """Pack, unpack and copy a random plan on both devices; return what differs, or an empty text."""
    dtype = KINDS[kind][0]
    item = max(dtype.itemsize, 1) if kind else width
    step = dtype.itemsize
    shift = 0 if width == 16 else width
    scale = Scale(kind, draw.randrange(2), draw.choice((2.0, 3.0, 0.1, 7.0, -4.0)))
    rank = draw.randrange(world)
    x = random_bytes(torch.Size(shape).numel() * item, draw).view(*shape, item)
    on_gpu = shifted(x, shift)
    args = [1, 0, shape[0] * world]
    plan = core.Plan(core.request("all_to_all", world, rank, [core.Spec.of(x, args)], core.SIDE_PULL))
    library = core.library()

    def cut(peer: int, size: int, wire: torch.Tensor | None) -> list[tuple[int, int, int, int]]:
        at = draw.randrange(size // step + 1) * step
        if draw.randrange(4):
            at = at // width * width  # so that both parts keep the width
        base = wire.data_ptr() if wire is not None else 0
        return [(peer, a, b, base + a if base else 0) for a, b in ((0, at), (at, size))]

    wires = [shifted(random_bytes(size, draw), shift) for size in plan.push_bytes]
    spans = [span for p, wire in enumerate(wires) for span in cut(p, wire.numel(), wire)]
    gpu.copy(plan, Route.PACK, spans, [on_gpu], [], scale)()
    for peer, wire in enumerate(wires):
        wanted = torch.empty(wire.numel(), dtype=torch.uint8)
        sources = core.addresses([x])
        library.spar_pack(plan.handle, peer, sources, None, wanted.data_ptr())
        if kind:
            wanted = scaled(wanted, dtype, scale)
        if not same_bits(wire.cpu(), wanted, dtype):
            return f"packed for {peer}"
    for route in (Route.UNPACK, Route.PUSH):
        expected, got = plan.outputs()[0].items, shifted(plan.outputs()[0].items, shift)
        if route == Route.UNPACK:
            pulled = [random_bytes(size, draw) for size in plan.pull_bytes]
            there = [shifted(wire, shift) for wire in pulled]
            spans = [span for p, wire in enumerate(there) for span in cut(p, wire.numel(), wire)]
            for peer, wire in enumerate(pulled):
                targets = core.addresses([expected])
                library.spar_unpack(plan.handle, peer, wire.data_ptr(), targets, ctypes.byref(scale))
        else:
            spans = cut(rank, plan.push_bytes[rank], None)
            sources, targets = core.addresses([x]), core.addresses([expected])
            library.spar_copy_own(plan.handle, sources, targets, ctypes.byref(scale))
        gpu.copy(plan, route, spans, [on_gpu], [got], scale)()
        if not same_bits(got.cpu(), expected, dtype):
            return str(route.name.lower())
    return ""


def scaled(data: torch.Tensor, dtype: torch.dtype, scale: Scale) -> torch.Tensor:
    """Scale as torch does on a CPU."""
    items: torch.Tensor = data.view(dtype)
    items = items / scale.factor if scale.divide else items * scale.factor
    return items.view(torch.uint8)


def check_kernels(gpu: Gpu, report: Report, rounds: int) -> None:
    draw = random.Random(1)
    count = 0
    for kind, (dtype, widths) in KINDS.items():
        for width in widths:
            for turn in range(rounds):
                items = max(width // dtype.itemsize, 1) if kind else 1
                inner = items * (draw.choice((1, 3, 5, 33)) if turn else LONG[gpu_core.machine.device])
                shape = (draw.randrange(1, 9), draw.randrange(1, 40), inner)
                wrong = check_copies(gpu, kind, width, shape, draw.choice((1, 2, 3, 4, 7)), draw)
                report.expect(not wrong, f"copy_{width}, {kind.name}, {shape}: {wrong}")
                count += 1
    report.say(f"- {count} random plans over 18 kernels, spans cut anywhere: the same bytes as on the CPU")


def check_torch(gpu: Gpu, report: Report) -> None:
    """Compare multiplication with torch's on the device.

    A division is as torch's on a CPU: on a GPU torch multiplies by the reciprocal, whose last bit may differ.
    """
    for kind, (dtype, _) in KINDS.items():
        if not kind:
            continue
        x = torch.randn(3 * 4096, dtype=dtype, device=gpu_core.machine.device)
        y = torch.empty_like(x)
        spec = core.Spec(dtype.itemsize, (x.numel(),), (1,), [0])
        plan = core.Plan(core.request("split", 1, 0, [spec], core.SIDE_PULL))
        gpu.copy(plan, Route.PUSH, [(0, 0, x.nbytes, 0)], [x], [y], Scale(kind, 0, 0.3))()
        report.expect(torch.equal(y, x * 0.3), f"{dtype} * 0.3 is not torch's")
    report.say("- a factor: the same values as torch's on the device")


def check_graphs(gpu: Gpu, report: Report) -> None:
    plan, x = strided_plan(512, 4 * MIB if gpu_core.machine.device == "cuda" else MIB // 4)
    wire = torch.zeros(x.numel(), dtype=torch.uint8, device=gpu_core.machine.device)
    pack = gpu.copy(plan, Route.PACK, whole_wires(plan, wire), [x], [])
    gpu_core.machine.synchronize()
    replay = gpu_core.machine.capture(pack)
    for _ in range(2):
        x.random_(0, 256)
        replay()
        report.expect(torch.equal(wire, x.transpose(0, 1).contiguous().flatten()), "a replayed graph")
    report.say("- captured and replayed")


def check_operations(report: Report) -> None:
    """Run gpu_ops.py, which starts a process for each rank."""
    report.say()
    with tempfile.TemporaryDirectory() as folder:
        package = kit.package_path(kit.FOLDER)
        try:
            if package is None:
                kit.build_package(package := Path(folder))
        except RuntimeError as error:
            report.say(f"Operations between ranks were not run: {error}")
            return
        path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
        script = Path(__file__).resolve().with_name("gpu_ops.py")
        done = subprocess.run(
            [sys.executable, str(script)],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
    if done.returncode == SKIPPED:
        report.say(f"Operations between ranks were not run: {done.stderr.strip()}.")
        return
    report.say(done.stdout.strip())
    report.expect(done.returncode == 0, f"operations between ranks: {done.stderr.strip()[-2000:]}")


def describe(gpu: Gpu, report: Report) -> None:
    """Begin the page."""
    name, capability = "stand-ins", "none"
    if gpu_core.machine.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        name, capability = properties.name, f"{properties.major}.{properties.minor}"
    report.say(f"## {name}, {datetime.date.today()}")
    report.say()
    report.say(
        f"Compute capability {capability}, torch {torch.__version__}, CUDA {torch.version.cuda}; kernels "
        f"compiled or read, loaded and launched in {gpu.seconds:.2f} s."
    )
    report.say()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="check correctness only, in fewer rounds")
    parser.add_argument("--alone", action="store_true", help="without the operations between ranks")
    parser.add_argument("--out", help="also write the page to this file")
    parser.add_argument("--data", help="also write what was found to this file, as JSON")
    parser.add_argument("--core", help="use the core in this file instead of building it")
    parser.add_argument("--stand-ins", action="store_true", help="check over the tests' stand-ins for CUDA")
    options = parser.parse_args()
    report = Report(options.data)
    if options.stand_ins:
        gpu_core.use_stand_ins()
    if options.core:
        gpu_core.use_core(options.core)
    if not gpu_core.machine.available():
        report.skip("gpu_check: torch has no CUDA device; nothing was checked")
    gpu = Gpu()
    describe(gpu, report)
    check_kernels(gpu, report, 1 if options.stand_ins else 4 if options.quick else 40)
    check_torch(gpu, report)
    check_graphs(gpu, report)
    gpu_core.machine.synchronize()
    if not options.quick:
        sizes, turns = ((MIB // 4,), 1) if options.stand_ins else ((16 * MIB, 64 * MIB, 256 * MIB), 20)
        gpu_times.time_copies(gpu, report, sizes, turns)
        scaled = [(kind, dtype) for kind, (dtype, _) in KINDS.items() if kind]
        gpu_times.time_scales(gpu, report, scaled, sizes[0], turns)
        gpu_times.time_host(gpu, report)
    if not options.quick and not options.alone:
        check_operations(report)
    report.say()
    report.say(f"{len(report.failures)} wrong." if report.failures else "All correct.")
    if options.out:
        Path(options.out).write_text("\n".join(report.lines) + "\n")
    return report.status()


if __name__ == "__main__":
    sys.exit(main())
