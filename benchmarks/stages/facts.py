# SPDX-License-Identifier: Apache-2.0
"""List facts about the machine: driver, devices, their attributes, versions of the loaded libraries."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from driver import Driver, DriverError
from report import Report, stage

ATTRIBUTES = {  # CU_DEVICE_ATTRIBUTE_*, as cuda.h numbers them
    "COMPUTE_CAPABILITY_MAJOR": 75,
    "COMPUTE_CAPABILITY_MINOR": 76,
    "MULTIPROCESSOR_COUNT": 16,
    "ASYNC_ENGINE_COUNT": 40,
    "L2_CACHE_SIZE": 38,
    "COMPUTE_MODE": 20,
    "COOPERATIVE_LAUNCH": 95,
    "COMPUTE_PREEMPTION_SUPPORTED": 90,
    "MEMORY_POOLS_SUPPORTED": 115,
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 102,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 103,
    "HANDLE_TYPE_FABRIC_SUPPORTED": 128,
    "MULTICAST_SUPPORTED": 132,
    "CAN_USE_64_BIT_STREAM_MEM_OPS": 122,
}


def attempt(what: Any, *arguments: Any) -> Any:
    """Return what the function returns, or why it failed, as text."""
    try:
        return what(*arguments)
    except (DriverError, OSError, AttributeError) as error:
        return f"unknown: {error}"


def device_facts(driver: Driver, ordinal: int) -> dict[str, Any]:
    device = driver.get(ctypes.c_int, "cuDeviceGet", 2000, ordinal)

    def name() -> str:
        text = ctypes.create_string_buffer(256)
        driver.call("cuDeviceGetName", 2000, text, len(text), device)
        return text.value.decode()

    facts = {"name": attempt(name)}
    facts["bytes"] = attempt(driver.get, ctypes.c_size_t, "cuDeviceTotalMem", 3020, device)
    for attribute, number in ATTRIBUTES.items():
        facts[attribute] = attempt(driver.get, ctypes.c_int, "cuDeviceGetAttribute", 2000, number, device)
    return facts


def peers(driver: Driver, count: int) -> dict[str, Any]:
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    ask = driver.get
    return {f"{a} to {b}": attempt(ask, ctypes.c_int, "cuDeviceCanAccessPeer", 4000, a, b) for a, b in pairs}


def mapped(name: str) -> list[str]:
    """Return the paths of the libraries in this process whose names begin so."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    return sorted(path for path in paths if Path(path).name.startswith(name))


def library_versions() -> dict[str, Any]:
    """Ask the libraries that importing torch has loaded, not torch's constants."""
    import torch

    def nccl(path: str) -> str:
        version = ctypes.c_int()
        ctypes.CDLL(path).ncclGetVersion(ctypes.byref(version))
        return f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100} ({path})"

    def nvrtc(path: str) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        ctypes.CDLL(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value} ({path})"

    found: dict[str, Any] = {"torch": torch.__version__, "torch's CUDA": str(torch.version.cuda)}
    found["NCCL"] = [attempt(nccl, path) for path in mapped("libnccl.so")] or "not loaded by torch"
    found["NVRTC"] = [attempt(nvrtc, path) for path in mapped("libnvrtc.so")] or "not loaded by torch"
    return found


def mps() -> str:
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return f"a control pipe in {folder}" if Path(folder, "control").exists() else "no"


def machine_facts() -> dict[str, Any]:
    tools = ("nvcc", "cc", "compute-sanitizer", "ncu", "cuobjdump")
    driver = Path("/proc/driver/nvidia/version")
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "C library": " ".join(platform.libc_ver()),
        "cores": len(os.sched_getaffinity(0)),
        "kernel driver": driver.read_text().splitlines()[0] if driver.exists() else "none",
        "MPS": mps(),
        "tools": [tool for tool in tools if shutil.which(tool)],
    }


def say(report: Report, title: str, facts: dict[str, Any]) -> None:
    report.figure(title, facts)
    for name, value in facts.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else value
        report.say(f"- {title}, {name}: {text}")


def main() -> int:
    report, _ = stage(__doc__)
    say(report, "machine", machine_facts())
    try:
        driver = Driver()
    except DriverError as error:
        report.skip(f"no CUDA driver: {error}")
    count = attempt(driver.get, ctypes.c_int, "cuDeviceGetCount", 2000)
    if not isinstance(count, int):
        count = 1
    if count == 0:
        report.skip("the CUDA driver finds no device")
    version = attempt(driver.get, ctypes.c_int, "cuDriverGetVersion", 2020)
    say(report, "driver", {"CUDA": version, "devices": count})
    for ordinal in range(count):
        say(report, f"device {ordinal}", device_facts(driver, ordinal))
    say(report, "can access", peers(driver, count))
    say(report, "libraries", library_versions())
    return report.status()


if __name__ == "__main__":
    sys.exit(main())
