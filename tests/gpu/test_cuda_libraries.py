# SPDX-License-Identifier: Apache-2.0
"""CUDA's libraries, opened at run time: declarations, error reasons, machine code, and its cache on disk."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from helpers import standins, workers
from helpers.core_abi import CSRC, FLAGS
from helpers.headers import check_declarations, packaged

pytestmark = pytest.mark.builds

ARCHITECTURES = os.environ.get("CUDA_ARCHITECTURES", "75 90").split()  # make test-core: of each major version
PARTS = ("base/dynlib", "base/env", "base/error", "base/util")
PARTS += tuple(f"devices/cuda/{name}" for name in ("driver", "nvrtc", "cubin_cache", "kernels"))
CHILD = """
import ctypes, locale, sys
folder, nvrtc, what, *rest = sys.argv[1:]
core = ctypes.CDLL(folder + "/part.so")
core.spar_last_error.restype = ctypes.c_char_p
if nvrtc:
    core.spar_dynlib_set_path(b"libnvrtc", nvrtc.encode())
if what == "driver":
    status = core.spar_driver_open()
else:
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    source = ctypes.addressof(ctypes.c_char.in_dll(core, "spar_kernel_source"))
    code, size, compiled = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_int(-1)
    status = core.spar_cubin_cache_get(
        ctypes.c_void_p(source), int(rest[0]), ctypes.byref(code), ctypes.byref(size), ctypes.byref(compiled)
    )
    assert locale.setlocale(locale.LC_ALL) == "C.UTF-8", locale.setlocale(locale.LC_ALL)
    if status == 0:
        sys.stdout.buffer.write(b"compiled " if compiled.value else b"found ")
        sys.stdout.buffer.write(ctypes.string_at(code, size.value))
if status:
    sys.stdout.buffer.write(core.spar_last_error())
sys.exit(status)
"""
DRIVER = """
import ctypes, sys
library, status = ctypes.CDLL(sys.argv[1]), ctypes.c_int()

def find(name, version, flags=1):
    function = ctypes.c_void_p()
    library.cuGetProcAddress_v2(
        name, ctypes.byref(function), version, ctypes.c_uint64(flags), ctypes.byref(status)
    )
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 2)(function.value) if function.value else None

assert find(b"cuMemAlloc", 3010) is None and status.value == 2
assert find(b"cuMemAlloc", 12000, 2) is None and find(b"cuNothing", 12000) is None and status.value == 1
create, context, made = find(b"cuEventCreate", 12000), ctypes.c_void_p(), ctypes.c_void_p()
assert create(ctypes.addressof(made), None) == 201
assert find(b"cuDevicePrimaryCtxRetain", 12000)(ctypes.addressof(context), None) == 0
assert find(b"cuCtxSetCurrent", 12000)(context, None) == 0
assert create(ctypes.addressof(made), None) == 0
if len(sys.argv) > 2:
    memory = ctypes.c_uint64()
    assert find(b"cuMemAlloc", 12000)(ctypes.addressof(memory), 1) == 0 and memory.value
    print("allocated", flush=True)
    ctypes.string_at(memory.value, 1)
