# SPDX-License-Identifier: Apache-2.0
"""Every fault on every transport for CPU tensors, in worlds of 2, 3 and 4 ranks; pytest prints the table.

For each transport and size, one world runs all faults that processes survive, each on its own group. The
deaths follow, each in a new world. In each cell every rank must raise the same error in time, with a message
that names the cause. Afterwards the group must be usable or broken as promised, other groups usable, and the
process must end.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS
from helpers import tables
from helpers.fault_cases import (
    CAP,
    DEATHS,
    FAULTS,
    LIMIT,
    LOST_WITHIN,
    SIZES,
    Fault,
    Scene,
    gather,
    odd_of,
)
from helpers.limits import scaled
from helpers.processes import finish, start
from helpers.shared_gloo import shared
from helpers.workers import machine

import spar
from spar._group.registry import group_of

# Between hosts of one rank each torch takes the way of tcp, so that one size is enough.
CELLS = [*((name, world) for name in TRANSPORTS for world in SIZES), (tables.ACROSS, 3)]
INSTEAD = {
    name: row.instead for name, row in {**tables.TRANSPORTS, tables.ACROSS: tables.ACROSS_HOSTS}.items()
}
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"), pytest.mark.waits]


# ---- on the ranks ----


def attempt(call: Callable[[], object]) -> dict[str, Any]:
    begin, result = time.monotonic(), {"error": "", "text": "", "ranks": []}
    try:
        call()
    except BaseException as error:
        result |= {"error": type(error).__name__, "text": str(error), "at": time.time()}
        result["ranks"] = list(getattr(error, "ranks", ()))
    return {**result, "seconds": time.monotonic() - begin}


def run_fault(fault: Fault, rank: int, world: int, scene: Scene) -> dict[str, Any]:
    """Run a fault on a new group of all ranks; return what this rank saw."""
    group = dist.new_group(list(range(world)))
    os.environ["SPAR_TIMEOUT"] = "30"  # of the set-up, which other columns and tests delay
    warm = functools.partial(gather, torch.zeros(1), group, 0)
    warm()
    if not fault.usable:
        # Another error than that of a timeout must come first, also where a rank starts late.
        limit = LIMIT if fault.error == "ExchangeTimeoutError" else scaled(LIMIT)
        os.environ["SPAR_TIMEOUT"] = str(limit)  # of groups that the fault sets up
        group_of(group).timeout = limit
    dist.barrier()
    result = attempt(functools.partial(fault.call, rank, world, group, scene))
    result |= {"group": group.group_name, "other": scene.other.group_name}
    if not fault.usable:
        time.sleep(0.3)  # until the last rank has aborted
    result["again"] = attempt(warm)
    result["named"] = spar.transport(group).name
    assert gather(torch.full((1,), 1.0 + rank), None, 0).sum() == world * (world + 1) / 2
    spar.close(group)
    if fault.usable:
        dist.destroy_process_group(group)
    return result


def make_scene(rank: int, world: int) -> Scene:
    processes: list[int] = [0] * world
    dist.all_gather_object(processes, os.getpid())
    other, fresh = (dist.new_group(list(range(world))) for _ in range(2))  # each for one fault
    return Scene(other, fresh, processes, rank)


def run_faults(rank: int, folder: Path, world: int, transport: str) -> None:
    """Run all faults that leave the processes alive."""
    # The groups of faults stay: a thread of each would poll until the last fault.
    dist.distributed_c10d.ProcessGroupGloo = shared(dist.ProcessGroupGloo)
    scene = make_scene(rank, world)
    faults = {name: fault for name, fault in FAULTS.items() if name not in INSTEAD[transport]}
    report = {name: run_fault(fault, rank, world, scene) for name, fault in faults.items()}
    spar.close(scene.other)
    spar.close(scene.fresh)
    dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(report))


def run_death(rank: int, folder: Path, world: int, how: str) -> None:
    """The last rank dies; a group of the survivors stays usable."""
    survivors = dist.new_group(list(range(world - 1)))
    if world > 2 and rank < world - 1:
        gather(torch.zeros(1), survivors, 0)
    big = torch.zeros(1 << 20)
    dist.barrier()
    if odd_of(rank, world):

        def die() -> None:
            (folder / "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

        if how == "exits":
            time.sleep(0.3)
            (folder / "died").write_text(str(time.time()))
            os._exit(0)
        threading.Timer(0.3, die).start()
        if how == "killed waiting":
            time.sleep(60)

    def calls() -> None:
        for _ in range(10_000):
            gather(big, None, 0)

    result = attempt(calls)
    result["again"] = attempt(lambda: gather(torch.zeros(1), None, 0))
    if world > 2:
        assert gather(torch.full((1,), 1.0), survivors, 0).sum() == world - 1
    spar.close()
    (folder / f"{rank}.json").write_text(json.dumps({how: result}))


# ---- the cells ----


class Column:
    """One transport and world size: each rank's report of each fault, and its exit code."""

    def __init__(self, folder: Path, transport: str, world: int) -> None:
        folder.mkdir()
        self.folder, self.transport, self.world = folder, transport, world
        self.reports: list[dict[str, Any]] = []
        self.codes: list[int | None] = []

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        settings = {"SPAR_TRANSPORT": self.transport, "SPAR_ARENA_MAX": str(CAP)}
        self.processes = start(function, self.world, self.folder, self.world, *args, **settings)

    def finish(self, limit: float) -> None:
        self.codes = finish(self.processes, limit)
        self.ended = time.time()
        for rank in range(self.world):
            path = self.folder / f"{rank}.json"
            self.reports.append(json.loads(path.read_text()) if path.exists() else {})


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Column]:
    folder = tmp_path_factory.mktemp("faults")
    made = {cell: Column(folder / str(i), *cell) for i, cell in enumerate(CELLS)}
    for column in made.values():  # all at once: they mostly wait
        column.start(run_faults, column.transport)
    for column in made.values():
        column.finish(150)
    return made


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, int], Column]:
    folder, made = tmp_path_factory.mktemp("deaths"), {}
    for i, how in enumerate(DEATHS):
        some = [Column(folder / f"{i}.{j}", *cell) for j, cell in enumerate(CELLS)]
        with machine.alone():
            for column in some:
                column.start(run_death, how)
                made[how, column.transport, column.world] = column
            for column in some:
                column.finish(30)
    return made


