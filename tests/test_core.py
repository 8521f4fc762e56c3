"""Run tests/c/*.c: the core without Python, plain and under the sanitizers; measure the time of a plan.

The CUDA device runs over the stand-ins of helpers/standins.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from helpers import core, standins, workers
from helpers.prebuild import once

pytestmark = pytest.mark.not_under_asan("programs without Python, which have sanitizers of their own")

FOLDER = Path(__file__).resolve().parent / "c"
INCLUDED = [FOLDER.parent.parent / "csrc/devices/cpu" / name for name in ("scale.c", "sum.c")]  # by tests
SANITIZER = ["-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
KINDS = {
    "plain": ["-O2"],  # -O3 takes gcc half as long again
    "address": ["-Og", *SANITIZER, "-fsanitize=address,undefined"],  # as does -O1
    "thread": ["-O1", *SANITIZER, "-fsanitize=thread"],
}
# clang's sanitizers see the core in make fuzz
BUILDS = [("gcc", "plain"), ("clang", "plain"), ("gcc", "address"), ("gcc", "thread")]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("SPAR_")},
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}


def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, **environment}
    return subprocess.run([program, *arguments], capture_output=True, text=True, env=environment, timeout=120)


class NoCompiler(Exception):
    """The reason why this machine cannot build a program."""


@once
def build(compiler: str, kind: str) -> Path:
    if not shutil.which(compiler):
        raise NoCompiler(f"{compiler} is not installed")

    def fill(folder: Path) -> None:
        probe = folder / "probe"
        (folder / "probe.c").write_text("int main(void) { return 0; }\n")
        command = [compiler, *KINDS[kind], f"{probe}.c", "-o", str(probe)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            done = run(probe)
        if done.returncode:
            raise NoCompiler(
                f"{compiler} {' '.join(KINDS[kind])} builds no program that runs: {done.stderr[-300:]}"
            )
        sources = [FOLDER / "main.c", *sorted(FOLDER.glob("test_*.c"))]
        program = folder / "program"
        core.compile_core(program, *KINDS[kind], *sources, compiler=[compiler], without=INCLUDED)

    return workers.built(f"{compiler}-{kind}", fill) / "program"


PREBUILD = [partial(build, compiler, kind) for compiler, kind in BUILDS]
STANDINS = {**KINDS, "plain": []}  # other tests need plain ones, too
PREBUILD += [partial(standins.built, *flags) for flags in STANDINS.values()]


Builder = Callable[[str, str], Path]


@pytest.fixture
def program() -> Builder:
    """program(compiler, kind)"""

    def get(compiler: str, kind: str) -> Path:
        try:
            return build(compiler, kind)
        except NoCompiler as reason:
            pytest.skip(str(reason))

    return get


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("threads", "plans", "delay"), [(1, 1200, 0), (3, 150, 50)])
def test_cuda_device(program: Builder, kind: str, threads: int, plans: int, delay: int) -> None:
    """Random plans, spans, factors, graphs: the kernels, built for the host, match the CPU's copies."""
    environment = {**standins.environment(standins.built(*STANDINS[kind])), "STANDIN_DELAY_US": str(delay)}
    plans = plans if kind == "plain" else plans // 3  # sanitizers are slow
    done = run(program("gcc", kind), "cuda", str(threads), str(plans), **environment)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("compiler", "kind"), BUILDS)
def test_core(program: Builder, compiler: str, kind: str) -> None:
    done = run(program(compiler, kind), "core")
    assert (done.returncode, done.stderr) == (0, "")


ONE_THREAD = ("arena", "scale", "affinity", "nontemporal", "siphash", "wait")


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in ONE_THREAD for kind in ("plain", "address")]
    + [("sum", kind) for kind in KINDS],
)
def test_components(program: Builder, name: str, kind: str) -> None:
    rounds = {"address": ["600"], "thread": ["150"]}.get(kind, []) if name == "sum" else []
    done = run(program("gcc", kind), name, *rounds)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.alone
@pytest.mark.parametrize("world", [1, 2, 4, 7])
@pytest.mark.parametrize("kind", ["plain", "address"])
def test_shared_memory_between_processes(program: Builder, kind: str, world: int) -> None:
    """Calls across the wrap of their numbers; a lost wake-up would cost a slice of 50 ms."""
    calls = "10000" if kind == "plain" else "2500"
    done = run(program("gcc", kind), "shm", "processes", str(world), calls)
    assert (done.returncode, done.stderr) == (0, "")
    median, slow = map(float, done.stdout.split())
    assert median < 10_000
    assert slow < 40_000, "the 99th percentile, in microseconds"


@pytest.mark.parametrize("world", [2, 4, 7])
@pytest.mark.parametrize("kind", ["address", "thread"])
def test_shared_memory_between_threads(program: Builder, kind: str, world: int) -> None:
    """The same protocol with all ranks visible to the sanitizers; at the end one rank makes no call."""
    done = run(program("gcc", kind), "shm", "threads", str(world), "2000" if kind == "address" else "700")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", KINDS)
def test_connections_between_processes(program: Builder, kind: str) -> None:
    """Concurrent set-ups on several threads; a set-up after one that failed for lack of descriptors."""
    for arguments in (("groups", "3", "6", "60"), ("refused",)):
        done = run(program("gcc", kind), "peers", *arguments)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", KINDS)
def test_call_ring(program: Builder, kind: str) -> None:
    """Entries that are read while they are overwritten; different calls, corrupt entries, a death."""
    done = run(program("gcc", kind), "call_ring", "3", "20000" if kind == "plain" else "5000")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("how", ["processes", "threads"])
def test_invalid_output_offset_is_rejected(program: Builder, how: str, which: int) -> None:
    done = run(program("gcc", "address"), "shm", how, "3", str(2 * which + 1))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.alone
def test_plan_latency(program: Builder, record_property: Callable[[str, object], None]) -> None:
    done = run(program("gcc", "plain"), "core", "bench")
    assert (done.returncode, done.stderr) == (0, "")
    print(done.stdout)
    costs = {name: float(value) for name, value in (line.split() for line in done.stdout.splitlines())}
    for name, value in costs.items():
        record_property(name, value)
    assert costs["cached_get_ns"] < 1000
    assert costs["new_plan_us"] < 1000  # of 1,024 ranks