"""


def build() -> Path:
    """A folder with part.so: the part of the core that opens libraries."""

    def fill(folder: Path) -> None:
        sources = [str(CSRC / f"{name}.c") for name in PARTS]
        command = ["cc", *FLAGS, "-O1", "-fPIC", "-shared", *sources, "-o", str(folder / "part.so")]
        subprocess.run(command, check=True)

    return workers.built("part", fill)


@pytest.fixture(scope="module")
def part() -> Path:
    return build()


def ask(part: Path, *words: str, nvrtc: str = "", **environment: str) -> tuple[int, bytes]:
    """The exit status of a new process, and its output."""
    command = [sys.executable, "-c", CHILD, str(part), nvrtc, *words]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **environment}, timeout=120)
    assert done.stderr == b"", done.stderr.decode()
    return done.returncode, done.stdout


# ---- declarations ----


CONSTANTS = {
    "SPAR_CU_SUCCESS": "CUDA_SUCCESS",
    "SPAR_CU_OUT_OF_MEMORY": "CUDA_ERROR_OUT_OF_MEMORY",
    "SPAR_CU_NOT_READY": "CUDA_ERROR_NOT_READY",
    "SPAR_CU_SMS": "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
    "SPAR_CU_COMPUTE_MAJOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
    "SPAR_CU_COMPUTE_MINOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
    "SPAR_CU_HOST_PORTABLE": "CU_MEMHOSTALLOC_PORTABLE",
    "SPAR_CU_HOST_MAPPED": "CU_MEMHOSTALLOC_DEVICEMAP",
    "SPAR_CU_STREAM_NON_BLOCKING": "CU_STREAM_NON_BLOCKING",
    "SPAR_CU_EVENT_DISABLE_TIMING": "CU_EVENT_DISABLE_TIMING",
    "SPAR_CU_CAPTURE_NONE": "CU_STREAM_CAPTURE_STATUS_NONE",
    "SPAR_CU_CAPTURE_RELAXED": "CU_STREAM_CAPTURE_MODE_RELAXED",
    "SPAR_CU_PINNED": "CU_MEM_ALLOCATION_TYPE_PINNED",
    "SPAR_CU_ON_DEVICE": "CU_MEM_LOCATION_TYPE_DEVICE",
    "SPAR_CU_DESCRIPTOR": "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
    "SPAR_CU_RECOMMENDED": "CU_MEM_ALLOC_GRANULARITY_RECOMMENDED",
    "SPAR_CU_READ_WRITE": "CU_MEM_ACCESS_FLAGS_PROT_READWRITE",
}


def test_driver_declarations_match_cuda_h(tmp_path: Path) -> None:
    """Each function has the signature of the requested version; types declared as int have its size."""
    lines = ["#include <cuda.h>", "#include <cudaTypedefs.h>", '#include "devices/cuda/driver.h"']
    lines.append(
        "#define CHECK(name, version, parameters) _Static_assert(__builtin_types_compatible_p("
        "__typeof__(((spar_driver *)0)->name), PFN_cu##name##_v##version), #name);"
    )
    lines.append("SPAR_DRIVER_FUNCTIONS(CHECK) SPAR_DRIVER_NEWER_FUNCTIONS(CHECK)")
    lines += [f'_Static_assert({ours} == {theirs}, "{ours}");' for ours, theirs in CONSTANTS.items()]
    for name in (
        "CUresult",
        "CUdevice",
        "CUdevice_attribute",
        "CUstreamCaptureStatus",
        "CUstreamCaptureMode",
        "CUmemAllocationType",
        "CUmemAllocationHandleType",
        "CUmemAllocationGranularity_flags",
        "CUmemLocationType",
        "CUmemAccess_flags",
    ):
        lines.append(f'_Static_assert(sizeof({name}) == sizeof(int), "{name}");')
    lines.append("static CUdeviceptr pointer; static unsigned long long *same = &pointer;")
    declared = (CSRC / "devices/cuda/driver.h").read_text()
    assert all(f"{ours} =" in declared for ours in CONSTANTS)
    assert declared.count("SPAR_CU_") == len(CONSTANTS), "a constant that is not compared with cuda.h"
    check_declarations(tmp_path, "cuda.h", "\n".join(lines) + "\n")


def test_nvrtc_declarations_match_nvrtc_h(tmp_path: Path) -> None:
    lines = ["#include <nvrtc.h>", '#include "devices/cuda/nvrtc.h"']
    lines.append(
        "#define CHECK(name, parameters) _Static_assert(__builtin_types_compatible_p("
        "nvrtcResult (*) parameters, __typeof__(&nvrtc##name)), #name);"
    )
    lines.append("SPAR_NVRTC_FUNCTIONS(CHECK)")
    lines.append('_Static_assert(sizeof(nvrtcResult) == sizeof(int) && NVRTC_SUCCESS == 0, "nvrtcResult");')
    check_declarations(tmp_path, "nvrtc.h", "\n".join(lines) + "\n")


# ---- error reasons ----


def test_standin_of_the_driver_needs_contexts_and_heeds_versions() -> None:
    """As the driver does, so that tests find calls of threads without a context."""
    library = standins.built() / "libcuda.so.1"
    subprocess.run([sys.executable, "-c", DRIVER, str(library)], check=True)


def test_device_memory_of_the_standin_is_not_the_hosts() -> None:
    """So that tests find code that reads a tensor of the device on the host."""
    library = standins.built() / "libcuda.so.1"
    done = subprocess.run([sys.executable, "-c", DRIVER, str(library), "and read"], capture_output=True)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, b"allocated\n")


def test_outdated_driver_is_a_reason(part: Path) -> None:
    folder = standins.built()
    assert ask(part, "driver", LD_LIBRARY_PATH=str(folder)) == (0, b"")
    status, text = ask(part, "driver", LD_LIBRARY_PATH=str(folder), STANDIN_LACKS="cuStreamWriteValue32")
    assert status and b"too old: it has no cuStreamWriteValue32 of CUDA 11.7" in text, text


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a driver")
def test_missing_driver_is_a_reason(part: Path) -> None:
    status, text = ask(part, "driver", LD_LIBRARY_PATH="/nowhere")
    assert status and text.startswith(b"no libcuda: libcuda.so.1: cannot open shared object file"), text


def test_missing_or_failing_compiler_is_a_reason(part: Path, tmp_path: Path) -> None:
    nvrtc = str(standins.built() / "libnvrtc.so.12")
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    status, text = ask(part, "cubin", "90", LD_LIBRARY_PATH="/nowhere", **cache)
    assert status and text.startswith(b"no libnvrtc: libnvrtc.so.13: cannot open"), text
    status, text = ask(part, "cubin", "90", nvrtc=nvrtc, STANDIN_NVRTC_FAILS="1", **cache)
    assert status and b"NVRTC_ERROR_COMPILATION: a line of the log" in text, text
    status, text = ask(part, "cubin", "120", nvrtc=nvrtc, **cache)
    assert status and text == b"NVRTC 12.9 makes no code for compute capability 12.0"
    assert not list(tmp_path.rglob("*.cubin"))
    assert ask(part, "cubin", "89", nvrtc=nvrtc, **cache)[0] == 0
    (made,) = tmp_path.rglob("*.cubin")
    assert made.name.startswith("sm_80-"), "code for an earlier minor version runs on a later one"


# ---- machine code ----


def machine_code(architecture: str) -> tuple[int, bytes]:
    found = packaged("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12", "lib64/libnvrtc.so.1*")
    if not found:
        pytest.skip("no libnvrtc here: neither a toolkit nor the package nvidia-cuda-nvrtc")
    cache = str(workers.folder() / "kept")
    return ask(build(), "cubin", architecture, nvrtc=str(found[0]), XDG_CACHE_HOME=cache)


def compiled(architecture: str) -> tuple[int, bytes]:
    """The result of the first of all workers that asks."""

    def fill(folder: Path) -> None:
        status, code = machine_code(architecture)
        (folder / "status").write_text(f"{status}")
        (folder / "code").write_bytes(code)

    folder = workers.built(f"cubin-{architecture}", fill)
    return int((folder / "status").read_text()), (folder / "code").read_bytes()


PREBUILD = [partial(compiled, architecture) for architecture in ARCHITECTURES]


@pytest.mark.not_under_asan("ASan's dlopen does not find the libraries beside the real NVRTC")
def test_every_kernel_compiles_for_every_architecture(part: Path) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(compiled, ARCHITECTURES))
    assert {status for status, _ in results} == {0}, results
    codes = [code for _, code in results]
    rows = (CSRC / "devices/cuda/kernels.h").read_text()
    names = [f"copy_{width}_{factor}" for width in (1, 2, 4, 8, 16) for factor in factors(rows, width)]
    assert len(names) == 18
    for architecture, code in zip(ARCHITECTURES, codes, strict=True):
        assert code.startswith(b"compiled \x7fELF"), architecture
        assert int.from_bytes(code[9 + 18 : 9 + 20], "little") == 190, "the machine is CUDA"
        assert all(f".text.{name}\0".encode() in code for name in names), architecture
    status, again = machine_code("90")
    assert status == 0 and again == codes[ARCHITECTURES.index("90")].replace(b"compiled", b"found", 1)


def factors(rows: str, width: int) -> Sequence[str]:
    """The factors of this width's rows in SPAR_KERNELS."""
    return [row.split(")")[0] for row in rows.split(f"X({width}, ")[1:]]


