# SPDX-License-Identifier: Apache-2.0
"""Real ranks for tests: one pool of processes per module, started at its first use."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import itertools
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from helpers import forks, limits, prebuild, standins, workers
from helpers.forks import PRELOAD
from helpers.limits import Deadline
from helpers.shared_gloo import shared

Launch = Callable[..., list[list[Any]]]
FAULT_TABLE: dict[str, dict[str, str]] = {}  # fault -> "transport world" -> cell
WORLDS = (1, 2, 3, 4, 7)
FEW = 4  # ranks that a pool has at first: most modules need no more
TRACERS = ["torch._dynamo", "torch.distributed.tensor.experimental"]  # the second by what Dynamo inlines
COMPILERS = ["torch._inductor.compile_fx", "sympy.physics"]  # by simplify
gc.set_threshold(10_000)  # with 700, a tenth of the tests' time is the collector's
# Otherwise each rank starts processes that import torch, to test that code for this CPU can be loaded.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


@functools.cache
def transports() -> list[str]:
    """Return the transports that can serve CPU tensors of one rank, in the order of the table.

    Ranks and their server, which import this module too, get none: spar's state must not start in them before
    the test does.
    """
    if mp.current_process().name != "MainProcess" or forks.PATH in os.environ:
        return []
    from spar import _C

    names: list[str] = []
    info = _C.peer_info()
    while not names or names[-1] != "torch":  # the last row, which serves every device
        names.append(_C.choose(info, "cpu", tuple((name, "seen") for name in names))[0])
    return names


def __getattr__(name: str) -> Any:
    """Make `TRANSPORTS` when a module imports it: pytest-xdist's main process need not import torch."""
    if name == "TRANSPORTS":
        return transports()
    raise AttributeError(name)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import torch

        # More are slower with small tensors, and spin on other workers' cores while one waits for another.
        torch.set_num_threads(1)
    workers.folder()  # workers and ranks inherit it


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long modules first, those that build late, and last what runs alone; mark more tests as quick."""
    waits, long = (
        list(dict.fromkeys(item.path for item in items if item.get_closest_marker(mark)))
        for mark in ("waits", "long")
    )
    # in turn: two that wait at a time would leave a core idle
    first = [path for pair in itertools.zip_longest(waits, long) for path in pair if path]

    def place(item: pytest.Item) -> tuple[bool, int]:  # before a test alone, all workers wait for the longest
        builds = bool(item.get_closest_marker("builds"))  # in the background, meanwhile
        alone = bool(item.get_closest_marker("alone"))
        return alone, first.index(item.path) if item.path in first else len(first) + builds

    items.sort(key=place)
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        one_world = (values.get("world"), values.get("ranks")) == (3, "shm")
        if one_world and item.get_closest_marker("quick_ranks"):
            item.add_marker(pytest.mark.quick)


@functools.cache
def is_spread(path: Path) -> bool:
    """Whether a module has the mark `spread`; xdist's main process, which asks, collects no items."""
    return "pytest.mark.spread" in path.read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run each module on one worker, but the tests of modules that are spread on any worker, in order."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::", 1)[0]
            return nodeid if is_spread(config.rootpath / path) else path

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    modules = dict.fromkeys(_module(item) for item in session.items)
    if any("compile" in item.nodeid for item in session.items):
        PRELOAD.extend(TRACERS)
    if any(item.get_closest_marker("compiler") for item in session.items):
        PRELOAD.extend(COMPILERS)
    # helpers/forks.py has this list itself
    named = [name for module in modules for name in getattr(module, "PRELOAD", ())]
    PRELOAD.extend(name for name in dict.fromkeys(named) if name not in PRELOAD)
    gc.freeze()  # what was imported and collected: each full collection would visit it
    # one worker builds; another that needs a result earlier builds it itself
    if not session.config.option.collectonly and os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        calls = [call for module in modules for call in getattr(module, "PREBUILD", ())]
        session.config.add_cleanup(prebuild.begin(calls))


