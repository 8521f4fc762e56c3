# SPDX-License-Identifier: Apache-2.0
"""Probe what ends when: event queries behind a full launch queue, aborts of communicators with live graphs.

Each probe is a process with a time limit, since some may hang or crash: that is what they are to show. A
probe that fails is a fact, not a failure of the stage. Each communicator has one rank, which sends to itself;
only `symmetric memory` takes two processes.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from driver import DeviceAddress, Driver
from host import UINT8, Id, Nccl
from report import Report, stage

LIMIT = 15  # seconds for a probe
SOON = 2.0  # seconds after which something "does not return"
Found = dict[str, Any]


def after(seconds: float, thread: threading.Thread, begin: float) -> str:
    """Wait for a thread; return when it ended, or that it did not."""
    thread.join(seconds)
    spent = time.monotonic() - begin
    return f"not after {spent:.1f} s" if thread.is_alive() else f"after {spent:.2f} s"


def started(function: Callable[[], Any]) -> tuple[threading.Thread, float]:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread, time.monotonic()


class Hold:
    """A word in page-locked memory for which a stream waits."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.driver.enter(0)
        self.at: int = self.driver.get(ctypes.c_void_p, "cuMemHostAlloc", 2020, ctypes.c_size_t(64), 2)
        self.word = ctypes.c_uint32.from_address(self.at)
        self.word.value = 0

    def address(self) -> DeviceAddress:
        at: int = self.driver.get(
            DeviceAddress, "cuMemHostGetDevicePointer", 3020, ctypes.c_void_p(self.at), 0
        )
        return DeviceAddress(at)

    def stop(self, stream: int) -> None:
        """Let the stream wait until `release`."""
        self.driver.call(
            "cuStreamWaitValue32", 11070, ctypes.c_void_p(stream), self.address(), ctypes.c_uint32(1), 0
        )

    def write(self, stream: int, value: int) -> None:
        """Let the stream write the word."""
        self.driver.call(
            "cuStreamWriteValue32", 11070, ctypes.c_void_p(stream), self.address(), ctypes.c_uint32(value), 0
        )

    def release(self) -> None:
        self.word.value = 1