# What orders memory in a kernel, a letter each: a barrier, one with a vote, a count, a release, a poll, an
# acquire, and a count of rounds or offers.
STEPS = re.compile(
    r"(bar\.sync)|(bar\.red\.or\.pred)|(atom\.acq_rel\.gpu\.global\.inc\.u32)|(st\.release\.sys\.global\.u32)"
    r"|(ld\.relaxed\.sys\.global\.u32)|(ld\.acquire\.sys\.global\.u32)|(st\.global\.u32)"
)
POLLS = "[LAS]*LA[LAS]*R"  # and reads what it found once more
OFFERS = "S" + POLLS + "W"
SIGNALS = "bCRS"  # behind the copies of all CTAs
WAITS = POLLS + "Wb"
MARKS = "bCRS+"  # or an early end, behind what all CTAs read


@pytest.mark.not_under_asan("ASan's dlopen does not find the libraries beside the real NVRTC")
def test_signals_and_waits_are_of_system_scope(part: Path) -> None:
    """In the PTX of each kernel: peers on other GPUs see an offer or a signal behind what was written before
    it, and what is written after a wait comes after it."""
    text = ptx_of(part)
    kernels = text.split(".entry ")[1:]
    assert len(kernels) == 18
    for kernel in kernels:
        body = kernel.split("\n}")[0]
        name = body.split("(")[0]
        found = list(STEPS.finditer(body))
        order = "".join("bRCSLAW"[match.lastindex - 1] for match in found if match.lastindex)
        assert re.fullmatch("AR" + OFFERS + "S*" + SIGNALS + WAITS + MARKS, order), (name, order)
        for count in re.finditer("bC", order):  # no CTA copies between its barrier and its count
            assert "st." not in body[found[count.start()].start() : found[count.end()].start()], name
        assert "%globaltimer" in body and "trap" not in body, name