def _module(item: pytest.Item) -> Any:
    return item.getparent(pytest.Module).obj  # type: ignore[union-attr]


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of pytest-timeout's timeout
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    if (slowdown := limits.slowdown()) > 1:
        marker = (
            item.get_closest_marker("timeout")
            or pytest.mark.timeout(float(item.config.getini("timeout"))).mark
        )
        seconds, *others = marker.args
        item.add_marker(pytest.mark.timeout(seconds * slowdown, *others, **marker.kwargs), append=False)
    machine = workers.machine.alone() if item.get_closest_marker("alone") else workers.machine.shared()
    with machine:
        return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the fault matrix; pytest-xdist passes the reports of all workers to the main process."""
    for name, value in report.user_properties:
        if name == "fault" and report.when == "call":
            fault, column, cell = value  # type: ignore[misc]
            FAULT_TABLE.setdefault(fault, {})[column] = cell


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not FAULT_TABLE:
        return
    columns = list(dict.fromkeys(column for row in FAULT_TABLE.values() for column in row))
    rows = [["fault", *columns]]
    rows += [[fault, *(row.get(column, "") for column in columns)] for fault, row in FAULT_TABLE.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    terminalreporter.section("faults: the error on every rank, and the seconds until it is raised")
    for row in rows:
        line = "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        terminalreporter.write_line(line.rstrip())


def _serve(
    rank: int,
    size: int,
    environment: dict[str, str],
    libraries: Sequence[Path],
    entering: Sequence[Callable[[], object]],
    store: str,
    pipe: Connection,
) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    gc.freeze()  # the objects of torch's import: gc.collect() would take half a second for them
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    os.environ.update(environment)
    if entering:
        entering[rank]()
    for library in libraries:
        ctypes.CDLL(str(library))
    if libraries:
        standins.guard_environment()
    faulthandler.register(signal.SIGUSR1)  # prints the stack of a rank that does not answer
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # random numbers differ between ranks unless a test says otherwise
    distributed_c10d.ProcessGroupGloo = shared(dist.ProcessGroupGloo)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    groups: dict[tuple[str, int], dist.ProcessGroup] = {}
    while (task := pipe.recv()) is not None:
        world, transport, function, args = task
        if (transport, world) not in groups:
            groups[transport, world] = dist.new_group(list(range(world)))
        if rank >= world:
            continue
        os.environ["SPAR_TRANSPORT"] = transport  # forced: a test must not pass on another transport
        try:
            pipe.send((True, function(rank, world, groups[transport, world], *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    os._exit(0)  # gloo's threads may outlive a test that failed


class Ranks:
    """ranks(world, function, *args) runs function(rank, world, group, *args) on `world` ranks.

    The fixture sets the group's transport: a test that requests `ranks` runs over each CPU transport, or over
    the first if it is marked `one_transport`: where exchanges over each are tested by other modules.
    Returns the results in rank order; fails with the traceback of the lowest failed rank. The function must
    be importable.
    """

    def __init__(
        self,
        worlds: tuple[int, ...] = WORLDS,
        environment: dict[str, str] | None = None,
        libraries: Sequence[Path] = (),
        entering: Sequence[Callable[[], object]] = (),
    ) -> None:
        self.worlds = worlds
        self.environment = environment or {}
        self.libraries = libraries  # its processes load them first
        self.entering = entering  # by rank: what its process does at its start
        self.first = FEW  # how many start, unless a call needs more
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.transport = transports()[-1]
        self.groups: set[tuple[str, int]] = set()  # made at their first use: gloo has a thread for each

    def _start(self, size: int) -> None:
        standins.needed(self.libraries)
        context = forks.context()
        store = os.path.join(tempfile.mkdtemp(), "store")
        settings = (size, self.environment, self.libraries, self.entering, store)
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, *settings, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def stop(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            try:
                pipe.send(None)
            except OSError:
                process.kill()
        for process in self.processes:
            process.join(5)
            process.kill()
        self.processes, self.pipes = [], []
        self.groups.clear()

    def __call__(
        self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 150
    ) -> list[Any]:
        if world > len(self.processes):
            self.stop()
            most = max(self.worlds)
            self._start(most if world > FEW else min(self.first, most))
        pipes, key = self.pipes[:world], (self.transport, world)
        for pipe in pipes if key in self.groups else self.pipes:  # a new group is made by all ranks
            pipe.send((world, self.transport, function, args))
        self.groups.add(key)
        results: dict[int, tuple[bool, Any]] = {}
        deadline = Deadline(timeout)
        while len(results) < world:
            ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], deadline.left(10))
            if not ready and deadline.left():
                continue
            failed = {rank: text for rank, (ok, text) in results.items() if not ok}
            if not ready:
                for rank in range(world):
                    os.kill(self.processes[rank].pid, signal.SIGUSR1)
                    time.sleep(0.2)  # so that the stacks do not mix on stderr
                self.stop()
                missing = sorted(set(range(world)) - set(results))
                pytest.fail(f"ranks {missing} did not answer in {timeout} s; others: {failed or 'fine'}")
            for rank, pipe in enumerate(pipes):
                if pipe in ready:
                    try:
                        results[rank] = pipe.recv()
                    except EOFError:
                        results[rank] = (False, "the process is gone")
            if failed or any(not ok for ok, _ in results.values()):
                timeout = 10  # the other ranks may wait for the failed one
            deadline = Deadline(timeout)
        for rank in range(world):
            ok, value = results[rank]
            if not ok:
                self.stop()  # the calls of its groups may no longer match
                pytest.fail(f"rank {rank} of {world}:\n{value}", pytrace=False)
        return [results[rank][1] for rank in range(world)]


def ranks_of_world(world: int) -> Iterator[Ranks]:
    """Yield ranks that WORLD has all of, for what uses it; then end them."""
    ranks = Ranks(worlds=(world,))
    ranks.transport = transports()[0]
    yield ranks
    ranks.stop()


def standin_ranks(worlds: tuple[int, ...], **environment: str) -> Iterator[Ranks]:
    """Yield ranks that have loaded the stand-ins of a GPU's libraries; then end them."""
    folder = standins.built()
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    ranks = Ranks(worlds, environment, [folder / name for name in standins.NAMES])
    yield ranks
    ranks.stop()
    standins.sweep()


