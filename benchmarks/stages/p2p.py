# SPDX-License-Identifier: Apache-2.0
"""Probe what a peer-to-peer transport needs: shared device memory, handshakes, tensors over own memory.

- a POSIX descriptor of device memory: exported, passed to another process, imported, mapped, read, written;
- the time of a handshake: between two kernels through device memory and through page-locked memory, between a
  kernel and the host, and between kernels of two processes;
- DLPack: a torch tensor over memory of the driver's, freed when the last view is gone.

A probe that this machine does not allow is a fact, not a failure; wrong bytes are a failure.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_core
import peer
import torch
from dlpack import from_memory
from driver import DeviceAddress, Driver, DriverError
from helpers import core, core_abi  # type: ignore[import-not-found]
from peer import ANSWER, GREETING, Handshake, Shared
from report import Report, stage

FAR = 256  # bytes between two flags
ROUNDS, ROUNDS_OF_PROCESSES = 1000, 20
PORTABLE = 1


def compile_handshake(driver: Driver) -> bytes:
    """Compile the kernel for device 0, with the core's use of NVRTC."""
    library, device = core.library(), 0
    major, minor = (
        driver.get(ctypes.c_int, "cuDeviceGetAttribute", 2000, which, device) for which in (75, 76)
    )
    arch, code, size = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
    core_abi.check(library.spar_nvrtc_open())
    core_abi.check(library.spar_nvrtc_arch(10 * major + minor, ctypes.byref(arch)))
    text = peer.HANDSHAKE.encode()
    core_abi.check(library.spar_nvrtc_compile(text, arch, ctypes.byref(code), ctypes.byref(size)))
    return ctypes.string_at(code, size.value)