def ptx_of(part: Path) -> str:
    """Compile the kernels' source by the real NVRTC, to text, in a new process."""
    found = packaged("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12", "lib64/libnvrtc.so.1*")
    if not found:
        pytest.skip("no libnvrtc here: neither a toolkit nor the package nvidia-cuda-nvrtc")
    done = subprocess.run(
        [sys.executable, "-c", TO_PTX, str(part), str(found[0])], capture_output=True, text=True, check=True
    )
    return done.stdout


TO_PTX = """
import ctypes, sys
folder, nvrtc = sys.argv[1:]
core, compiler = ctypes.CDLL(folder + "/part.so"), ctypes.CDLL(nvrtc)
source = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(core, "spar_kernel_source")))
program, size = ctypes.c_void_p(), ctypes.c_size_t()
assert compiler.nvrtcCreateProgram(ctypes.byref(program), source, b"spar.cu", 0, None, None) == 0
options = (ctypes.c_char_p * 2)(b"--gpu-architecture=compute_90", b"--std=c++17")
assert compiler.nvrtcCompileProgram(program, 2, options) == 0
assert compiler.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
text = ctypes.create_string_buffer(size.value)
assert compiler.nvrtcGetPTX(program, text) == 0
print(text.value.decode())
"""


# ---- the cache on disk ----


