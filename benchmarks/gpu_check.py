"""Check spar on a GPU, and time it: python benchmarks/gpu_check.py [--quick] [--out FILE].

Needs this repository, torch with CUDA, and a C compiler. If the machine with the GPU has no compiler, build
elsewhere (--save FILE) and pass that file (--core FILE). Writes a page of results. The exit status is 1 if
something is wrong, and 2 if there is no GPU.

Correctness:

- each kernel against the CPU's copies, to the bit, with spans that begin anywhere;
- multiplication against torch on the device;
- capture and replay, also with tables that are first needed inside a capture.

Speed:

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
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from helpers import core, core_abi  # type: ignore[import-not-found]
from helpers.core_abi import Route, Scale, ScaleType, Span  # type: ignore[import-not-found]

KINDS = {  # spar's type: torch's dtype, and the widths of its kernels
    ScaleType.UNSCALED: (torch.uint8, (16, 8, 4, 2, 1)),
    ScaleType.F16: (torch.float16, (16, 4, 2)),
    ScaleType.BF16: (torch.bfloat16, (16, 4, 2)),
    ScaleType.F32: (torch.float32, (16, 4)),
    ScaleType.F64: (torch.float64, (16, 8)),
    ScaleType.C64: (torch.complex64, (16, 8)),
    ScaleType.C128: (torch.complex128, (16,)),
}
ROWS = (128, 256, 512, 1024, 2048, 4096, 8192)
MIB = 1 << 20
DEVICE = "cuda"
failures: list[str] = []
lines: list[str] = []


def say(line: str = "") -> None:
    print(line, flush=True)
    lines.append(line)


def expect(holds: bool, what: str) -> None:
    if not holds:
        failures.append(what)
        say(f"**wrong**: {what}")


class Gpu:
    """The core's CUDA device, on torch's current stream."""

    def __init__(self) -> None:
        self.device = core_abi.Device.in_dll(core.library(), "spar_device_cuda")
        for path in nvrtc_libraries():  # if torch has not loaded its own, which has precedence
            core.library().spar_dynlib_set_path(b"libnvrtc", str(path).encode())
        core_abi.check(self.device.open())
        begin = time.perf_counter()
        core_abi.check(self.device.prepare(torch.cuda.current_device()))
        self.seconds = time.perf_counter() - begin
        self.before = ctypes.c_void_p()
        core_abi.check(self.device.enter(torch.cuda.current_device(), ctypes.byref(self.before)))

    def copy(
        self,
        plan: core.Plan,
        route: Route,
        spans: Sequence[tuple[int, int, int, int]],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        scale: Scale | None = None,
    ) -> Callable[[], None]:
        """Return a function that enqueues the copy; spans are (peer, low, high, wire)."""
        rows = (Span * max(len(spans), 1))(*[Span(*span) for span in spans])
        scale = scale or core.unscaled()
        sources, targets = core.addresses(inputs), core.addresses(outputs)

        def run() -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if DEVICE == "cuda" else None)
            core_abi.check(
                self.device.copy_spans(
                    plan.handle, route, rows, len(spans), sources, targets, ctypes.byref(scale), stream
                )
            )

        return run


def nvrtc_libraries() -> list[Path]:
    patterns = ("nvidia/cu*/lib/libnvrtc.so.1?", "nvidia/cuda_nvrtc/lib/libnvrtc.so.1?")
    return [path for root in sys.path for pattern in patterns for path in sorted(Path(root).glob(pattern))]


# ---- correct ----


def random_bytes(count: int, draw: random.Random) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def shifted(data: torch.Tensor, shift: int) -> torch.Tensor:
    """Copy the bytes to the device, `shift` bytes behind a multiple of 256."""
    room = torch.full((data.numel() + shift + 16,), 0xEE, dtype=torch.uint8, device=DEVICE)
    room[shift : shift + data.numel()] = data.flatten().to(DEVICE)
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
    library, cpu = core.library(), core.cpu()

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
        core_abi.check(library.spar_pack(plan.handle, cpu, peer, sources, wanted.data_ptr(), None))
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
                core_abi.check(
                    library.spar_unpack(
                        plan.handle, cpu, peer, wire.data_ptr(), targets, ctypes.byref(scale), None
                    )
                )
        else:
            spans = cut(rank, plan.push_bytes[rank], None)
            sources, targets = core.addresses([x]), core.addresses([expected])
            core_abi.check(
                library.spar_copy_own(plan.handle, cpu, sources, targets, ctypes.byref(scale), None)
            )
        gpu.copy(plan, route, spans, [on_gpu], [got], scale)()
        if not same_bits(got.cpu(), expected, dtype):
            return str(route.name.lower())
    return ""


def scaled(data: torch.Tensor, dtype: torch.dtype, scale: Scale) -> torch.Tensor:
    """Scale as torch does on a CPU."""
    items: torch.Tensor = data.view(dtype)
    items = items / scale.factor if scale.divide else items * scale.factor
    return items.view(torch.uint8)


def check_kernels(gpu: Gpu, rounds: int) -> None:
    draw = random.Random(1)
    count = 0
    for kind, (dtype, widths) in KINDS.items():
        for width in widths:
            for turn in range(rounds):
                items = max(width // dtype.itemsize, 1) if kind else 1
                inner = items * draw.choice((1, 3, 5, 33)) if turn else items * 4099
                shape = (draw.randrange(1, 9), draw.randrange(1, 40), inner)
                wrong = check_copies(gpu, kind, width, shape, draw.choice((1, 2, 3, 4, 7)), draw)
                expect(not wrong, f"copy_{width}, {kind.name}, {shape}: {wrong}")
                count += 1
    say(f"- {count} random plans over 18 kernels, spans cut anywhere: the same bytes as on the CPU")


def check_torch(gpu: Gpu) -> None:
    """Compare multiplication with torch's on the device.

    A division is as torch's on a CPU: on a GPU torch multiplies by the reciprocal, whose last bit may differ.
    """
    for kind, (dtype, _) in KINDS.items():
        if not kind:
            continue
        x = torch.randn(3 * 4096, device="cuda").to(dtype) if not dtype.is_complex else None
        x = torch.randn(3 * 4096, dtype=dtype, device="cuda") if x is None else x
        y = torch.empty_like(x)
        spec = core.Spec(dtype.itemsize, (x.numel(),), (1,), [0])
        plan = core.Plan(core.request("split", 1, 0, [spec], core.SIDE_PULL))
        gpu.copy(plan, Route.PUSH, [(0, 0, x.nbytes, 0)], [x], [y], Scale(kind, 0, 0.3))()
        expect(torch.equal(y, x * 0.3), f"{dtype} * 0.3 is not torch's")
    say("- a factor: the same values as torch's on the device")


def strided_plan(row: int, total: int, world: int = 8) -> tuple[core.Plan, torch.Tensor]:
    """Plan an all_to_all of [tokens, world, row bytes]: rows of `row` bytes, world * row apart."""
    tokens = total // (row * world)
    x = torch.randint(0, 256, (tokens, world, row), dtype=torch.uint8, device="cuda")
    spec = core.Spec(
        16, (tokens, world, row // 16), (world * row // 16, row // 16, 1), [1, 0, tokens * world]
    )
    return core.Plan(core.request("all_to_all", world, 0, [spec], core.SIDE_PULL)), x


def check_graphs(gpu: Gpu) -> None:
    for warm in (True, False):
        plan, x = strided_plan(512, 4 * MIB)
        wire = torch.zeros(x.numel(), dtype=torch.uint8, device="cuda")
        each = plan.push_bytes[0]
        pack = gpu.copy(
            plan, Route.PACK, [(p, 0, each, wire.data_ptr() + p * each) for p in range(8)], [x], []
        )
        if warm:
            pack()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pack()
        for _ in range(2):
            x.random_(0, 256)
            graph.replay()
            wanted = x.transpose(0, 1).contiguous().flatten()
            expect(torch.equal(wire, wanted), f"a replayed graph, {'known' if warm else 'new'} plan")
    say("- captured and replayed, with tables from before the capture and with new ones")


# ---- fast ----


def microseconds(ways: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """Return each way's median time on the device; the ways run in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 3):
        for name, way in ways.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)  # the host gets ahead, so that gaps between launches do not count
            begin.record()
            way()
            end.record()
            end.synchronize()
            if turn >= 3:
                times[name].append(begin.elapsed_time(end) * 1000)
    return {name: statistics.median(each) for name, each in times.items()}


