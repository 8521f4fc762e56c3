# SPDX-License-Identifier: Apache-2.0
"""Build into dist/ what PyPI takes, and check it: a source distribution, and wheels made from it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

import cross
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
MOST_BYTES = 1_000_000
FILES = ["spar/_C.abi3.so", "spar/py.typed", "spar/_C.pyi", "spar_torch-*.dist-info/licenses/LICENSE"]
# torch's allocator calls the second and third one: csrc/devices/cuda/outputs.h
EXPORTS = ["PyInit__C", "spar_outputs_allocate", "spar_outputs_free"]
# All are parts of glibc. libdl has dlopen before glibc 2.34; ld-linux has thread-local variables.
LIBRARIES = re.compile(r"(lib(c|m|pthread|dl)|ld-linux.*)\.so\.\d+")


def build_sdist() -> Path:
    """Build the source distribution in isolation: pyproject.toml must list what a build needs."""
    run([sys.executable, "-m", "build", "--sdist", "--outdir", str(DIST), str(ROOT)])
    (sdist,) = DIST.iterdir()
    return sdist


def build_wheel(sdist: Path, name: str, folder: Path) -> subprocess.Popen[str]:
    """Start to build a target's wheel from a copy of the source distribution."""
    target = cross.TARGETS[name]
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(DIST)]
    command += [f"-C--build-option=--plat-name={target.wheel}", str(next(folder.iterdir()))]
    environment = os.environ | cross.environment(target)
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(command: list[str]) -> str:
    """Return what a command prints; if it fails, print that and exit."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(command)} failed")
    return done.stdout


def check_wheel(wheel: Path) -> None:
    """Check a wheel's files, its size, and that the library needs glibc alone and exports one function."""
    with zipfile.ZipFile(wheel) as archive:
        paths = [Path(name) for name in archive.namelist()]
        library = ELFFile(BytesIO(archive.read(FILES[0])))
    if missing := [file for file in FILES if not any(path.match(file) for path in paths)]:
        sys.exit(f"{wheel.name} lacks {', '.join(missing)}")
    if (size := wheel.stat().st_size) > MOST_BYTES:
        sys.exit(f"{wheel.name} has {size} bytes; at most {MOST_BYTES} are expected")
    dynamic, dynsym = library.get_section_by_name(".dynamic"), library.get_section_by_name(".dynsym")
    assert isinstance(dynamic, DynamicSection) and isinstance(dynsym, SymbolTableSection)
    needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
    if foreign := [name for name in needed if not LIBRARIES.fullmatch(name)]:
        sys.exit(f"{wheel.name}: the extension links to {', '.join(foreign)}")
    symbols = [symbol for symbol in dynsym.iter_symbols() if symbol["st_shndx"] != "SHN_UNDEF"]
    exports = [symbol.name for symbol in symbols]
    if sorted(exports) != EXPORTS:
        sys.exit(f"{wheel.name}: the extension exports {', '.join(exports)}; expected {', '.join(EXPORTS)}")


def check_platform(wheel: Path, tag: str) -> str:
    """Compare the wheel's platform tag with the oldest one that auditwheel finds it to fulfil."""
    version, architecture = re.fullmatch(r"manylinux_2_(\d+)_(.+)", tag).groups()  # type: ignore[union-attr]
    report = run([sys.executable, "-m", "auditwheel", "show", str(wheel)])
    found = re.search(rf'platform tag:\s+"manylinux_2_(\d+)_{architecture}"', report)
    if not wheel.stem.endswith(f"-cp310-abi3-{tag}") or not found or int(found[1]) > int(version):
        sys.exit(f"{wheel.name}: expected an abi3 wheel for {tag}; auditwheel reports:\n{report}")
    return f"manylinux_2_{found[1]}"


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    sdist = build_sdist()
    with tempfile.TemporaryDirectory() as folder:
        names = [name for name, target in cross.TARGETS.items() if target.wheel]
        builds = {name: build_wheel(sdist, name, Path(folder) / name) for name in names}
        for name, build in builds.items():
            output, _ = build.communicate()
            if build.returncode:
                sys.exit(f"{output}\nthe wheel for {name} cannot be built")
    for name in names:
        tag = cross.TARGETS[name].wheel
        (wheel,) = DIST.glob(f"*{tag}.whl")
        check_wheel(wheel)
        print(f"{wheel.name}: {wheel.stat().st_size} bytes, fulfils {check_platform(wheel, tag)}")
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, DIST.iterdir())])


if __name__ == "__main__":
    main()
