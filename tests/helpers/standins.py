# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for a GPU's libraries, built from tests/standin, which the tests use instead of CUDA's.

spar finds them by name, as the real ones: in processes that were started with the folder in LD_LIBRARY_PATH,
or that have loaded them. They show which functions spar calls, and in which order; nothing about the
hardware.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers import workers

FOLDER = Path(__file__).resolve().parent.parent / "standin"
CSRC = FOLDER.parent.parent / "csrc"
NAMES = ("libcuda.so.1", "libnvrtc.so.12", "libnccl.so.2")
FLAGS = ["-O1", "-g1", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", "-D_GNU_SOURCE"]
# initial-exec: otherwise libc frees thread-local variables without an order that TSan sees
FLAGS += ["-ffp-contract=off", "-fno-strict-aliasing", "-ftls-model=initial-exec"]


def build(folder: Path, *options: str, compiler: str = "gcc") -> None:
    """Build libcuda.so.1, libnvrtc.so.12 and libnccl.so.2 into `folder`; `options`: flags."""
    cxx = {"gcc": "g++", "clang": "clang++"}[compiler]
    kernels = folder / "kernels.o"
    _run(
        cxx,
        "-std=c++17",
        "-fno-exceptions",
        *FLAGS,
        "-Wno-unknown-pragmas",
        *options,
        "-c",
        FOLDER / "kernels.cc",
        "-o",
        kernels,
    )
    shared = [compiler, "-std=c11", *FLAGS, *options, "-shared"]
    cuda, nvrtc, nccl = ([*shared, f"-Wl,-soname,{name}", "-o", folder / name] for name in NAMES)
    _run(
        *cuda,
        "-fvisibility=hidden",
        FOLDER / "libcuda.c",
        FOLDER / "streams.c",
        FOLDER / "graphs.c",
        FOLDER / "mapping.c",
        kernels,
        "-lm",
    )
    _run(*nvrtc, FOLDER / "libnvrtc.c")
    _run(*nccl, "-fvisibility=hidden", FOLDER / "libnccl.c", FOLDER / "nccl_work.c")


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")


def built(*options: str) -> Path:
    """Return a folder with the stand-ins, built with the options."""
    name = "-".join(("standins", *(option.strip("-").replace("=", "-") for option in options)))
    return workers.built(name, lambda folder: build(folder, *options))


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return this process's environment, with the stand-ins and a separate kernel cache."""
    return {
        **os.environ,
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        **more,
    }


def guard_environment() -> None:
    """Let this process change its environment only while no thread of the stand-ins reads it."""
    change = ctypes.CDLL(NAMES[0]).standin_setenv

    def putenv(name: bytes, value: bytes) -> None:
        change(name, value)

    def unsetenv(name: bytes) -> None:
        change(name, None)

    os.putenv, os.unsetenv = putenv, unsetenv  # type: ignore[assignment]


def needed(libraries: Sequence[Path]) -> None:
    """Skip a test whose ranks need some of these stand-ins, but have a torch with CUDA.

    That has mapped the real libraries, which spar prefers, and needs a driver for each device.
    """
    import torch  # here, because pytest-xdist's main process imports this module

    if torch.version.cuda is not None and {path.name for path in libraries} & set(NAMES):
        pytest.skip("stand-ins of CUDA's libraries need a torch without CUDA")


def sweep() -> None:
    """Remove the shared memory of libnccl.so.2 if its first rank died before all ranks had opened it."""
    for file in Path("/dev/shm").glob("spar-standin-*"):
        if not Path("/proc", file.name.split("-")[2]).exists():
            file.unlink(missing_ok=True)
