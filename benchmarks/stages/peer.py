# SPDX-License-Identifier: Apache-2.0
"""Memory of a device that two processes map, and kernels that signal through it.

As a program, the second process, which p2p.py starts: python peer.py SOCKET CUBIN (a descriptor, and a file).
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from driver import DeviceAddress, Driver, DriverError

PINNED, ON_DEVICE, READ_WRITE, RECOMMENDED, POSIX_FD, FABRIC = 1, 1, 3, 1, 1, 8
GREETING, ANSWER = b"from the first process", b"from the second process"
LIMIT_NS = 3_000_000_000

HANDSHAKE = r"""
__device__ unsigned long long now()
{
    unsigned long long ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

/* The first side writes a round's number where the other waits for it, and waits for the answer. result: the
 * rounds that were completed, and the nanoseconds; nothing waits longer than the limit. */
extern "C" __global__ void handshake(unsigned *mine, unsigned *theirs, unsigned is_first, unsigned rounds,
                                     unsigned long long limit_ns, unsigned long long *result)
{
    unsigned long long begin = now();
    unsigned round = 1;
    for (; round <= rounds; round++) {
        unsigned seen = 0;
        if (is_first)
            asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(theirs), "r"(round) : "memory");
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory");
        } while (seen < round && now() - begin < limit_ns);
        if (seen < round)
            break;
        if (!is_first)
            asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(theirs), "r"(round) : "memory");
    }
    result[0] = round - 1;
    result[1] = now() - begin;
}
"""


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", Location),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", ctypes.c_ubyte * 8),  # a struct; none is set
    )


class AccessDesc(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Shared:
    """Memory of cuMemCreate, mapped here."""

    def __init__(self, driver: Driver, ordinal: int, size: int, descriptor: int | None = None) -> None:
        """Create it, or import it from the descriptor."""
        self.driver, self.size = driver, ctypes.c_size_t(size)
        self.handle = ctypes.c_uint64()
        if descriptor is None:
            prop = properties(ordinal, POSIX_FD)
            arguments = self.size, ctypes.byref(prop), _u64(0)
            driver.call("cuMemCreate", 10020, ctypes.byref(self.handle), *arguments)
        else:
            handle = ctypes.c_void_p(descriptor)
            driver.call("cuMemImportFromShareableHandle", 10020, ctypes.byref(self.handle), handle, POSIX_FD)
        nowhere = DeviceAddress(0)
        self.address: int = driver.get(
            DeviceAddress, "cuMemAddressReserve", 10020, self.size, ctypes.c_size_t(0), nowhere, _u64(0)
        )
        at = DeviceAddress(self.address)
        driver.call("cuMemMap", 10020, at, self.size, ctypes.c_size_t(0), self.handle, _u64(0))
        access = AccessDesc(Location(ON_DEVICE, ordinal), READ_WRITE)
        driver.call("cuMemSetAccess", 10020, at, self.size, ctypes.byref(access), ctypes.c_size_t(1))

    def export(self) -> int:
        """Return a new descriptor."""
        descriptor: int = self.driver.get(
            ctypes.c_int, "cuMemExportToShareableHandle", 10020, self.handle, POSIX_FD, _u64(0)
        )
        return descriptor

    def close(self) -> None:
        at = DeviceAddress(self.address)
        self.driver.call("cuMemUnmap", 10020, at, self.size)
        self.driver.call("cuMemAddressFree", 10020, at, self.size)
        self.driver.call("cuMemRelease", 10020, self.handle)


def _u64(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


def properties(ordinal: int, handle_types: int) -> AllocationProp:
    return AllocationProp(PINNED, handle_types, Location(ON_DEVICE, ordinal))


def granularity(driver: Driver, ordinal: int) -> int:
    prop = properties(ordinal, POSIX_FD)
    size: int = driver.get(
        ctypes.c_size_t, "cuMemGetAllocationGranularity", 10020, ctypes.byref(prop), RECOMMENDED
    )
    return size


def write(driver: Driver, address: int, data: bytes) -> None:
    driver.call("cuMemcpyHtoD", 3020, DeviceAddress(address), data, ctypes.c_size_t(len(data)))
    read(driver, address + len(data) - 1, 1)  # the copy may end after the call: see spar_driver_write


def read(driver: Driver, address: int, size: int) -> bytes:
    data = ctypes.create_string_buffer(size)
    driver.call("cuMemcpyDtoH", 3020, data, DeviceAddress(address), ctypes.c_size_t(size))
    return data.raw


class Handshake:
    """One side's kernel, in a stream of its own."""

    def __init__(self, driver: Driver, cubin: bytes) -> None:
        self.driver = driver
        module = driver.get(ctypes.c_void_p, "cuModuleLoadData", 2000, cubin)
        self.kernel = ctypes.c_void_p(
            driver.get(ctypes.c_void_p, "cuModuleGetFunction", 2000, ctypes.c_void_p(module), b"handshake")
        )
        self.stream = ctypes.c_void_p(driver.get(ctypes.c_void_p, "cuStreamCreate", 2000, 1))
        self.result: int = driver.get(DeviceAddress, "cuMemAlloc", 3020, ctypes.c_size_t(16))
        self.launch(self.result, self.result, False, 0)  # loads the kernel, before anything waits
        self.wait()

    def launch(self, mine: int, theirs: int, is_first: bool, rounds: int) -> None:
        arguments = (
            DeviceAddress(mine),
            DeviceAddress(theirs),
            ctypes.c_uint(is_first),
            ctypes.c_uint(rounds),
            ctypes.c_uint64(LIMIT_NS),
            DeviceAddress(self.result),
        )
        pointers = (ctypes.c_void_p * 6)(*(ctypes.addressof(argument) for argument in arguments))
        one = (1, 1, 1)
        self.driver.call("cuLaunchKernel", 4000, self.kernel, *one, *one, 0, self.stream, pointers, None)

    def wait(self) -> tuple[int, float]:
        """Return the rounds that were completed, and a round's microseconds."""
        self.driver.call("cuStreamSynchronize", 2000, self.stream)
        data = read(self.driver, self.result, 16)
        rounds, ns = (int.from_bytes(data[at : at + 8], "little") for at in (0, 8))
        return rounds, ns / max(rounds, 1) / 1e3


