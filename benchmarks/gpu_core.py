# SPDX-License-Identifier: Apache-2.0
"""The C core's copy kernels on torch's device, for the checks and the timings: launches, graphs, times.

`use_stand_ins()` puts CPU tensors in the device's place, over the tests' stand-ins for CUDA's libraries: the
tests run the checks so. Times mean nothing there.
"""

from __future__ import annotations

import ctypes
import shutil
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from driver import Driver

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from helpers import core, core_abi  # type: ignore[import-not-found]
from helpers.core_abi import Route, Scale, Span  # type: ignore[import-not-found]

MIB = 1 << 20
LEAD = 200_000  # cycles that the host gets ahead of the device
Ways = dict[str, Callable[[], Any]]


class Machine:
    """torch's CUDA device."""

    device = "cuda"

    def available(self) -> bool:
        return torch.cuda.is_available()

    def prepare(self) -> None:
        """Make the device current, for calls of CUDA's libraries outside of torch."""
        torch.cuda.synchronize()

    def stream(self) -> int | None:
        handle: int = torch.cuda.current_stream().cuda_stream
        return handle

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def launched(self) -> None:
        """Called after each launch; torch's allocator lets tensors be freed before it ran."""

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that replays the work and waits for it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize()

        return replay

    def new_stream(self) -> Any:
        """Return a stream, whose handle is its `cuda_stream`."""
        return torch.cuda.Stream()

    def capture_on(self, stream: Any, work: Callable[[], None]) -> Callable[[], None]:
        """Capture what the work enqueues in the stream; return a function that enqueues a replay there."""
        graph = torch.cuda.CUDAGraph()
        # Relaxed: the work may allocate nothing, but asks the driver about other streams.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
            work()

        def replay() -> None:
            with torch.cuda.stream(stream):
                graph.replay()

        return replay

    def delay(self, stream: Any, cycles: int) -> None:
        """Keep the stream busy, with one thread of the device."""
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)

    def fork(self, streams: Iterable[Any]) -> None:
        """Let the streams wait for the current one."""
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())

    def join(self, streams: Iterable[Any]) -> None:
        """Let the current stream wait for the streams."""
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    def time(self, work: Callable[[], Any], lead: int = LEAD) -> float:
        """Return microseconds on the device, which begins `lead` cycles after the host."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(lead)  # so that gaps between launches do not count
        begin.record()
        work()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds * 1000


class StandIn(Machine):
    """CPU memory and the stand-in driver's streams."""

    device = "cpu"

    def __init__(self) -> None:
        self.driver = Driver()
        self.captured: int | None = None

    def available(self) -> bool:
        return True

    def prepare(self) -> None:
        self.driver.enter(0)

    def stream(self) -> int | None:
        return self.captured

    def synchronize(self) -> None:
        self.driver.call("cuCtxSynchronize", 2000)

    def launched(self) -> None:
        if self.captured is None:
            self.synchronize()

    def free_bytes(self) -> int:
        return 64 * MIB

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        stream = self.new_stream()

        def captured() -> None:
            self.captured = stream.cuda_stream
            work()
            self.captured = None

        enqueue = self.capture_on(stream, captured)

        def replay() -> None:
            enqueue()
            self.driver.call("cuStreamSynchronize", 2000, ctypes.c_void_p(stream.cuda_stream))

        return replay

    def new_stream(self) -> Any:
        stream = ctypes.c_void_p()
        self.driver.call("cuStreamCreate", 2000, ctypes.byref(stream), 1)
        return types.SimpleNamespace(cuda_stream=stream.value)

    def capture_on(self, stream: Any, work: Callable[[], None]) -> Callable[[], None]:
        handle, graph = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p()
        self.driver.call("cuStreamBeginCapture", 10010, handle, 0)
        work()
        self.driver.call("cuStreamEndCapture", 10000, handle, ctypes.byref(graph))
        return lambda: self.driver.call("cuGraphLaunch", 10000, graph, handle)

    def delay(self, stream: Any, cycles: int) -> None:
        pass

    def fork(self, streams: Iterable[Any]) -> None:
        self.synchronize()

    def join(self, streams: Iterable[Any]) -> None:
        self.synchronize()

    def time(self, work: Callable[[], Any], lead: int = LEAD) -> float:
        begin = time.perf_counter()
        work()
        self.synchronize()
        return (time.perf_counter() - begin) * 1e6


machine: Machine = Machine()


def use_stand_ins() -> None:
    global machine
    machine = StandIn()


def use_core(file: str) -> None:
    """Take the core from the file instead of building it."""
    core_abi.compile_core = lambda output, *rest, **more: shutil.copy(file, output)


def find_nvrtc() -> None:
    """Tell the core where packages have NVRTC, if torch has not loaded its own, which has precedence."""
    patterns = ("nvidia/cu*/lib/libnvrtc.so.1?", "nvidia/cuda_nvrtc/lib/libnvrtc.so.1?")
    if machine.device == "cuda":
        for path in (path for root in sys.path for each in patterns for path in Path(root).glob(each)):
            core.library().spar_dynlib_set_path(b"libnvrtc", str(path).encode())


class Gpu:
    """The core's CUDA device, on the machine's current stream."""

    def __init__(self) -> None:
        find_nvrtc()
        ordinal = torch.cuda.current_device() if machine.device == "cuda" else 0
        library = core.library()
        core_abi.check(library.spar_cuda_open())
        begin = time.perf_counter()
        core_abi.check(library.spar_cuda_prepare(ordinal))
        self.seconds = time.perf_counter() - begin
        self.before = core_abi.Entered()
        core_abi.check(library.spar_cuda_enter(ordinal, ctypes.byref(self.before)))

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
        rows = (Span * max(len(spans), 1))(*[Span(peer, route, *rest) for peer, *rest in spans])
        scale = scale or core.unscaled()
        sources, targets = core.addresses(inputs), core.addresses(outputs)

        def run() -> None:
            stream = machine.stream()
            core_abi.check(
                core.library().spar_cuda_copy_spans(
                    plan.handle, rows, len(spans), sources, targets, ctypes.byref(scale), stream
                )
            )
            machine.launched()

        return run


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=machine.device)


def strided_plan(row: int, total: int, world: int = 8) -> tuple[core.Plan, torch.Tensor]:
    """Plan an all_to_all of [tokens, world, row bytes]: rows of `row` bytes, world * row apart."""
    tokens = total // (row * world)
    x = random_bytes(tokens, world, row)
    spec = core.Spec(
        16, (tokens, world, row // 16), (world * row // 16, row // 16, 1), [1, 0, tokens * world]
    )
    return core.Plan(core.request("all_to_all", world, 0, [spec], core.SIDE_PULL)), x


def whole_wires(plan: core.Plan, wire: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Return a span for each peer's whole part, one behind the other in `wire`."""
    spans, at = [], wire.data_ptr()
    for peer, size in enumerate(plan.push_bytes):
        spans.append((peer, 0, size, at))
        at += size
    return spans


def microseconds(ways: Ways, turns: int, lead: int = LEAD) -> dict[str, float]:
    """Return each way's median time on the device; the ways run in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 3):
        for name, way in ways.items():
            spent = machine.time(way, lead)
            if turn >= 3:
                times[name].append(spent)
    return {name: statistics.median(each) for name, each in times.items()}


def host_microseconds(work: Callable[[], Any], turns: int = 20) -> float:
    """Return the least host time of several; the device is idle before each."""
    best = 1e12
    for _ in range(turns):
        machine.synchronize()
        begin = time.perf_counter()
        work()
        best = min(best, (time.perf_counter() - begin) * 1e6)
    machine.synchronize()
    return best
