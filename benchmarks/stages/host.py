# SPDX-License-Identifier: Apache-2.0
"""Time NCCL with one rank that sends to itself: the host's part, messages of several sizes and alignments.

57 groups of 7 messages are what spar's nccl transport issues for 1 GiB on 8 ranks.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import partial

import gpu_core
import torch
from gpu_core import MIB
from report import Report, stage

PEERS, UINT8 = 7, 1


class Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class Nccl:
    """The loaded libnccl, with a communicator of one rank."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnccl.so.2")
        version, own = ctypes.c_int(), Id()
        self.check(self.library.ncclGetVersion(ctypes.byref(version)))
        self.version: int = version.value
        self.check(self.library.ncclGetUniqueId(ctypes.byref(own)))
        self.comm = ctypes.c_void_p()
        self.library.ncclCommInitRank.argtypes = (ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int)
        self.check(self.library.ncclCommInitRank(ctypes.byref(self.comm), 1, own, 0))
        message = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
        self.library.ncclSend.argtypes = self.library.ncclRecv.argtypes = (*message, ctypes.c_void_p)

    def check(self, result: int) -> None:
        if result:
            self.library.ncclGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"NCCL: {self.library.ncclGetErrorString(result).decode()}")

    def group(self, sends: int, receives: int, bytes_: int, count: int) -> None:
        """Send `count` messages to this rank itself, one behind the other in memory."""
        stream = gpu_core.machine.stream()
        self.check(self.library.ncclGroupStart())
        for i in range(count):
            self.check(self.library.ncclSend(sends + i * bytes_, bytes_, UINT8, 0, self.comm, stream))
            self.check(self.library.ncclRecv(receives + i * bytes_, bytes_, UINT8, 0, self.comm, stream))
        self.check(self.library.ncclGroupEnd())

    def close(self) -> None:
        self.check(self.library.ncclCommAbort(self.comm))


def time_groups(nccl: Nccl, report: Report, x: torch.Tensor, y: torch.Tensor) -> None:
    def groups(number: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(number):
                nccl.group(x.data_ptr(), y.data_ptr(), 4096, PEERS)

        return work

    groups(3)()
    figures = {number: gpu_core.host_microseconds(groups(number)) for number in (1, 4, 57)}
    report.figure("host_us_of_groups", figures)
    report.say(f"Host time of groups of {PEERS} sends and receives of 4 KiB, Python included:")
    report.say(", ".join(f"{number}: {us:.0f} us" for number, us in figures.items()) + ".")


def time_sizes(nccl: Nccl, report: Report, x: torch.Tensor, y: torch.Tensor, sizes: tuple[int, ...]) -> None:
    """Time messages that begin at multiples of 16 bytes, and at 16 n + 8 and 16 n + 1."""
    report.table("bytes of each of 7", "aligned", "8 bytes off", "1 byte off")
    figures = []
    for size in sizes:
        us = {}
        for offset in (0, 8, 1):
            sends, receives = x.data_ptr() + offset, y.data_ptr() + offset
            group = partial(nccl.group, sends, receives, size, PEERS)
            us[offset] = gpu_core.microseconds({"group": group}, 10)["group"]
        report.row(str(size), *(f"{us[o]:.0f} us, {PEERS * size / us[o] / 1e3:.0f} GB/s" for o in (0, 8, 1)))
        figures.append({"bytes": size, "aligned_us": us[0], "off_8_us": us[8], "off_1_us": us[1]})
    report.figure("sizes", figures)


def main() -> int:
    report, options = stage(__doc__)
    sizes: tuple[int, ...] = (64 << 10, 2400 << 10, 8 * MIB, 32 * MIB)
    if options.stand_ins:
        gpu_core.use_stand_ins()
        sizes = (4096,)
    elif not gpu_core.machine.available():
        report.skip("torch has no CUDA device")
    gpu_core.machine.prepare()
    try:
        nccl = Nccl()
    except OSError as error:
        report.skip(f"no libnccl.so.2: {error}")
    x, y = (gpu_core.random_bytes(PEERS * sizes[-1] + 16) for _ in range(2))
    time_groups(nccl, report, x, y)
    time_sizes(nccl, report, x, y, sizes)
    nccl.group(x.data_ptr(), y.data_ptr(), sizes[0], PEERS)
    gpu_core.machine.synchronize()
    sent = PEERS * sizes[0]
    report.expect(torch.equal(x[:sent], y[:sent]), "what was sent is not what was received")
    report.figure("nccl", nccl.version)
    nccl.close()
    return report.status()


if __name__ == "__main__":
    sys.exit(main())