@pytest.fixture(scope="module")  # its start costs 0.1 core seconds, and gloo's threads up to 2 a minute
def pool(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """The ranks of a module's tests; of as many as its POOL says, which are over the first transport."""
    worlds = getattr(request.module, "POOL", None)
    pool = Ranks(worlds or WORLDS)
    items = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    pool.first = max([FEW, *(values["world"] for values in params if "world" in values)])
    if worlds:
        pool.transport = transports()[0]
    yield pool
    pool.stop()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat tests that request `ranks` on each CPU transport; if marked `one_transport` on the first."""
    if "ranks" in metafunc.fixturenames:
        one = metafunc.definition.get_closest_marker("one_transport") is not None
        metafunc.parametrize("ranks", transports()[:1] if one else transports(), indirect=True)


@pytest.fixture
def ranks(pool: Ranks, request: pytest.FixtureRequest) -> Ranks:
    pool.transport = request.param
    return pool


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Return a function that runs `trainers/runs/TRAINER.py` on ranks, and returns their results.

    launch(trainer, "1 ARGUMENT", "4 ARGUMENT...", limit=200): in 1 process, and then on 4 ranks.
    """
    import torch

    tests = Path(__file__).parent

    def run(trainer: str, *runs: str, limit: float = 200) -> list[list[Any]]:
        installed = tests.parent / "build" / "trainers" / trainer
        assert installed.is_dir(), f"run `make build/trainers/{trainer}`, or `make test-trainers`"
        folder = tmp_path_factory.mktemp(trainer)
        path = os.pathsep.join(map(str, (installed, tests)))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        # As a module: a script's folder would precede the path, and has files named as the trainers are.
        command = [sys.executable, "-m", "trainers.ranks", trainer, str(folder), *runs]
        done = subprocess.run(
            command, env=environment, cwd=folder, timeout=limit, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return [
            [torch.load(folder / str(i) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
            for i, ranks in enumerate(int(each.split()[0]) for each in runs)
        ]

    return run


@pytest.fixture(params=["ordinary", "nontemporal"])
def stores(request: pytest.FixtureRequest) -> Iterator[None]:
    """Copies and sums of any size use these stores."""
    from helpers import core

    core.library().spar_nontemporal_use_min({"ordinary": 2**63 - 1, "nontemporal": 1}[request.param])
    yield
    core.library().spar_nontemporal_use_min(0)