def time_copies(gpu: Gpu, sizes: Sequence[int], turns: int) -> None:
    say()
    say("| MiB | row | copy | pack | unpack | permute | pack, of copy | unpack, of copy |")
    say("|---|---|---|---|---|---|---|---|")
    low = []
    for total in sizes:
        for row in ROWS:
            plan, x = strided_plan(row, total)
            wire, y = torch.empty_like(x).flatten(), torch.empty_like(x)
            spans = [(p, 0, n, wire.data_ptr() + p * n) for p, n in enumerate(plan.push_bytes)]
            pack = gpu.copy(plan, Route.PACK, spans, [x], [])
            unpack = gpu.copy(plan, Route.UNPACK, spans, [], [y])
            flat, target = x.flatten(), torch.empty_like(wire)
            ways: dict[str, Callable[[], Any]] = {
                "copy": partial(target.copy_, flat),
                "pack": pack,
                "unpack": unpack,
                "permute": x.transpose(0, 1).contiguous,
            }
            us = microseconds(ways, turns)
            shares = [us["copy"] / us[way] for way in ("pack", "unpack")]
            say(
                f"| {total // MIB} | {row} | {us['copy']:.1f} us, {2 * total / us['copy'] / 1e3:.0f} GB/s | "
                f"{us['pack']:.1f} us | {us['unpack']:.1f} us | {us['permute']:.1f} us | "
                f"{shares[0]:.0%} | {shares[1]:.0%} |"
            )
            if row >= 1024 and min(shares) < 0.9:
                low.append(f"{total // MIB} MiB of {row} bytes")
    say()
    say(f"Below 90 % of a copy, from 1 KB rows: {', '.join(low) or 'none'}.")


