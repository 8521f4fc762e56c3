# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run with real ranks, and their results equal the references'."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.launched import launch

from spar import _C
from spar._commands.arguments import main
from spar._commands.bench import binding
from spar._commands.bench.busy import busy_processes

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import hosts  # noqa: E402

QUICKEST = ["--only", "unscaled", "--seconds", "0.001", "--largest", "2048"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Another library's all_to_all, whose calls are those of yunchang.
LIBRARY = """
from spar._commands.bench import formulations

class SeqAllToAll4D:
    @staticmethod
    def apply(group, x, scatter, gather, use_sync):
        assert (scatter, gather, use_sync) == (2, 1, False)
        return formulations.all_to_all(x)
"""


def bench(folder: Path, *options: str) -> None:
    rank = os.environ.get("RANK", "none")
    sys.path.insert(0, str(folder / "libraries"))
    with open(folder / f"table.{rank}", "w") as table, contextlib.redirect_stdout(table):
        assert main(["bench", *options]) == 0


def test_bench_times_every_operation(tmp_path: Path) -> None:
    out, library = tmp_path / "bench", tmp_path / "libraries" / "yunchang" / "comm" / "all_to_all.py"
    library.parent.mkdir(parents=True)
    library.write_text(LIBRARY)
    (tmp_path / "libraries" / "deepspeed.py").write_text("raise RuntimeError('it needs a GPU\\nand more')")
    launch(bench, 2, tmp_path, "--seconds", "0.001", "--largest", "2048", "--out", str(out))
    table = (tmp_path / "table.0").read_text()
    assert table.startswith("DeepSpeed is skipped: RuntimeError: it needs a GPU\n")
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    found = {row["operation"]: row for row in rows if row["direction"] == "forward"}
    assert len(found) == 13 and out.with_suffix(".png").exists()
    for name, row in found.items():
        assert name in table and row["spar"]["median"] > 0
        compared = {"Q, K, V at once": "three exchanges", "zigzag all_gather": "plain"}.get(name, "")
        assert row["other_name"] == compared and (row["other"] is not None) == bool(compared)
        assert list(row["libraries"]) == (["yunchang"] if name == "all_to_all" else [])
    bound = "each bound to one" if min(len(os.sched_getaffinity(0)), _C.limits()[0]) > 1 else "not bound"
    assert bound in table.splitlines()[-1]
    again = tmp_path / "median"
    files = [str(out.with_suffix(".json"))] * 2
    assert main(["bench", "--median", *files, "--out", str(again)]) == 0
    assert json.loads(again.with_suffix(".json").read_text())["rows"] == rows


@pytest.fixture
def cores_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Return a function that binds all ranks of a host and returns each one's core; none if they stay."""

    def cores(allowed: set[int], siblings: int, local_ranks: int) -> list[int]:
        bound: list[int] = []
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: allowed)
        monkeypatch.setattr(os, "sched_setaffinity", lambda process, mask: bound.extend(mask))
        monkeypatch.setattr(_C, "limits", lambda: (len(allowed), 1 << 30))
        monkeypatch.setattr(binding, "_siblings", lambda core: str(core // siblings))
        assert len({binding.bind(rank, local_ranks) for rank in range(local_ranks)}) == 1
        return bound

    return cores


def test_bench_binds_ranks_to_physical_cores_first(cores_of: Callable[..., list[int]]) -> None:
    assert cores_of({0, 1, 2, 3}, 1, 2) == [0, 1]
    assert cores_of({0, 1, 2, 3}, 2, 2) == [0, 2]
    assert cores_of({0, 1, 2, 3}, 2, 4) == [0, 2, 1, 3]
    assert cores_of({5, 9}, 1, 2) == [5, 9]


def test_bench_binds_no_ranks_that_share_cores(cores_of: Callable[..., list[int]]) -> None:
    assert cores_of({0, 1}, 1, 3) == []
    assert cores_of({7}, 1, 2) == []


def test_bench_leaves_the_ranks_to_the_scheduler_on_request(tmp_path: Path) -> None:
    launch(bench, 2, tmp_path, "--bind-to", "none", *QUICKEST, "--out", str(tmp_path / "bench"))
    assert "cores, not bound, " in (tmp_path / "table.0").read_text().splitlines()[-1]


def is_running(process: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def await_end(processes: list[int]) -> None:
    limit = time.monotonic() + 60
    while any(map(is_running, processes)):
        assert time.monotonic() < limit, f"still running: {processes}"
        time.sleep(0.01)


def test_busy_processes_compute_and_end() -> None:
    """At the end of the block, after an exception, and if their parent is killed."""
    with busy_processes(2) as processes:
        assert len(set(processes)) == 2 and all(map(is_running, processes))
    await_end(processes)
    with pytest.raises(KeyError), busy_processes(1) as processes:
        raise KeyError
    await_end(processes)
    code = "from spar._commands.bench.busy import busy_processes\nwith busy_processes(2) as ids: "
    code += "print(*ids, flush=True); input()"
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as parent:
            assert parent.stdout
            processes = [int(text) for text in parent.stdout.readline().split()]
            assert len(processes) == 2 and all(map(is_running, processes))
            parent.send_signal(sent)
        assert parent.returncode == -sent
        await_end(processes)


def test_bench_runs_beside_busy_processes(tmp_path: Path) -> None:
    launch(bench, 2, tmp_path, "--busy", "2", *QUICKEST, "--out", str(tmp_path / "bench"))
    title = (tmp_path / "table.0").read_text().splitlines()[-1]
    assert ", next to 2 busy processes on each host, " in title


def time_beside_busy_processes(folder: Path) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    import busy

    sys.argv = ["busy.py", "0", "1", "--turns", "2"]
    with open(folder / f"lines.{os.environ['RANK']}", "w") as lines, contextlib.redirect_stdout(lines):
        busy.main()


def test_calls_are_timed_beside_busy_processes(tmp_path: Path) -> None:
    launch(time_beside_busy_processes, 2, tmp_path)
    lines = (tmp_path / "lines.0").read_text()
    assert lines.count("  2 KB, several cores: ") == lines.count("  loop: ") == 2
    assert "next to 1 busy processes:" in lines and not (tmp_path / "lines.1").read_text()


def test_attention_bench_times_every_way(tmp_path: Path) -> None:
    """Of 21 tokens, which two ranks do not share evenly, and of 24."""
    out = tmp_path / "attention"
    options = ["--tokens", "21", "24", "--heads", "2", "--key-heads", "1", "--width", "8"]
    launch(bench, 2, tmp_path, "--attention", *options, "--seconds", "0.001", "--out", str(out))
    table = (tmp_path / "table.0").read_text()
    facts = json.loads(out.with_suffix(".json").read_text())
    assert out.with_suffix(".png").exists() and "of the slowest rank" in table
    found = {(row["tokens"], row["way"]): row for row in facts["rows"]}
    assert len(found) == 12 and (21, "usual ulysses") not in found and (21, "usual ring") not in found
    for (_, way), row in found.items():
        assert way in table and row["step"] > 0 and row["error"] < 1e-5
        assert (row["outside"] > 0) == (way != "one process")
    assert found[24, "ring"]["products"] == 1.0, "zigzag balances the work"


def test_attention_bench_times_windows(tmp_path: Path) -> None:
    out = tmp_path / "windows"
    options = ["--window", "5", "--tokens", "21", "40", "--heads", "2", "--key-heads", "1", "--width", "8"]
    launch(bench, 2, tmp_path, "--attention", *options, "--seconds", "0.001", "--out", str(out))
    table = (tmp_path / "table.0").read_text()
    facts = json.loads(out.with_suffix(".json").read_text())
    assert out.with_suffix(".png").exists() and "a window of 5" in facts["title"]
    found = {(row["tokens"], row["way"]): row for row in facts["rows"]}
    ways = ["window, ulysses", "window, gather", "window, ring", "causal", "mask"]
    assert list(found) == [(tokens, way) for tokens in (21, 40) for way in ways]
    for (_, way), row in found.items():
        assert way in table and row["step"] > 0 and row["cpu"] > 0 and row["error"] < 1e-5
    assert len(facts["bars"]) == 3 and table.count("of at most") == 3


@pytest.mark.skipif(not importlib.util.find_spec("mpi4py"), reason="mpi4py is not installed (make bench-mpi)")
def test_mpi_bench_runs() -> None:
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("PyPI's mpich is not installed (make bench-mpi)")
    program = (sys.executable, str(BENCHMARKS / "mpi_bench.py"))
    table = run(str(mpiexec), "-n", "2", *program, "--seconds", "0.001", "--largest", "2048")
    assert "2 KB" in table and "2 ranks" in table


def test_mpi_bench_over_a_stand_in() -> None:
    """Its code over a stand-in for MPI with one rank, because make test does not install MPI."""
    code = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import mpi_bench

class World:
    def Get_rank(self): return 0
    def Get_size(self): return 1
    def bcast(self, value): return value
    def Alltoall(self, sent, received): ctypes.memmove(received[0], *sent)

class Memory:
    fromaddress = staticmethod(lambda address, size: (address, size))

mpi_bench.join_group(World())
mpi_bench.measure(World(), Memory, (2048, 65536), 0.001)
"""
    table = run(sys.executable, "-c", code, str(BENCHMARKS))
    assert "2 KB" in table and "64 KB" in table


def test_hosts_bench_reads_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    options = hosts.parse(["--hosts", "3", "--ranks", "1", "--sizes", "2K", "96", "32MB", "--delay", "1ms"])
    assert (options.hosts, options.ranks, options.delay) == (3, 1, "1ms")
    assert options.sizes == [2048, 96, 32 << 20]
    assert hosts.parse([]).sizes == [2 << 10, 32 << 10, 512 << 10, 4 << 20]
    for wrong in (
        ["--delay", "1ms", "--rate", "1gbit"],
        ["--sizes", "2X"],
        ["--sizes", "0"],
        ["--sizes", "MB"],
        ["--hosts", "0"],
        ["--ranks", "-1"],
    ):
        with pytest.raises(SystemExit):
            hosts.parse(wrong)
        assert "expected" in capsys.readouterr().err


def test_hosts_bench_needs_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert hosts.start(hosts.parse([]), []) == 2
    assert "only root can make network namespaces" in capsys.readouterr().err


@pytest.mark.skipif(hosts.namespaces.unavailable() != "", reason=hosts.namespaces.unavailable())
def test_hosts_bench_times_exchanges_between_hosts() -> None:
    program = (sys.executable, str(BENCHMARKS / "hosts.py"))
    lines = run(*program, "--ranks", "1", "--sizes", "2K", "--seconds", "0.01").splitlines()
    names = [line.split()[0] for line in lines]
    assert names == ["operation", "all_to_all", "all_gather", "reduce_scatter", "2"]
    assert all(re.search(r" \d+\.\d x$", line) for line in lines[1:4])
    assert lines[4].startswith("2 hosts of 1 ranks on ")


@pytest.mark.skipif(hosts.namespaces.unavailable() != "", reason=hosts.namespaces.unavailable())
def test_hosts_bench_times_documents_by_layout() -> None:
    program = (sys.executable, str(BENCHMARKS / "hosts.py"))
    lines = run(*program, "--ranks", "1", "--documents", "700", "--rate", "1gbit").splitlines()
    rows = [line.split("  ")[0] for line in lines[1:-1]]
    assert rows == [
        "packed, ulysses",
        "packed, gather",
        "packed, ring",
        "balanced, default",
        "balanced, ring",
    ]
    assert lines[1].endswith("1.00 x") and "rate 1gbit, tcp" in lines[-1], lines


@pytest.mark.skipif(hosts.namespaces.unavailable() != "", reason=hosts.namespaces.unavailable())
def test_hosts_bench_ends_if_a_rank_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other ranks are ended, and do not wait for it."""
    program = tmp_path / "program.py"
    program.write_text("import os, time\nos._exit(3) if os.environ['RANK'] == '1' else time.sleep(60)\n")
    monkeypatch.setattr(hosts, "__file__", str(program))
    begin = time.monotonic()
    assert hosts.start(hosts.parse(["--ranks", "1"]), []) == 1
    assert time.monotonic() - begin < 20
