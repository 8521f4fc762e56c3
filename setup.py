# SPDX-License-Identifier: Apache-2.0
"""Build the C extension; pyproject.toml has the rest of the package's metadata.

Needs only a C compiler and CPython's headers: no torch, no CUDA. Environment: SPAR_WERROR=1 makes warnings
errors, SPAR_DEBUG=1 builds without optimisation, SPAR_SANITIZE=address,undefined with those sanitizers.
SPAR_REPOSITORY is the address that PyPI's page links to: release/description.py.
"""

import os
import runpy
import subprocess
import sys
import sysconfig
from glob import glob

from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

from distutils.ccompiler import new_compiler  # isort: skip  # setuptools', which is imported by now
from distutils.sysconfig import customize_compiler  # isort: skip

# What of csrc is built for Linux only, and what other systems have instead: the same functions, which say
# that there is no shared memory. The system is the target's: release/cross.py.
SYSTEM = sysconfig.get_platform().partition("-")[0]
LINUX = ("csrc/ipc/", "csrc/control/")
LINUX += tuple(f"csrc/transports/{name}/" for name in ("cuda", "push", "nccl"))
LINUX += ("csrc/transports/rendezvous.c", "csrc/transports/shm.c", "csrc/transports/torch.c")
LEFT_OUT = ("csrc/not_linux/",) if SYSTEM == "linux" else LINUX
SOURCES = [path for path in sorted(glob("csrc/**/*.c", recursive=True)) if not path.startswith(LEFT_OUT)]

# -ffp-contract=off: a scale must round exactly as torch rounds it.
# -fno-strict-aliasing: tensors of any dtype are copied through integer types.
compile_args = ["-std=c11", "-Wall", "-Wextra", "-fvisibility=hidden", "-O3"]
compile_args += ["-ffp-contract=off", "-fno-strict-aliasing", "-pthread"]
link_args = ["-pthread"]

if os.environ.get("SPAR_WERROR") == "1":  # not for users: a newer compiler may have new warnings
    compile_args.append("-Werror")
if os.environ.get("SPAR_DEBUG") == "1":
    compile_args += ["-g", "-O0", "-UNDEBUG"]
if sanitizers := os.environ.get("SPAR_SANITIZE"):
    compile_args += [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g", "-O1", "-UNDEBUG"]
    compile_args.append("-fno-wrapv")  # CPython's flags have -fwrapv, which hides signed overflow
    link_args.append(f"-fsanitize={sanitizers}")

version = runpy.run_path("spar/_version.py")["__version__"]
macros = [("SPAR_VERSION", f'"{version}"'), ("_GNU_SOURCE", None)]  # for Linux's calls under -std=c11
options = {"build_ext": {"force": True}}  # distutils does not notice changed headers or flags

# One wheel for every CPython from 3.10 on. Free-threaded builds have no limited API.
limited_api = not sysconfig.get_config_var("Py_GIL_DISABLED")
if limited_api:
    macros.append(("Py_LIMITED_API", "0x030A0000"))
    options["bdist_wheel"] = {"py_limited_api": "cp310"}

PACKAGES = {
    "linux": f"""\
    Debian, Ubuntu: apt-get install gcc libc6-dev python{sys.version_info[0]}.{sys.version_info[1]}-dev
    Fedora, RHEL:   dnf install gcc python3-devel""",
    "macosx": "    macOS: xcode-select --install",
}
UNSUPPORTED = f"""\
spar builds on Linux and macOS, not for {sysconfig.get_platform()}.
    Build it on Linux, or in a Linux container. There its operations run over shared memory,
    and between hosts over torch.distributed."""


def find_missing() -> str | None:
    """Probe the compiler with no header, the C library's and CPython's; describe the first that fails."""
    compiler = new_compiler()
    customize_compiler(compiler)
    command, headers = compiler.compiler_so, sysconfig.get_path("include")
    missing = {
        "": "a C compiler",
        "stdio.h": "the C library's headers",
        "Python.h": f"CPython's headers (Python.h, expected in {headers})",
    }
    for header, what in missing.items():
        probe = [*command, f"-I{headers}", "-E", "-x", "c", "-"]
        code = f"#include <{header}>\n" if header else ""
        try:
            done = subprocess.run(probe, input=code, capture_output=True, text=True)
        except OSError as error:
            return f"{what}: {error.strerror}: {command[0]} (the environment variable CC selects another)"
        if done.returncode:
            return f"{what}: {command[0]} failed: {(done.stderr.splitlines() or ['no reason given'])[0]}"
    return None


def checked(command: type[Command]) -> type[Command]:
    """Return a build command that first checks the system, because compiler errors would fill pages."""

    class Checked(command):
        def run(self) -> None:
            if SYSTEM not in ("linux", "macosx"):
                raise SystemExit(UNSUPPORTED)
            if missing := find_missing():
                raise SystemExit(f"spar needs {missing}\n{PACKAGES[SYSTEM]}")
            super().run()

    return Checked


description = runpy.run_path("release/description.py")["metadata"]
with open("README.md", encoding="utf-8") as readme:
    page = description(readme.read(), version, os.environ.get("SPAR_REPOSITORY"))

setup(
    **page,
    cmdclass={"build": checked(build), "build_ext": checked(build_ext)},
    ext_modules=[
        Extension(
            "spar._C",
            SOURCES,
            include_dirs=["csrc"],
            define_macros=macros,
            libraries=["m"],
            extra_compile_args=compile_args,
            extra_link_args=link_args,
            py_limited_api=limited_api,
        )
    ],
    options=options,
)