def time_scales(gpu: Gpu, total: int, turns: int) -> None:
    say()
    say("| factor | unscaled | multiplied | divided by 3 |")
    say("|---|---|---|---|")
    for kind, (dtype, _) in KINDS.items():
        if not kind:
            continue
        plan, x = strided_plan(1024, total)
        x = torch.ones(total // dtype.itemsize, dtype=dtype, device="cuda")
        wire = torch.empty_like(x)
        spans = [(p, 0, n, wire.data_ptr() + p * n) for p, n in enumerate(plan.push_bytes)]
        factors = {"unscaled": None, "multiplied": Scale(kind, 0, 0.3), "divided": Scale(kind, 1, 3.0)}
        us = microseconds(
            {name: gpu.copy(plan, Route.PACK, spans, [x], [], scale) for name, scale in factors.items()},
            turns,
        )
        say(f"| {str(dtype)[6:]} | " + " | ".join(f"{value:.1f} us" for value in us.values()) + " |")


def time_host(gpu: Gpu) -> None:
    plan, x = strided_plan(512, 64 * 1024)
    wire = torch.empty_like(x).flatten()
    spans = [(p, 0, n, wire.data_ptr() + p * n) for p, n in enumerate(plan.push_bytes)]
    pack = gpu.copy(plan, Route.PACK, spans, [x], [])
    best = 1e9
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            pack()
        best = min(best, (time.perf_counter() - begin) * 1e4)
    say()
    say(f"Host time of one launch of 8 spans, including this script's Python: {best:.1f} us.")


def built_package(folder: str) -> str:
    """Return a folder to import `spar` from; build the extension there if this repository has none."""
    root = Path(__file__).resolve().parent.parent
    if list(root.glob("spar/_C*.so")):
        return str(root)
    shutil.copytree(root / "spar", Path(folder, "spar"))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", folder, "--build-temp", folder]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the extension could not be built: {done.stderr.strip()[-500:]}")
    return folder


def check_operations(device: str = DEVICE) -> None:
    """Run gpu_ops.py, which starts a process for each rank."""
    say()
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = os.pathsep.join([built_package(folder), os.environ.get("PYTHONPATH", "")])
        except RuntimeError as error:
            say(f"Operations between ranks were not run: {error}")
            return
        script = Path(__file__).resolve().with_name("gpu_ops.py")
        done = subprocess.run(
            [sys.executable, str(script), "--device", device],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
    if done.returncode == 2:
        say(f"Operations between ranks were not run: {done.stderr.strip()}.")
        return
    say(done.stdout.strip())
    expect(done.returncode == 0, f"operations between ranks: {done.stderr.strip()[-2000:]}")


def check_sanitizer() -> None:
    found = shutil.which("compute-sanitizer")
    say()
    say(
        "compute-sanitizer: run `compute-sanitizer python benchmarks/gpu_check.py --quick`"
        + ("" if found else " (it is not installed on this machine)")
        + "."
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="check correctness only, in fewer rounds")
    parser.add_argument("--out", help="also write the page to this file")
    parser.add_argument("--save", help="only build the core, into this file")
    parser.add_argument("--core", help="use the core in this file instead of building it")
    options = parser.parse_args()
    original = core_abi.compile_core
    if options.save:
        core_abi.compile_core = lambda output, *rest, **more: (
            original(output, *rest, **more),
            shutil.copy(output, options.save),
        )
        core.library()
        return 0
    if options.core:
        core_abi.compile_core = lambda output, *rest, **more: shutil.copy(options.core, output)
    if not torch.cuda.is_available():
        print("gpu_check: torch has no CUDA device; nothing was checked", file=sys.stderr)
        return 2
    properties = torch.cuda.get_device_properties(0)
    gpu = Gpu()
    say(f"## {properties.name}, {datetime.date.today()}")
    say()
    say(
        f"Compute capability {properties.major}.{properties.minor}, torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}; kernels compiled or read, loaded and launched in {gpu.seconds:.2f} s."
    )
    say()
    check_kernels(gpu, 4 if options.quick else 40)
    check_torch(gpu)
    check_graphs(gpu)
    torch.cuda.synchronize()
    if not options.quick:
        time_copies(gpu, (16 * MIB, 64 * MIB, 256 * MIB), 20)
        time_scales(gpu, 64 * MIB, 20)
        time_host(gpu)
        check_operations()
        check_sanitizer()
    say()
    say(f"{len(failures)} wrong." if failures else "All correct.")
    if options.out:
        Path(options.out).write_text("\n".join(lines) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
