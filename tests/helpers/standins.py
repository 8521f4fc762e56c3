"""Stand-ins for the libraries of a GPU, built from tests/standin: what the tests run instead of CUDA.

They are found as the real ones are, by name: in processes that are started with the folder in
LD_LIBRARY_PATH, or have loaded them. They prove what is asked of the libraries, and in which order; nothing
about the hardware.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from helpers import workers

FOLDER = Path(__file__).resolve().parent.parent / "standin"
CSRC = FOLDER.parent.parent / "csrc"
NAMES = ("libcuda.so.1", "libnvrtc.so.12", "libnccl.so.2")
FLAGS = ["-O1", "-g", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", "-D_GNU_SOURCE"]
# initial-exec: else the C library frees a thread's variables where TSan sees no order
FLAGS += ["-ffp-contract=off", "-fno-strict-aliasing", "-ftls-model=initial-exec"]


def build(folder: Path, *options: str, compiler: str = "gcc") -> None:
    """Builds libcuda.so.1, libnvrtc.so.12 and libnccl.so.2 into it; `options`: as -fsanitize=thread."""
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
    _run(*cuda, "-fvisibility=hidden", FOLDER / "libcuda.c", FOLDER / "streams.c", kernels, "-lm")
    _run(*nvrtc, FOLDER / "libnvrtc.c")
    _run(*nccl, "-fvisibility=hidden", FOLDER / "libnccl.c")


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")


def built(*options: str) -> Path:
    """A folder with all of them, built with the options."""
    name = "-".join(("standins", *(option.strip("-").replace("=", "-") for option in options)))
    return workers.built(name, lambda folder: build(folder, *options))


def environment(folder: Path, **more: str) -> dict[str, str]:
    """This process's environment, with the stand-ins in it and a cache of its own."""
    return {
        **os.environ,
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        **more,
    }


def sweep() -> None:
    """Removes what libnccl.so.2 shares between ranks, where the first died before all had come."""
    for file in Path("/dev/shm").glob("spar-standin-*"):
        if not Path("/proc", file.name.split("-")[2]).exists():
            file.unlink(missing_ok=True)