def send(channel: socket.socket, descriptors: tuple[int, ...] = (), **message: Any) -> None:
    socket.send_fds(channel, [json.dumps(message).encode()], descriptors)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, descriptors, _, _ = socket.recv_fds(channel, 65536, 4)
    if not data:
        raise DriverError("the other process is gone")
    message: dict[str, Any] = json.loads(data)
    if "error" in message:
        raise DriverError(f"in the other process: {message['error']}")
    return message, descriptors


def serve(channel: socket.socket, cubin: bytes) -> None:
    """The second process: import, read, write; then its side of the handshakes."""
    message, (descriptor,) = receive(channel)
    driver = Driver()
    driver.enter(message["ordinal"])
    begin = time.perf_counter()
    shared = Shared(driver, message["ordinal"], message["size"], descriptor)
    spent = time.perf_counter() - begin
    os.close(descriptor)
    seen = read(driver, shared.address, len(GREETING))
    write(driver, shared.address, ANSWER)
    send(channel, seen=seen.decode(errors="replace"), milliseconds=spent * 1e3)
    message, _ = receive(channel)
    side = Handshake(driver, cubin)
    send(channel)
    mine, theirs = (shared.address + message[flag] for flag in ("mine", "theirs"))
    side.launch(mine, theirs, False, message["rounds"])
    send(channel, rounds=side.wait()[0])
    receive(channel)  # the first process has read its result
    shared.close()


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    try:
        serve(channel, Path(sys.argv[2]).read_bytes())
    except DriverError as error:
        send(channel, error=str(error))


if __name__ == "__main__":
    main()