Property = Callable[[str, object], None]


def note(record_property: Property, fault: str, transport: str, world: int, cell: str) -> None:
    """Add a cell to the table that conftest.py prints."""
    record_property("fault", (fault, f"{transport} {world}", cell))


def short_name(name: str) -> str:
    return name.removesuffix("Error").removeprefix("Exchange").removeprefix("Group") or "fine"


def check_fault(fault: Fault, results: list[dict[str, Any]], process: int) -> None:
    """Check what run_fault returned on each rank; process: of the odd rank, which is the last."""
    world = len(results)
    for rank, result in enumerate(results):
        odd = rank == world - 1
        if odd and fault.odd == "-":
            assert not result["error"], result
        else:
            assert re.fullmatch(fault.odd if odd and fault.odd else fault.error, result["error"]), result
        if not odd or not fault.odd:
            names = {"odd": world - 1, "process": process, "group": results[0]["group"]}
            for pattern in fault.patterns:
                for key, value in {**names, "other": result["other"]}.items():
                    pattern = pattern.replace(f"{{{key}}}", str(value))
                assert re.search(pattern, result["text"], re.S), (pattern, result["text"])
            least, most = fault.seconds
            assert least <= result["seconds"] <= scaled(most), result
        again = result["again"]
        if fault.usable:
            assert not again["error"], again
        elif not odd:
            at_once = again["seconds"] < scaled(LIMIT)
            assert again["error"] == "GroupBrokenError" and at_once, "rejected at once"
        else:  # its abort may not have been in a call on this group
            assert again["error"] in ("GroupBrokenError", "ExchangeTimeoutError", "PeerLostError"), again
    if fault.error == "MismatchError" and not fault.odd:
        assert len({result["text"].split(":", 1)[1] for result in results}) == 1, "the same on all ranks"
        assert all(0 < len(result["ranks"]) < world for result in results)


