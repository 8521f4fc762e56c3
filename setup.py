"""The C extension; everything else about the package is in pyproject.toml.

Needs a C compiler and CPython's headers only: no torch, no CUDA. Environment: SPAR_WERROR=1 makes warnings
errors, SPAR_DEBUG=1 builds without optimisation, SPAR_SANITIZE=address,undefined with those sanitizers.
"""

import os
import runpy
import sysconfig
from glob import glob

from setuptools import Extension, setup

# local.c is a test-only transport: the tests build it, with -DSPAR_LOCAL, into a library without Python.
SOURCES = sorted({*glob("csrc/*.c"), *glob("csrc/*/*.c")} - {"csrc/transports/local.c"})

# -ffp-contract=off: a scale must round exactly as torch rounds it.
# -fno-strict-aliasing: tensors of any dtype are copied through integer types.
compile_args = ["-std=c11", "-Wall", "-Wextra", "-fvisibility=hidden", "-O3"]
compile_args += ["-ffp-contract=off", "-fno-strict-aliasing", "-pthread"]
link_args = ["-pthread"]

if os.environ.get("SPAR_WERROR") == "1":  # not for users: a newer compiler may warn of something new
    compile_args.append("-Werror")
if os.environ.get("SPAR_DEBUG") == "1":
    compile_args += ["-g", "-O0", "-UNDEBUG"]
if sanitizers := os.environ.get("SPAR_SANITIZE"):
    compile_args += [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g", "-O1", "-UNDEBUG"]
    compile_args.append("-fno-wrapv")  # CPython's own flags have -fwrapv, which hides signed overflow
    link_args.append(f"-fsanitize={sanitizers}")

version = runpy.run_path("spar/_version.py")["__version__"]
macros = [("SPAR_VERSION", f'"{version}"'), ("_GNU_SOURCE", None)]  # for Linux's calls under -std=c11
options = {"build_ext": {"force": True}}  # distutils does not notice changed headers or flags

# One wheel for every CPython from 3.10 on. Free-threaded builds have no limited API.
limited_api = not sysconfig.get_config_var("Py_GIL_DISABLED")
if limited_api:
    macros.append(("Py_LIMITED_API", "0x030A0000"))
    options["bdist_wheel"] = {"py_limited_api": "cp310"}

setup(
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