class Probes:
    def __init__(self, report: Report, driver: Driver) -> None:
        self.report, self.driver = report, driver
        self.cubin = b""

    def run(self, name: str, probe: Callable[[], dict[str, Any]]) -> None:
        """Report what the probe found, or why this machine does not allow it."""
        try:
            found = probe()
        except (DriverError, core_abi.CoreError, OSError) as error:
            found = {"not possible": str(error)}
        self.report.figure(name, found)
        texts = {key: f"{value:.1f}" if isinstance(value, float) else value for key, value in found.items()}
        self.report.say(f"- {name}: {', '.join(f'{key} {text}' for key, text in texts.items())}")

    def compile(self) -> dict[str, Any]:
        begin = time.perf_counter()
        self.cubin = compile_handshake(self.driver)
        return {"bytes": len(self.cubin), "ms": (time.perf_counter() - begin) * 1e3}

    def kernels(self, mine: int, theirs: int) -> dict[str, Any]:
        """Run both sides in this process, in two streams."""
        first, second = (Handshake(self.driver, self.cubin) for _ in range(2))
        second.launch(theirs, mine, False, ROUNDS)
        first.launch(mine, theirs, True, ROUNDS)
        done, us = first.wait()
        second.wait()
        return {"rounds": done, "us of a round": us}

    def in_device_memory(self) -> dict[str, Any]:
        at = self.driver.get(DeviceAddress, "cuMemAlloc", 3020, ctypes.c_size_t(2 * FAR))
        peer.write(self.driver, at, bytes(2 * FAR))
        return self.kernels(at, at + FAR)

    def page_locked(self) -> int:
        memory: int = self.driver.get(
            ctypes.c_void_p, "cuMemHostAlloc", 2020, ctypes.c_size_t(2 * FAR), PORTABLE
        )
        ctypes.memset(memory, 0, 2 * FAR)
        return memory

    def in_page_locked_memory(self) -> dict[str, Any]:
        at = self.page_locked()
        return self.kernels(at, at + FAR)

    def with_the_host(self) -> dict[str, Any]:
        """Answer a kernel from this thread, in Python."""
        at = self.page_locked()
        mine, theirs = (ctypes.c_uint32.from_address(at + offset) for offset in (FAR, 0))
        side = Handshake(self.driver, self.cubin)
        side.launch(at, at + FAR, True, ROUNDS)
        end = time.monotonic() + peer.LIMIT_NS / 1e9
        for number in range(1, ROUNDS + 1):
            while mine.value < number and time.monotonic() < end:
                pass
            theirs.value = number
        done, us = side.wait()
        return {"rounds": done, "us of a round": us}

    def two_processes(self) -> dict[str, Any]:
        """Share memory with another process, then run a side of the handshake in each."""
        found: dict[str, Any] = {"granularity": peer.granularity(self.driver, 0)}
        begin = time.perf_counter()
        shared = Shared(self.driver, 0, found["granularity"])
        found["create ms"] = (time.perf_counter() - begin) * 1e3
        peer.write(self.driver, shared.address, GREETING)
        with tempfile.NamedTemporaryFile() as cubin:
            Path(cubin.name).write_bytes(self.cubin)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            script = Path(__file__).with_name("peer.py")
            command = [sys.executable, str(script), str(theirs.fileno()), cubin.name]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
            theirs.close()
            ours.settimeout(20)
            try:
                self.meet(ours, shared, found)
            finally:
                ours.close()
                process.wait(10)
        shared.close()
        return found

    def meet(self, channel: socket.socket, shared: Shared, found: dict[str, Any]) -> None:
        descriptor = shared.export()
        peer.send(channel, (descriptor,), ordinal=0, size=found["granularity"])
        os.close(descriptor)
        message, _ = peer.receive(channel)
        answer = peer.read(self.driver, shared.address, len(ANSWER))
        self.report.expect(message["seen"] == GREETING.decode(), f"imported memory holds {message['seen']!r}")
        self.report.expect(answer == ANSWER, f"the other process's bytes are {answer!r}")
        found["import ms"] = message["milliseconds"]
        if not self.cubin:
            found["handshake"] = "no kernel"
            peer.send(channel, error="no kernel")
            return
        mine, theirs = FAR, 2 * FAR  # behind the texts
        peer.write(self.driver, shared.address + mine, bytes(2 * FAR))
        side = Handshake(self.driver, self.cubin)
        peer.send(channel, mine=theirs, theirs=mine, rounds=ROUNDS_OF_PROCESSES)
        peer.receive(channel)
        side.launch(shared.address + mine, shared.address + theirs, True, ROUNDS_OF_PROCESSES)
        found["rounds"], found["us of a round"] = side.wait()
        peer.receive(channel)
        peer.send(channel)

    def dlpack(self) -> dict[str, Any]:
        """Check a tensor over the driver's memory: values, views, gradients, and when it is released."""
        count, freed = 1024, []
        at = self.driver.get(DeviceAddress, "cuMemAlloc", 3020, ctypes.c_size_t(4 * count))
        device = 2 if gpu_core.machine.device == "cuda" else 1  # kDLCUDA, kDLCPU
        tensor = from_memory(at, count, device, lambda: freed.append(at))
        tensor.copy_(torch.arange(count, dtype=torch.float32))
        gpu_core.machine.synchronize()
        values = peer.read(self.driver, at, 4 * count)
        self.report.expect(struct.unpack(f"{count}f", values)[-1] == count - 1, "DLPack: values")
        self.report.expect(tensor.data_ptr() == at, "DLPack: another address")
        leaf = tensor.requires_grad_()
        (leaf * 2).sum().backward()
        total = leaf.grad.sum().item() if leaf.grad is not None else 0
        self.report.expect(total == 2 * count, "DLPack: gradients")
        view = tensor.detach()[1:]
        del tensor, leaf
        gc.collect()
        self.report.expect(not freed, "DLPack: released while a view lives")
        del view
        gc.collect()
        self.report.expect(freed == [at], "DLPack: not released with the last view")
        begin = time.perf_counter()
        for _ in range(100):
            from_memory(at, count, device, lambda: None)
        return {"device type": device, "us of a tensor, in Python": (time.perf_counter() - begin) * 1e4}


def main() -> int:
    report, options = stage(__doc__)
    gpu_core.use_core(f"{options.kit}/core.so")
    if options.stand_ins:
        gpu_core.use_stand_ins()
    elif not gpu_core.machine.available():
        report.skip("torch has no CUDA device")
    gpu_core.find_nvrtc()
    driver = Driver()
    driver.enter(0)
    probes = Probes(report, driver)
    probes.run("handshake kernel", probes.compile)
    probes.run("device memory of two processes", probes.two_processes)
    if probes.cubin:
        probes.run("handshake of kernels, device memory", probes.in_device_memory)
        probes.run("handshake of kernels, page-locked memory", probes.in_page_locked_memory)
        probes.run("handshake with the host, page-locked memory", probes.with_the_host)
    probes.run("DLPack", probes.dlpack)
    return report.status()


if __name__ == "__main__":
    sys.exit(main())
