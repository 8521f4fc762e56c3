# SPDX-License-Identifier: Apache-2.0
"""Build what benchmarks/bring_up.py needs on a machine without a compiler: python benchmarks/kit.py [FOLDER].

The folder, build/bring-up by default, holds:

- core.so: the C core, for gpu_check.py;
- package/spar: spar with its extension, for any CPython from 3.10 on;
- loop/libnccl.so.2: NCCL's functions for ranks that share one GPU (stages/loop_nccl.c);
- sources: a hash of what it was built of.

Build on a machine of the same architecture, whose C library is not newer, and copy the repository with the
folder. `make bring-up-kit` does it in the environment of `make build`.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "bring-up"
BUILD = "make bring-up-kit"
CORE, PACKAGE, LOOP, SOURCES = "core.so", "package", "loop/libnccl.so.2", "sources"


def build_core(file: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers import core_abi  # type: ignore[import-not-found]

    shutil.copy(core_abi.library()._name, file)


def build_package(folder: Path) -> None:
    """Fill the folder with the package and its extension."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "spar", folder / "spar", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    objects = folder / "objects"
    places = ["--build-lib", str(folder), "--build-temp", str(objects)]
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *places], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the extension could not be built: {done.stderr.strip()[-500:]}")
    shutil.rmtree(objects, ignore_errors=True)


def build_loop(file: Path) -> None:
    """Build the tests' stand-in for libnccl, with stages/loop_nccl.c in place of its sends and receives."""
    file.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-std=c11", "-O2", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror"]
    command += ["-fvisibility=hidden", "-D_GNU_SOURCE", f"-I{ROOT / 'csrc'}", f"-Wl,-soname,{file.name}"]
    command += [str(ROOT / "benchmarks/stages/loop_nccl.c"), "-o", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def sources() -> str:
    """Return the hash of the files of which a kit is built."""
    kinds = ("csrc/**/*.[ch]", "csrc/**/*.cu", "spar/**/*.py", "tests/standin/*", "benchmarks/stages/*.c")
    found = hashlib.sha256()
    for path in sorted(path for kind in kinds for path in ROOT.glob(kind)):
        found.update(f"{path.relative_to(ROOT)} ".encode() + path.read_bytes())
    return found.hexdigest()


def is_stale(folder: Path) -> bool:
    """Whether the kit was built of other sources than those here."""
    file = folder / SOURCES
    return file.exists() and file.read_text() != sources()


def package_path(folder: Path) -> Path | None:
    """Return the folder to import spar from: the kit's, else the repository if its extension is built."""
    for place in (folder / PACKAGE, ROOT):
        if list(place.glob("spar/_C*.so")):
            return place
    return None


def main() -> None:
    folder = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build_core(folder / CORE)
    build_package(folder / PACKAGE)
    build_loop(folder / LOOP)
    (folder / SOURCES).write_text(sources())
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 1e6:.1f} MB; copy it together with the repository")


if __name__ == "__main__":
    main()