def test_cubin_cache_hit_and_rebuild(part: Path, tmp_path: Path) -> None:
    nvrtc = str(standins.built() / "libnvrtc.so.12")

    def get(**environment: str) -> str:
        status, text = ask(
            part, "cubin", "90", nvrtc=nvrtc, **{"XDG_CACHE_HOME": str(tmp_path), **environment}
        )
        assert status == 0, text
        return text.decode().strip("\0")

    assert get() == "compiled stand-in"
    (kept,) = (path for path in tmp_path.rglob("*") if path.is_file())
    whole = kept.read_bytes()
    assert kept.stat().st_mode & 0o777 == 0o600 and kept.parent.stat().st_mode & 0o777 == 0o700
    assert get() == "found stand-in"

    def damage(what: str) -> None:
        if what == "a link":
            target = tmp_path / "target"
            target.write_bytes(whole)
            kept.unlink()
            kept.symlink_to(target)
        elif what == "others may write it":
            kept.chmod(0o620)
        elif what == "another's":
            os.chown(kept, 1, -1)
        elif what == "a folder":
            kept.unlink()
            kept.mkdir()
        else:
            new = {
                "a byte": whole[:-2] + b"!" + whole[-1:],
                "its end": whole[:-1],
                "more": whole + b"x",
                "nothing": b"",
                "a length": whole[:16] + b"\xff" * 8 + whole[24:],
                "another source's": whole[:8] + b"12345678" + whole[16:],
            }
            kept.write_bytes(new[what])

    cases = ["a byte", "its end", "more", "nothing", "a length", "another source's", "a link"]
    cases += ["others may write it"] + ["another's"] * (os.geteuid() == 0)
    for case in cases:
        damage(case)
        assert get() == "compiled stand-in", case
        assert not kept.is_symlink() and kept.read_bytes() == whole, case
        assert get() == "found stand-in", case
    damage("a folder")
    assert get() == "compiled stand-in", "an entry that cannot be replaced is no error"
    assert [path.name for path in kept.parent.iterdir()] == [kept.name], "no temporary file is left"


def test_kernels_compile_without_a_writable_cache(part: Path, tmp_path: Path) -> None:
    nvrtc = str(standins.built() / "libnvrtc.so.12")
    (tmp_path / "file").touch()
    for place in ({"HOME": str(tmp_path / "file")}, {"HOME": ""}, {"HOME": "relative"}):
        status, text = ask(part, "cubin", "90", nvrtc=nvrtc, XDG_CACHE_HOME="", **place)
        assert (status, text) == (0, b"compiled stand-in\0")
    status, text = ask(part, "cubin", "90", nvrtc=nvrtc, XDG_CACHE_HOME="", HOME=str(tmp_path))
    assert (status, text) == (0, b"compiled stand-in\0")
    assert list((tmp_path / ".cache" / "spar").iterdir())


def test_concurrent_writers_leave_one_complete_file(part: Path, tmp_path: Path) -> None:
    nvrtc = str(standins.built() / "libnvrtc.so.12")
    with ThreadPoolExecutor(8) as pool:
        places = [{"XDG_CACHE_HOME": str(tmp_path)}] * 8
        results = list(pool.map(lambda place: ask(part, "cubin", "90", nvrtc=nvrtc, **place), places))
    assert {status for status, _ in results} == {0}
    assert {text.split(b" ")[1] for _, text in results} == {b"stand-in\0"}
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1
    assert ask(part, "cubin", "90", nvrtc=nvrtc, XDG_CACHE_HOME=str(tmp_path)) == (0, b"found stand-in\0")
