# SPDX-License-Identifier: Apache-2.0
"""Run tests/c/*.c: the core without Python; measure the time of a plan.

CORE_BUILDS names the builds: plain, or any of plain, clang, address and thread, of which `make test-core` has
the last three. The CUDA device runs over the stand-ins of helpers/standins.py.
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

pytestmark = [
    pytest.mark.not_under_asan("programs without Python, which have sanitizers of their own"),
    pytest.mark.builds,
    pytest.mark.spread,
]

FOLDER = Path(__file__).resolve().parents[1] / "c"
INCLUDED = [FOLDER.parent.parent / "csrc/devices/cpu" / name for name in ("scale.c", "sum.c")]  # by tests
SANITIZER = ["-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
BUILDS = {  # the compiler and its flags; clang's sanitizers see the core in make fuzz
    "plain": ("gcc", "-O1"),  # of tests/c; core_abi.py compiles csrc for them by -O1, too
    "clang": ("clang", "-O2"),
    "address": ("gcc", "-Og", *SANITIZER, "-fsanitize=address,undefined"),  # as does -O1
    "thread": ("gcc", "-O1", *SANITIZER, "-fsanitize=thread"),
}
CHOSEN = os.environ.get("CORE_BUILDS", "plain").split()
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
def build(kind: str) -> Path:
    compiler, *flags = BUILDS[kind]
    if not shutil.which(compiler):
        raise NoCompiler(f"{compiler} is not installed")

    def fill(folder: Path) -> None:
        probe = folder / "probe"
        (folder / "probe.c").write_text("int main(void) { return 0; }\n")
        command = [compiler, *flags, f"{probe}.c", "-o", str(probe)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            done = run(probe)
        if done.returncode:
            raise NoCompiler(
                f"{compiler} {' '.join(flags)} builds no program that runs: {done.stderr[-300:]}"
            )
        sources = [FOLDER / "main.c", *sorted(FOLDER.glob("test_*.c"))]
        program = folder / "program"
        shares = kind == "plain"  # with the library of other tests
        core.compile_core(
            program, *flags, *sources, compiler=[compiler], without=INCLUDED, from_objects=shares
        )

    return workers.built(f"core-{kind}", fill) / "program"


def standins_of(kind: str) -> Path:
    return standins.built(
        *(() if kind == "plain" else BUILDS[kind][1:])
    )  # other tests need the plain ones, too


PREBUILD = [partial(build, kind) for kind in CHOSEN]
PREBUILD += [partial(standins_of, kind) for kind in CHOSEN if kind != "clang"]

Builder = Callable[[str], Path]


def each(*kinds: str) -> pytest.MarkDecorator:
    """Parametrize `kind` with those of the kinds that were chosen."""
    return pytest.mark.parametrize("kind", [kind for kind in kinds if kind in CHOSEN])


@pytest.fixture
def program() -> Builder:
    """program(kind)"""

    def get(kind: str) -> Path:
        try:
            return build(kind)
        except NoCompiler as reason:
            pytest.skip(str(reason))

    return get


@each("plain", "address", "thread")
@pytest.mark.parametrize(("threads", "plans", "delay"), [(1, 1200, 0), (3, 150, 50)])
def test_cuda_device(program: Builder, kind: str, threads: int, plans: int, delay: int) -> None:
    """Random plans, spans, factors, graphs: the kernels, built for the host, match the CPU's copies."""
    environment = standins.environment(standins_of(kind), STANDIN_DELAY_US=str(delay), STANDIN_DEVICES="2")
    plans = plans if kind == "plain" else plans // 3  # sanitizers are slow
    done = run(program(kind), "cuda", str(threads), str(plans), **environment)
    assert (done.returncode, done.stderr) == (0, "")


@each("plain", "address", "thread")
@pytest.mark.parametrize(
    ("peers", "calls", "slot", "delay"),
    # many rounds; some; fewer, and direct ones
    [(2, 300, 1024, 0), (3, 120, 2048, 50), (3, 120, 1 << 14, 50), (4, 60, 1 << 16, 50)],
)
def test_push(program: Builder, kind: str, peers: int, calls: int, slot: int, delay: int) -> None:
    """Random calls of ranks that are threads: each peer's bytes arrive, and no two ranks race for a slot."""
    environment = {**standins.environment(standins_of(kind)), "STANDIN_DELAY_US": str(delay)}
    calls = calls if kind == "plain" else calls // 2
    done = run(program(kind), "push", str(peers), str(calls), str(slot), **environment)
    assert (done.returncode, done.stderr) == (0, "")


@each("plain", "address")
def test_slots(program: Builder, kind: str) -> None:
    done = run(program(kind), "slots", **standins.environment(standins_of(kind)))
    assert (done.returncode, done.stderr) == (0, "")