@pytest.mark.parametrize(("transport", "world"), CELLS)
@pytest.mark.parametrize("name", FAULTS)
def test_fault(
    columns: dict[tuple[str, int], Column],
    record_property: Property,
    name: str,
    transport: str,
    world: int,
) -> None:
    fault, column = FAULTS[name], columns[transport, world]
    assert column.codes == [0] * world, "the processes must have ended"
    if name in INSTEAD[transport]:
        note(record_property, name, transport, world, INSTEAD[transport][name])
        return
    results = [report[name] for report in column.reports]
    check_fault(fault, results, column.processes[-1].pid)
    assert all(result["named"] in (transport.split()[0], None) for result in results)
    seconds = max(result["seconds"] for result in results[: world - 1])
    note(record_property, name, transport, world, f"{short_name(fault.error)} {seconds:.2f}")


@pytest.mark.parametrize(("transport", "world"), CELLS)
@pytest.mark.parametrize("how", DEATHS)
def test_death(
    deaths: dict[tuple[str, str, int], Column],
    record_property: Property,
    how: str,
    transport: str,
    world: int,
) -> None:
    column = deaths[how, transport, world]
    assert column.codes == [0] * (world - 1) + [0 if how == "exits" else -signal.SIGKILL]
    died = float((column.folder / "died").read_text())
    took = []
    for report in column.reports[: world - 1]:
        result = report[how]
        assert result["error"] == "PeerLostError", result
        process = column.processes[-1].pid
        expected = rf"^{gather.__name__}, call \d+ on .*rank {world - 1} \(process {process}\)"
        assert re.search(expected, result["text"])
        assert result["ranks"] == [world - 1], result
        assert result["again"]["error"] == "GroupBrokenError" and result["again"]["seconds"] < 0.3
        took.append(result["at"] - died)
    assert max(took) < LOST_WITHIN
    note(record_property, how, transport, world, f"PeerLost {max(took):.2f}")


# ---- threads of one process: the local transport of the tests ----


@pytest.mark.parametrize("world", SIZES)
@pytest.mark.parametrize("name", ["different shape", "different dim", "no call"])
def test_fault_between_threads(record_property: Property, name: str, world: int) -> None:
    from helpers import core  # here, because ranks import this file and need no core
    from helpers.cases import items
    from helpers.core import Plan, Spec, Status, request

    shared = core.World(world)
    inputs = [(items(2, 6),) for _ in range(world)]
    if name == "different shape":
        inputs[-1] = (items(2, 7),)
    dims = [int(name == "different dim" and rank == world - 1) for rank in range(world)]
    plans: list[Plan | None] = [
        Plan(request("gather", world, rank, [Spec.of(inputs[rank][0], [dims[rank]])]))
        for rank in range(world)
    ]
    if name == "no call":
        plans[-1] = None
    outcomes = shared.call(plans, inputs, seconds=0.1 if name == "no call" else 30)
    expected = Status.TIMEOUT if name == "no call" else Status.MISMATCH
    seconds = [outcome.seconds for outcome in outcomes if outcome and outcome.status == expected]
    assert len(seconds) == world - (name == "no call")
    assert all(output.is_untouched() for outcome in outcomes if outcome for output in outcome.outputs)
    shared.close()
    error = "ExchangeTimeoutError" if name == "no call" else "MismatchError"
    note(record_property, name, "local", world, f"{short_name(error)} {max(seconds):.2f}")