class Loop:
    """Self-sends over a communicator of one rank, in a stream of its own."""

    def __init__(self) -> None:
        self.nccl = Nccl()
        self.x, self.y = (
            torch.arange(1 << 20, device="cuda", dtype=torch.uint8),
            torch.zeros(1 << 20, device="cuda", dtype=torch.uint8),
        )

    def send(self, stream: int) -> None:
        library, comm, count = self.nccl.library, self.nccl.comm, self.x.numel()
        at = ctypes.c_void_p(stream)
        self.nccl.check(library.ncclGroupStart())
        self.nccl.check(library.ncclSend(self.x.data_ptr(), count, UINT8, 0, comm, at))
        self.nccl.check(library.ncclRecv(self.y.data_ptr(), count, UINT8, 0, comm, at))
        self.nccl.check(library.ncclGroupEnd())

    def abort(self) -> int:
        code: int = self.nccl.library.ncclCommAbort(self.nccl.comm)
        return code

    def revoke(self) -> int:
        code: int = self.nccl.library.ncclCommRevoke(self.nccl.comm, 0)
        return code

    def state(self) -> int:
        code = ctypes.c_int(-1)
        self.nccl.library.ncclCommGetAsyncError(self.nccl.comm, ctypes.byref(code))
        return code.value

    def captured(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        self.send(stream.cuda_stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
            self.send(torch.cuda.current_stream().cuda_stream)
        self.y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(self.x, self.y), "a replay sends other bytes"
        return graph


def replayed(graph: torch.cuda.CUDAGraph) -> str:
    def work() -> None:
        graph.replay()
        torch.cuda.synchronize()

    thread, begin = started(work)
    return after(SOON, thread, begin)


# ---- the probes ----


def full_queue() -> Found:
    """Query an event, a stream and a host word while another thread's launches block."""
    hold, driver = Hold(), Driver()
    stream = torch.cuda.Stream()
    x = torch.zeros(16, device="cuda")
    event = driver.get(ctypes.c_void_p, "cuEventCreate", 2000, 2)
    x.add_(1)  # loads the kernel: the driver loads none while a stream waits, and then blocks all threads
    torch.cuda.synchronize()
    hold.stop(stream.cuda_stream)
    driver.call("cuEventRecord", 2000, ctypes.c_void_p(event), ctypes.c_void_p(stream.cuda_stream))
    launches = 0
    newest = time.monotonic()

    def launch() -> None:
        nonlocal launches, newest
        with torch.cuda.stream(stream):
            for _ in range(20000):
                x.add_(1)
                launches, newest = launches + 1, time.monotonic()

    thread, _ = started(launch)
    while thread.is_alive() and time.monotonic() - newest < 0.5:
        time.sleep(0.01)
    found: Found = {"launches before one blocks": launches, "is blocked": thread.is_alive()}
    calls: dict[str, Callable[[], Any]] = {
        "event query": lambda: driver.function("cuEventQuery", 2000)(ctypes.c_void_p(event)),
        "stream query": lambda: driver.function("cuStreamQuery", 2000)(ctypes.c_void_p(stream.cuda_stream)),
        "record on another stream": lambda: torch.cuda.Event().record(torch.cuda.Stream()),
        "launch on another stream": lambda: launch_elsewhere(),
    }

    def launch_elsewhere() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.zeros(16, device="cuda")

    for name, call in calls.items():

        def work(call: Callable[[], Any] = call) -> None:
            driver.enter(0)
            call()

        waiting, begin = started(work)
        found[name] = after(SOON, waiting, begin)
    hold.release()
    thread.join(10)
    torch.cuda.synchronize()
    return found


def stream_writes() -> Found:
    """Time writes of a word by a stream, also in a graph."""
    hold, stream = Hold(), torch.cuda.Stream()
    begin = time.perf_counter()
    for number in range(1000):
        hold.write(stream.cuda_stream, number + 1)
    host = (time.perf_counter() - begin) * 1e3
    torch.cuda.synchronize()
    found: Found = {"the word after 1000 writes": hold.word.value, "us of a write on the host": host}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        hold.write(torch.cuda.current_stream().cuda_stream, 7)
    hold.word.value = 0
    graph.replay()
    torch.cuda.synchronize()
    return found | {"the word after a replay": hold.word.value}


def abort_of_a_captured() -> Found:
    return end_of_a_captured(revokes=False)


def abort_of_a_revoked() -> Found:
    """Crash, perhaps."""
    return end_of_a_captured(revokes=True)


def end_of_a_captured(revokes: bool) -> Found:
    loop = Loop()
    graph = loop.captured()
    found: Found = {"revoke": loop.revoke()} if revokes else {}
    thread, begin = started(loop.abort)
    found["abort returns"] = after(SOON, thread, begin)
    print(json.dumps(found), flush=True)
    found["a replay ends"] = replayed(graph)
    print(json.dumps(found), flush=True)
    begin = time.monotonic()
    destroyed, begin = started(graph.reset)
    found["the graph's destruction returns"] = after(SOON, destroyed, begin)
    found["then the abort has returned"] = after(SOON, thread, begin)
    print(json.dumps(found), flush=True)
    torch.zeros(1, device="cuda").add_(1).item()
    return found | {"the context lives": True}


def two_communicators() -> Found:
    """Abort the second of two communicators on a stream that the first one's wait holds."""
    first, second, hold = Loop(), Loop(), Hold()
    stream = torch.cuda.Stream()
    for loop in (first, second):
        loop.send(stream.cuda_stream)
    torch.cuda.synchronize()
    hold.stop(stream.cuda_stream)
    first.send(stream.cuda_stream)
    second.send(stream.cuda_stream)
    thread, begin = started(second.abort)
    found: Found = {"abort of the second returns": after(SOON, thread, begin)}
    other, begin = started(first.abort)
    found["abort of the first returns"] = after(SOON, other, begin)
    hold.release()
    found["released, the second"] = after(SOON, thread, begin)
    found["released, the first"] = after(SOON, other, begin)
    return found


def revoke() -> Found:
    """List the codes of a communicator that was revoked."""
    loop = Loop()
    stream = torch.cuda.Stream()
    loop.send(stream.cuda_stream)
    found: Found = {"state before": loop.state(), "revoke": loop.revoke(), "state after": loop.state()}
    found["second revoke"] = loop.revoke()
    try:
        loop.send(stream.cuda_stream)
        found["send after"] = 0
    except RuntimeError as error:
        found["send after"] = str(error)
    thread, begin = started(loop.abort)
    return found | {"abort returns": after(SOON, thread, begin)}


class Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.14, which later versions accept."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


def without_blocking() -> Found:
    """List the codes of a communicator that does not block."""
    loop = Loop.__new__(Loop)
    loop.nccl = Nccl.__new__(Nccl)
    library = loop.nccl.library = ctypes.CDLL("libnccl.so.2")
    own, loop.nccl.comm = Id(), ctypes.c_void_p()
    library.ncclGetUniqueId(ctypes.byref(own))
    config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21400, 0)
    library.ncclCommInitRankConfig.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int,
        Id,
        ctypes.c_int,
        ctypes.c_void_p,
    )
    found: Found = {
        "init": library.ncclCommInitRankConfig(ctypes.byref(loop.nccl.comm), 1, own, 0, ctypes.byref(config)),
        "state then": loop.state(),
    }
    end = time.monotonic() + 10
    while loop.state() == 7 and time.monotonic() < end:
        time.sleep(0.01)
    found["state later"] = loop.state()
    x, stream = torch.zeros(1 << 20, device="cuda", dtype=torch.uint8), torch.cuda.current_stream()
    message = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    library.ncclSend.argtypes = library.ncclRecv.argtypes = (*message, ctypes.c_void_p)
    library.ncclGroupStart()
    at = ctypes.c_void_p(stream.cuda_stream)
    found["send"] = library.ncclSend(x.data_ptr(), 1 << 20, UINT8, 0, loop.nccl.comm, at)
    found["receive"] = library.ncclRecv(x.data_ptr(), 1 << 20, UINT8, 0, loop.nccl.comm, at)
    found["group's end"] = library.ncclGroupEnd()
    found["state after it"] = loop.state()
    return found


