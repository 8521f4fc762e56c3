# SPDX-License-Identifier: Apache-2.0
"""Run a command with the environment in which setup.py compiles for another system: zig is the compiler.

    python release/cross.py aarch64-linux python setup.py build_ext

PyPI's ziglang has the C libraries of all targets, each glibc symbol in the version that the target names. The
extension uses CPython's limited API, so that this machine's headers serve every target.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

BUILD = Path(__file__).resolve().parent.parent / "build" / "cross"


class Target(NamedTuple):
    zig: str
    platform: str  # as sysconfig.get_platform() on the target, which setup.py reads
    wheel: str  # the platform tag of its wheel; "" if no wheel is published
    link: str  # further flags


TARGETS = {
    "x86_64-linux": Target("x86_64-linux-gnu.2.28", "linux-x86_64", "manylinux_2_28_x86_64", "-s"),
    "aarch64-linux": Target("aarch64-linux-gnu.2.28", "linux-aarch64", "manylinux_2_28_aarch64", "-s"),
    "x86_64-macos": Target("x86_64-macos", "macosx-11.0-x86_64", "", "-undefined dynamic_lookup"),
    "arm64-macos": Target("aarch64-macos", "macosx-11.0-arm64", "", "-undefined dynamic_lookup"),
}


def compiler(target: Target) -> list[str]:
    return [sys.executable, "-m", "ziglang", "cc", "-target", target.zig]


def headers() -> Path:
    """Copy CPython's headers to a folder that all targets use, and return it.

    Debian's pyconfig.h includes one of the target's architecture, which this machine lacks. This machine's is
    as good, because the limited API depends on the sizes of C's types alone.
    """
    include = Path(sysconfig.get_path("include"))
    folder = BUILD / include.name
    shutil.copytree(include, folder, dirs_exist_ok=True)
    own = include.parent / str(sysconfig.get_config_var("MULTIARCH")) / include.name / "pyconfig.h"
    shutil.copy(own if own.exists() else sysconfig.get_config_h_filename(), folder / "pyconfig.h")
    return folder


def environment(target: Target) -> dict[str, str]:
    cc = " ".join(compiler(target))
    return {
        "CC": f"{cc} -fno-sanitize=undefined -I{headers()}",  # by default zig sanitizes what is not optimized
        "LDSHARED": f"{cc} -shared {target.link}",
        "_PYTHON_HOST_PLATFORM": target.platform,
    }


if __name__ == "__main__":
    sys.exit(subprocess.run(sys.argv[2:], env=os.environ | environment(TARGETS[sys.argv[1]])).returncode)
