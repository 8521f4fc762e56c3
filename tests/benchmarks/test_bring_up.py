# SPDX-License-Identifier: Apache-2.0
"""benchmarks/bring_up.py: all stages over stand-ins; stages that hang, crash or fail; declarations."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import core_abi, standins, workers
from helpers.headers import check_declarations, packaged

import spar

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "stages")]

import bring_up  # noqa: E402
import dlpack  # noqa: E402
import facts  # noqa: E402
import kit  # noqa: E402
import peer  # noqa: E402
from bring_up import STAGES, Stage  # noqa: E402


def built_kit() -> Path:
    """What `make bring-up-kit` builds, with the installed package in place of a new one."""

    def fill(folder: Path) -> None:
        kit.build_core(folder / kit.CORE)
        kit.build_loop(folder / kit.LOOP)
        (folder / kit.PACKAGE).mkdir()
        (folder / kit.PACKAGE / "spar").symlink_to(Path(spar.__file__).parent)

    return workers.built("bring-up-kit", fill)


def built_driver() -> Path:
    """A folder with the stand-ins, and a libcuda.so.1 that also does what only the stages ask for."""

    def fill(folder: Path) -> None:
        before = standins.built()
        for name in standins.NAMES[1:]:
            (folder / name).symlink_to(before / name)
        sources = [ROOT / "tests/benchmarks/libcuda.c", before / "kernels.o"]
        sources += [standins.FOLDER / name for name in ("streams.c", "graphs.c", "mapping.c")]
        command = [
            "gcc",
            "-std=c11",
            *standins.FLAGS,
            f"-I{standins.FOLDER}",
            "-fvisibility=hidden",
            "-shared",
        ]
        command += ["-Wl,-soname,libcuda.so.1", *map(str, sources), "-lm", "-o", str(folder / "libcuda.so.1")]
        subprocess.run(command, check=True)

    return workers.built("bring-up-stand-ins", fill)


def results(out: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}


def test_all_stages_run_over_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in standins.environment(built_driver(), OMP_NUM_THREADS="1").items():
        monkeypatch.setenv(name, value)
    over = {"check", "kernels", "documents", "loop", "push", "host", "p2p"}
    over |= {"concurrent", "kill_peer", "overlap", "check_command", "view_host"}
    more = dict.fromkeys(over, ("--stand-ins",)) | {"diffusion": ("--device", "cpu")}
    stages = [
        dataclasses.replace(stage, arguments=(*stage.arguments, *more.get(stage.name, ())))
        for stage in STAGES
    ]
    # not shutil.which: builds in the background would find no compiler
    monkeypatch.setattr(bring_up, "shutil", types.SimpleNamespace(which=lambda name: None))
    status = bring_up.run(stages, tmp_path, 6, built_kit())
    found = results(tmp_path)
    page = (tmp_path / "page.md").read_text()
    statuses = {name: result["status"] for name, result in found.items()}
    skipped = {"sanitizer", "ranks", "legacy", "gloo", "attention", "flex", "models", "lifetime"}
    if not importlib.util.find_spec("diffusers"):  # make test-models installs it
        skipped.add("diffusion")
        assert found["diffusion"]["reason"] == "gpu_diffusion: the package diffusers is not installed"
    expected = {stage.name: "skipped" if stage.name in skipped else "passed" for stage in STAGES}
    assert statuses == expected, page
    assert status == 0
    assert found["sanitizer"]["reason"] == "compute-sanitizer is not installed"
    for name in ("ranks", "gloo", "attention", "flex", "lifetime"):
        assert "no CUDA device" in found[name]["reason"]
    assert re.search("no CUDA device|transformers is not installed", found["models"]["reason"])
    assert "no backend nccl-legacy" in found["legacy"]["reason"]
    assert page.startswith("## stand-in 0 x 1, ")
    card = rf"On stand-in 0 x 1, driver unknown, torch {re.escape(torch.__version__)}:"
    headings = re.findall(r"^### (.+)\n\n(.+)", page, re.M)
    assert len(headings) > 10 and all(re.fullmatch(card, line) for _, line in headings[1:]), headings
    for stage in STAGES:
        assert f"| {stage.name}: {stage.title} | {expected[stage.name]} |" in page
    handshake = found["p2p"]["data"]["figures"]["device memory of two processes"]
    assert handshake["rounds"] == 20, handshake
    assert len(found["kernels"]["data"]["figures"]["shapes"]) == 9
    timed = ["20 documents", "200 documents", "causal, 300 tokens", "causal, 600 tokens"]
    timed += ["a window of 512", "a window of 512, beside flex"]
    assert set(found["documents"]["data"]["figures"]) == {f"{name}, us" for name in timed}
    concurrent = found["concurrent"]["data"]["figures"]
    assert [concurrent[name]["wrong"] for name in concurrent if name.endswith(" KiB")] == [0, 0, 0]
    assert {"us, 4 ranks, 0.5 MiB", "us in graphs, 4 ranks", "crowd"} < set(concurrent)
    assert concurrent["us, 4 ranks, 0.5 MiB"]["direct"] == 4
    assert concurrent["bytes of a slot, 4 ranks"] == {"first": 1 << 20, "now": 2 << 20, "limit": 4 << 20}
    assert concurrent["absent"]["failures"]["0"].startswith("TIMEOUT: "), concurrent["absent"]
    assert set(found["overlap"]["data"]["figures"]) == {"ms, math, 2 KiB", "ms, math, 128 KiB"}
    assert found["check_command"]["data"]["figures"]["shm"]["checks"] > 5
    assert found["kill_peer"]["data"]["lines"][0].startswith("PeerLostError ")
    assert set(found["view_host"]["data"]["figures"]) == {
        f"us, {name}{rest}" for name in ("one process", "view") for rest in ("", ", gradients")
    }
    assert set(found["host"]["data"]["figures"]["host_us_of_groups"]) == {"1", "4", "57"}
    assert re.search(r"an aborted call, in \d+ groups", found["loop"]["output"])


def test_the_check_of_attention_on_a_cpu() -> None:
    """With kernels of CPUs in the place of those of GPUs."""
    script = str(BENCHMARKS / "gpu_attention.py")
    command = [sys.executable, script, "--device", "cpu", "--tokens", "61"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(("| float32, ", "| bfloat16, "))]
    assert len(rows) == 4 and "refused" in rows[1], done.stdout  # flash has no softcap


SCRIPTS = {
    "hangs": "import subprocess, sys, time\n"
    "child = subprocess.Popen(['sleep', '60'])\n"
    "print('child', child.pid, flush=True)\ntime.sleep(60)",
    "crashes": "import ctypes\nprint('before', flush=True)\nctypes.string_at(0)",
    "rank_crashes": "import sys\nsys.exit(128 + 6)",
    "fails": "report.say('a line')\nreport.expect(False, 'wrong bytes')\nsys.exit(report.status())",
    "usage": "import sys\nsys.exit(2)",
    "skips": "report.skip('nothing to check')",
    "passes": "report.say('| a | figure |')",
}


def injected(folder: Path, name: str, limit: float = 20) -> Stage:
    head = f"import sys\nsys.path[:0] = [{str(BENCHMARKS)!r}]\n"
    head += "from report import Report\nreport = Report(sys.argv[sys.argv.index('--data') + 1])\n"
    (folder / f"{name}.py").write_text(head + SCRIPTS[name])
    return Stage(name, f"A stage that {name}", str(folder / f"{name}.py"), limit=limit)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_stage_that_hangs_crashes_or_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    stages = [injected(tmp_path, name, 4 if name == "hangs" else 20) for name in SCRIPTS]
    assert bring_up.run(stages, tmp_path / "out", 5, tmp_path) == 1
    found = results(tmp_path / "out")
    assert {name: (result["status"], result["reason"]) for name, result in found.items()} == {
        "hangs": ("timed out", "killed after 4 s"),
        "crashes": ("crashed", "SIGSEGV"),
        "rank_crashes": ("crashed", "SIGABRT"),
        "fails": ("failed", "wrong bytes"),
        "usage": ("failed", "exit status 2"),
        "skips": ("skipped", "nothing to check"),
        "passes": ("passed", ""),
    }
    assert "Fatal Python error: Aborted" in found["hangs"]["output"]  # where it hung
    assert "Segmentation fault" in found["crashes"]["output"]
    child = re.search(r"child (\d+)", found["hangs"]["output"])
    assert child
    end = time.monotonic() + 10
    while is_running(int(child[1])) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_running(int(child[1])), "a stage's child outlived it"
    page = (tmp_path / "out" / "page.md").read_text()
    assert "| hangs: A stage that hangs | timed out | " in page and "killed after 4 s |" in page
    assert "| crashes: A stage that crashes | crashed | " in page and "| SIGSEGV |" in page
    assert "**wrong**: wrong bytes" in page and "| a | figure |" in page


def test_the_runner_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bring_up, "LEAST", 0.5)
    stages = [injected(tmp_path, "hangs", 60), injected(tmp_path, "passes")]
    begin = time.monotonic()
    assert bring_up.run(stages, tmp_path / "out", 1 / 60, tmp_path) == 1
    assert time.monotonic() - begin < 20
    found = results(tmp_path / "out")
    assert found["hangs"]["status"] == "timed out" and 0.5 < found["hangs"]["seconds"] < 10
    assert found["passes"]["reason"] == "no time is left (--minutes)"


def test_a_missing_kit_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "ROOT", tmp_path)
    stages = [stage for stage in STAGES if stage.needs]
    assert bring_up.run(stages, tmp_path / "out", 5, tmp_path / "kit") == 1
    for result in results(tmp_path / "out").values():
        assert result["status"] == "failed"
        assert re.match(r".* is not in .*/kit; build it with `make bring-up-kit`", result["reason"])


def test_a_kit_of_other_sources_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / kit.CORE).touch()
    (tmp_path / kit.SOURCES).write_text(kit.sources())
    assert not kit.is_stale(tmp_path)
    (tmp_path / kit.SOURCES).write_text("another hash")
    stages = [stage for stage in STAGES if stage.needs == (kit.CORE,)]
    assert bring_up.run(stages, tmp_path / "out", 5, tmp_path) == 1
    reasons = {result["reason"] for result in results(tmp_path / "out").values()}
    assert reasons == {f"{tmp_path} was built of other sources; build it again with `make bring-up-kit`"}


def test_without_a_gpu_each_stage_is_skipped_with_the_reason(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    command = [sys.executable, str(BENCHMARKS / "bring_up.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode != 2 and shutil.which("nvidia-smi"):
        pytest.skip("this machine has a GPU")
    assert done.returncode == 2, done.stderr
    assert len(results(tmp_path)) == len(STAGES)
    for result in results(tmp_path).values():
        assert result["reason"].startswith("no CUDA driver: libcuda.so.1"), result
    assert (tmp_path / "page.md").read_text().startswith("## No GPU, ")


# ---- what cannot run here is held against CUDA's and DLPack's headers ----


def offsets(ours: type[ctypes.Structure], theirs: str, renamed: dict[str, str]) -> list[str]:
    lines = [f'_Static_assert(sizeof({theirs}) == {ctypes.sizeof(ours)}, "{theirs}");']
    for name, *_ in ours._fields_:  # type: ignore[misc]
        offset = getattr(ours, name).offset
        text = f"offsetof({theirs}, {renamed.get(name, name)}) == {offset}"
        lines.append(f'_Static_assert({text}, "{theirs}.{name}");')
    return lines


def test_structs_and_constants_are_those_of_cuda_h(tmp_path: Path) -> None:
    lines = ["#include <stddef.h>", "#include <cuda.h>"]
    lines += offsets(peer.Location, "CUmemLocation", {})
    lines += offsets(peer.AllocationProp, "CUmemAllocationProp", {})
    lines += offsets(peer.AccessDesc, "CUmemAccessDesc", {})
    constants = {
        "CU_MEM_ALLOCATION_TYPE_PINNED": peer.PINNED,
        "CU_MEM_LOCATION_TYPE_DEVICE": peer.ON_DEVICE,
        "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": peer.READ_WRITE,
        "CU_MEM_ALLOC_GRANULARITY_RECOMMENDED": peer.RECOMMENDED,
        "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": peer.POSIX_FD,
        "CU_MEMHOSTALLOC_PORTABLE": 1,
        "CU_STREAM_CAPTURE_MODE_RELAXED": 2,
        **{f"CU_DEVICE_ATTRIBUTE_{name}": number for name, number in facts.ATTRIBUTES.items()},
    }
    lines += [f'_Static_assert({name} == {value}, "{name}");' for name, value in constants.items()]
    check_declarations(tmp_path, "cuda.h", "\n".join(lines) + "\n")


def test_functions_are_asked_for_by_versions_that_cuda_has() -> None:
    headers = packaged("include/cudaTypedefs.h", "*/include/cudaTypedefs.h")
    if not headers:
        pytest.skip("no cudaTypedefs.h here: neither a toolkit nor the package nvidia-cuda-runtime")
    known = headers[0].read_text()
    asked = set()
    for path in (*BENCHMARKS.rglob("*.py"), BENCHMARKS / "stages/loop_nccl.c"):
        asked |= set(re.findall(r'"(cu[A-Z]\w+)",\s*(?:&driver\.\w+,\s*)?(\d{4,5})\b', path.read_text()))
    assert len(asked) > 30
    for name, version in asked:
        assert re.search(rf"\bPFN_{name}_v{version}\)", known), f"{name} of {version}"


def test_dlpack_structs_are_those_of_torch(tmp_path: Path) -> None:
    header = Path(torch.__file__).parent / "include/ATen/dlpack.h"
    fields = {"context": "manager_ctx", "tensor": "dl_tensor", "type": "device_type", "id": "device_id"}
    lines = ["#include <stddef.h>", f'#include "{header}"']
    lines += offsets(dlpack.Device, "DLDevice", fields)
    lines += offsets(dlpack.DataType, "DLDataType", fields)
    lines += offsets(dlpack.Tensor, "DLTensor", fields)
    lines += offsets(dlpack.Managed, "DLManagedTensor", fields)
    lines += [f'_Static_assert(kDLFloat == {dlpack.FLOAT} && kDLCPU == 1 && kDLCUDA == 2, "kinds");']
    (tmp_path / "check.c").write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        ["cc", "-std=c11", "-fsyntax-only", str(tmp_path / "check.c")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


PRELOADED = """
#include <dlfcn.h>
int ncclAllReduce(void), ncclSend(void);
int main(void)
{
    Dl_info rest, own;
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD); /* as spar asks for it */
    return !library || !dlsym(library, "loop_groups") || !dladdr((void *)ncclAllReduce, &rest) ||
           !dladdr((void *)ncclSend, &own) || rest.dli_fbase == own.dli_fbase;
}
"""


def test_the_loop_library_leaves_to_nccl_what_it_lacks(tmp_path: Path) -> None:
    """Preloaded before the real NCCL, it is the libnccl.so.2 that spar finds; torch finds all functions."""
    libraries = packaged("nccl/lib/libnccl.so.2")
    if not libraries:
        pytest.skip("the package nvidia-nccl-cu12 is not installed")
    (tmp_path / "main.c").write_text(PRELOADED)
    command = ["cc", "-D_GNU_SOURCE", "-Wl,-z,now", str(tmp_path / "main.c"), str(libraries[0])]
    subprocess.run([*command, "-o", str(tmp_path / "main")], check=True)
    preload = f"{built_kit() / kit.LOOP}:{libraries[0]}"
    done = subprocess.run(
        [str(tmp_path / "main")], env={"LD_PRELOAD": preload}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


COMPILE = """
import ctypes, sys
text = sys.stdin.read().encode()
core = ctypes.CDLL(sys.argv[1])
core.spar_last_error.restype = ctypes.c_char_p
core.spar_dynlib_set_path(b"libnvrtc", sys.argv[2].encode())
code, size = ctypes.c_void_p(), ctypes.c_size_t()
for arch in (75, 90, 100):
    status = core.spar_nvrtc_open() or core.spar_nvrtc_compile(
        text, arch, ctypes.byref(code), ctypes.byref(size)
    )
    assert status == 0, core.spar_last_error()
"""


def test_the_handshake_kernel_compiles(tmp_path: Path) -> None:
    libraries = packaged("cu*/lib/libnvrtc.so.1?", "cuda_nvrtc/lib/libnvrtc.so.1?")
    if not libraries:
        pytest.skip("no NVRTC here")
    command = [sys.executable, "-c", COMPILE, core_abi.library()._name, str(libraries[-1])]
    done = subprocess.run(command, input=peer.HANDSHAKE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