def windows() -> Found:
    """Ask for what a transport over NCCL's windows needs."""
    loop, at, window, peer = Loop(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    library, comm, size = loop.nccl.library, loop.nccl.comm, ctypes.c_size_t(1 << 22)
    found: Found = {"version": loop.nccl.version, "MemAlloc": library.ncclMemAlloc(ctypes.byref(at), size)}
    found["WindowRegister"] = library.ncclCommWindowRegister(comm, at, size, ctypes.byref(window), 1)
    found["window"] = bool(window.value)
    ask = getattr(library, "ncclGetPeerDevicePointer", None)
    if ask is not None:
        found["GetPeerDevicePointer"] = ask(window, ctypes.c_size_t(0), 0, ctypes.byref(peer))
        found["reachable"] = bool(peer.value)
    return found


def share(rank: int, store: str, file: str) -> None:
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    torch.cuda.set_device(0)
    dist.init_process_group("gloo", f"file://{store}", datetime.timedelta(seconds=15), 2, rank)
    memory = symm_mem.empty(1 << 22, dtype=torch.uint8, device=torch.device("cuda:0"))
    begin = time.perf_counter()
    handle = symm_mem.rendezvous(memory, dist.group.WORLD.group_name)  # type: ignore[union-attr]
    spent = (time.perf_counter() - begin) * 1e3
    memory.fill_(rank + 1)
    torch.cuda.synchronize()
    dist.barrier()
    theirs = handle.get_buffer(1 - rank, (1 << 22,), torch.uint8)
    seen = theirs[-1].item()
    dist.barrier()
    if rank == 0:
        found = {
            "rendezvous ms": spent,
            "the peer's byte": seen,
            "buffers": [hex(p) for p in handle.buffer_ptrs],
            "signal pads": [hex(p) for p in handle.signal_pad_ptrs],
            "bytes of a signal pad": getattr(handle, "signal_pad_size", "unknown"),
        }
        Path(file).write_text(json.dumps(found))
    dist.destroy_process_group()


def symmetric_memory() -> Found:
    from torch.multiprocessing.spawn import spawn

    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found")
        spawn(share, (f"{folder}/store", str(file)), nprocs=2)
        found: Found = json.loads(file.read_text())
    return found


PROBES: dict[str, Callable[[], Found]] = {
    "full launch queue": full_queue,
    "words that a stream writes": stream_writes,
    "abort of a captured communicator": abort_of_a_captured,
    "abort of a captured and revoked communicator": abort_of_a_revoked,
    "two communicators on a stream": two_communicators,
    "revoke": revoke,
    "a communicator that does not block": without_blocking,
    "windows": windows,
    "symmetric memory of two processes": symmetric_memory,
}


def run_probe(report: Report, name: str) -> None:
    """Run a probe in a process of its own, and report the newest of what it printed."""
    command = [sys.executable, __file__, "--probe", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=LIMIT)
        end = "" if process.returncode == 0 else f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        end = f"killed after {LIMIT} s"
    lines = output.splitlines()
    found: Found = next((json.loads(line) for line in reversed(lines) if line.startswith("{")), {})
    if end:
        found["end"] = end
        print("\n".join(lines[-12:]), flush=True)
    report.figure(name, found)
    texts = {key: f"{value:.1f}" if isinstance(value, float) else value for key, value in found.items()}
    report.say(f"- {name}: {', '.join(f'{key} {text}' for key, text in texts.items())}")


def main() -> int:
    if "--probe" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--probe", choices=PROBES)
        found = PROBES[parser.parse_args().probe]()
        print(json.dumps(found), flush=True)
        os._exit(0)  # not through destructors of what was aborted
    report, _ = stage(__doc__)
    if not torch.cuda.is_available():
        report.skip("torch has no CUDA device")
    for name in PROBES:
        run_probe(report, name)
    return report.status()


if __name__ == "__main__":
    sys.exit(main())