@each(*BUILDS)
def test_core(program: Builder, kind: str) -> None:
    done = run(program(kind), "core")
    assert (done.returncode, done.stderr) == (0, "")


@each("plain", "address")
@pytest.mark.parametrize("name", ["arena", "items", "scale", "nontemporal", "passing", "siphash", "wait"])
def test_components(program: Builder, name: str, kind: str) -> None:
    done = run(program(kind), name)
    assert (done.returncode, done.stderr) == (0, "")


@each("plain", "address", "thread")
def test_sums(program: Builder, kind: str) -> None:
    rounds = {"address": ["600"], "thread": ["150"]}.get(kind, [])
    done = run(program(kind), "sum", *rounds)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.alone
@pytest.mark.parametrize("world", [1, 2, 4, 7])
@each("plain", "address")
def test_shared_memory_between_processes(program: Builder, kind: str, world: int) -> None:
    """Calls across the wrap of their numbers; a lost wake-up would cost a slice of 50 ms."""
    calls = "5000" if kind == "plain" else "2500"
    done = run(program(kind), "shm", "processes", str(world), calls)
    assert (done.returncode, done.stderr) == (0, "")
    median, slow = map(float, done.stdout.split())
    assert median < 10_000
    assert slow < 40_000, "the 99th percentile, in microseconds"


@pytest.mark.parametrize("world", [2, 4, 7])
@each("plain", "address", "thread")
def test_shared_memory_between_threads(program: Builder, kind: str, world: int) -> None:
    """The same protocol with all ranks visible to the sanitizers; at the end one rank makes no call."""
    done = run(program(kind), "shm", "threads", str(world), "700" if kind == "thread" else "2000")
    assert (done.returncode, done.stderr) == (0, "")


@each("plain", "address", "thread")
def test_connections_between_processes(program: Builder, kind: str) -> None:
    """Concurrent set-ups on several threads; one after another that failed for lack of descriptors."""
    for arguments in (("groups", "3", "6", "60"), ("refused",)):
        done = run(program(kind), "peers", *arguments)
        assert (done.returncode, done.stderr) == (0, "")


@each("plain", "address", "thread")
def test_dialer_dials_again_after_hang_up(program: Builder, kind: str) -> None:
    """The answerer drops the connection before the first message; 64 processes that dial each other."""
    for arguments in (("hang_up",), ("all", "64" if kind == "plain" else "24")):
        done = run(program(kind), "peers", *arguments)
        assert (done.returncode, done.stderr) == (0, "")


@each("plain", "address", "thread")
def test_ring(program: Builder, kind: str) -> None:
    """Entries that are read while they are overwritten; different calls, corrupt entries, a death."""
    done = run(program(kind), "ring", "3", "20000" if kind == "plain" else "5000")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("world", [2, 3])
@each(*BUILDS)
def test_calls_over_tcp(program: Builder, world: int, kind: str) -> None:
    """Calls of any size; calls that differ, failures, breaks, deadlines and closes reach all ranks."""
    done = run(program(kind), "links", str(world))
    assert (done.returncode, done.stderr) == (0, "")


@each(*BUILDS)
def test_hostile_far_rank_ends_in_an_error(program: Builder, kind: str) -> None:
    """Messages of other lengths, other calls or other kinds than expected, or cut short."""
    done = run(program(kind), "messages", "hostile")
    assert (done.returncode, done.stderr) == (0, "")


@each(*BUILDS)
def test_bytes_follow_their_message_on_a_full_connection(program: Builder, kind: str) -> None:
    done = run(program(kind), "messages", "full")
    assert (done.returncode, done.stderr) == (0, "")


@each(*BUILDS)
def test_strangers_do_not_disturb_tcp_set_up(program: Builder, kind: str) -> None:
    """Strangers that connect to the listener and say nothing, send garbage, or replay greetings."""
    done = run(program(kind), "strangers")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("how", ["processes", "threads"])
@each("plain", "address")
def test_invalid_output_offset_is_rejected(program: Builder, how: str, which: int, kind: str) -> None:
    done = run(program(kind), "shm", how, "3", str(2 * which + 1))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.alone
@each("plain")
def test_plan_latency(program: Builder, kind: str, record_property: Callable[[str, object], None]) -> None:
    done = run(program(kind), "core", "bench")
    assert (done.returncode, done.stderr) == (0, "")
    print(done.stdout)
    costs = {name: float(value) for name, value in (line.split() for line in done.stdout.splitlines())}
    for name, value in costs.items():
        record_property(name, value)
    assert costs["cached_get_ns"] < 1000
    assert costs["new_plan_us"] < 1000  # of 1,024 ranks
