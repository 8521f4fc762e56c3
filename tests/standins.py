"""Stand-ins for the libraries of a GPU, built from tests/standin: what the tests run instead of CUDA.

They are found as the real ones are, by name: processes are started with the folder in LD_LIBRARY_PATH. They
prove what is asked of the libraries, and in which order; nothing about the hardware.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "standin"
CSRC = FOLDER.parent.parent / "csrc"
FLAGS = ["-O1", "-g", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", "-D_GNU_SOURCE"]
# initial-exec: else the C library frees a thread's variables where TSan sees no order
FLAGS += ["-ffp-contract=off", "-fno-strict-aliasing", "-ftls-model=initial-exec"]


def build(folder: Path, *options: str, compiler: str = "gcc") -> None:
    """Builds libcuda.so.1, libnvrtc.so.12 and libnccl.so.2 into it; `options`: as -fsanitize=thread."""
    cxx = {"gcc": "g++", "clang": "clang++"}[compiler]
    kernels = folder / "kernels.o"
    cuda = [compiler, "-std=c11", *FLAGS, *options, "-fvisibility=hidden", "-shared"]
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
    _run(*cuda, FOLDER / "libcuda.c", FOLDER / "streams.c", kernels, "-lm", "-o", folder / "libcuda.so.1")
    nvrtc = [compiler, "-std=c11", *FLAGS, *options, "-shared"]
    _run(*nvrtc, FOLDER / "libnvrtc.c", "-o", folder / "libnvrtc.so.12")
    _run(*cuda, FOLDER / "libnccl.c", "-o", folder / "libnccl.so.2")


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")


@functools.cache
def built() -> Path:
    """A folder with all of them; it stays until the process ends."""
    folder = tempfile.TemporaryDirectory()
    built.folder = folder  # type: ignore[attr-defined]
    build(Path(folder.name))
    return Path(folder.name)


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
