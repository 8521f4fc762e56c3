# SPDX-License-Identifier: Apache-2.0
"""The commands of `python -m spar`: info, check, wrong arguments. bench: benchmarks/test_benchmarks.py."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.launched import launch
from helpers.processes import finish, start
from helpers.tables import MAKERS

import spar
from spar import sharding
from spar._commands import info, printing
from spar._commands.arguments import main
from spar._commands.check import outcome, run as check_command
from spar._commands.check.cases import cases
from spar._commands.check.trial import difference
from spar._commands.facts import transports
from spar._commands.ranks import joined

pytestmark = pytest.mark.spread

# ---- info ----


def test_info_prints_json_without_a_process_group() -> None:
    environment = {**os.environ, "SPAR_TIMOUT": "3", "SPAR_TRANSPORT": "^shm"}
    command = [sys.executable, "-m", "spar", "info", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["versions"]["spar"] == spar.__version__ and facts["versions"]["torch"] == torch.__version__
    assert facts["processor"]["usable_cores"] <= len(facts["processor"]["affinity"])
    assert facts["memory"]["usable"] <= facts["memory"]["total"]
    assert facts["settings"]["unknown"] == ["SPAR_TIMOUT"]
    assert facts["settings"]["variables"]["SPAR_TRANSPORT"] == {"set": True, "value": "^shm", "error": None}
    here = facts["transports"][0]
    assert (here["device"], here["transport"]) == ("cpu", "tcp")
    assert here["rejected"]["shm"] == "excluded by SPAR_TRANSPORT=^shm"


def test_info_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPAR_SPIN_US", "soon")
    before = os.listdir("/proc/self/task")
    facts = info.collect()
    assert set(os.listdir("/proc/self/task")) <= set(before), "info started a thread"
    text = "\n".join(info.sections(facts))
    assert f"spar                {spar.__version__}" in text
    assert "SPAR_SPIN_US        wrong: SPAR_SPIN_US is 'soon'; expected an integer from 0" in text
    assert "cpu, one host       none: SPAR_SPIN_US is 'soon'" in text  # a group would raise it
    lines = [line for line in text.splitlines() if len(line.split()) > 2]  # a path is not wrapped
    assert len(lines) > 10 and max(map(len, lines)) <= 100
    monkeypatch.delenv("SPAR_SPIN_US")
    by_hosts = {choice["hosts"]: choice for choice in transports() if choice["device"] == "cpu"}
    assert by_hosts["one host"]["reason"] == "ranks of one host share its memory"
    assert by_hosts["several hosts"]["transport"] == "tcp"


def test_info_shows_which_gpus_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a stand-in for torch.cuda with three GPUs, of which the first two access each other."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    properties = SimpleNamespace(name="GPU X", total_memory=80 << 30, major=9, minor=0)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 3,
        "get_device_properties": lambda index: properties,
        "can_device_access_peer": lambda one, other: {one, other} == {0, 1},
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    facts = info.collect()
    assert facts["gpus"]["peer_access"] == [[True, True, False], [True, True, False], [False, False, True]]
    text = "\n".join(info.sections(facts))
    assert "cuda:0              GPU X, 80.0 GB, capability 9.0; accesses the memory of 1" in text
    assert "cuda:2              GPU X, 80.0 GB, capability 9.0; accesses the memory of no other" in text


# ---- check ----


def in_file(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run a command on this rank; return its exit status and what it printed."""
    file = folder / f"printed.{os.environ.get('RANK', 'alone')}"
    with file.open("w") as out, contextlib.redirect_stdout(out):
        status = main(arguments)
    return status, file.read_text()


def wrong_on_rank_1(function: Any) -> Any:
    """Add 1 to an element of the output."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        y = function(*args, **kwargs)
        if os.environ["RANK"] == "1" and isinstance(y, torch.Tensor) and y.numel():
            y = y + torch.nn.functional.one_hot(torch.tensor(0), y.numel()).view(y.shape).to(y.dtype)
        return y

    return wrong


def check_then_break(folder: Path) -> None:
    with joined() as ranks:
        out = io.StringIO()
        assert check_command.check(ranks, "", 60.0, out) == (True, True), out.getvalue()
        text, total = out.getvalue(), len(cases(2))
        if ranks.rank == 0:
            assert f"{total} of {total} checks passed" in text and "all 2 ranks share this host's mem" in text
            assert text.count(" pass ") == total and "FAIL" not in text
        else:
            assert text == ""
        spar.all_gather = wrong_on_rank_1(spar.all_gather)  # type: ignore[assignment]
        out = io.StringIO()
        assert check_command.check(ranks, "all_gather (", 60.0, out, as_json=True) == (False, True)
        text = out.getvalue()
    if ranks.rank == 0:
        rows = {row["name"]: row for row in json.loads(text)["checks"] if row["name"] != "init"}
        assert {row["result"] for name, row in rows.items() if "async_op" not in name} == {"FAIL"}
        assert rows["all_gather (async_op)"]["result"] == "pass"  # it returns a tuple, which stayed as it was
        (found,) = rows["all_gather (even)"]["failures"]["1"]
        assert list(rows["all_gather (even)"]["failures"]) == ["1"]
        assert found.startswith("output: element [0, 0, 0] is ") and "; expected " in found
        assert found.endswith("; 1 of 72 elements differ, by up to 1")


def test_check_passes_and_a_broken_operation_fails(tmp_path: Path) -> None:
    launch(check_then_break, 2, tmp_path)


def refuse_on_rank_1(folder: Path) -> None:
    """An operation that raises on one rank before it communicates: the peer must not wait for it."""
    exchange = spar.reduce_scatter

    def refuse(x: Any, *args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise RuntimeError("no such luck")
        return exchange(x, *args, **kwargs)

    spar.reduce_scatter = refuse  # type: ignore[assignment]
    check_that_ends(folder)


def check_that_ends(folder: Path) -> None:
    """Run a check after which the group is broken, which must not take as long as the timeout."""
    begin, outcome.GRACE = time.monotonic(), 0.5
    with joined() as ranks, (folder / f"table.{ranks.rank}").open("w") as out:
        passed, usable = check_command.check(ranks, "reduce_scatter (", 60.0, out)
    assert not passed and not usable and time.monotonic() - begin < 30
    os._exit(0)  # as the command, which ends at once


def test_check_ends_if_an_operation_raises_on_one_rank(tmp_path: Path) -> None:
    launch(refuse_on_rank_1, 2, tmp_path)
    table = (tmp_path / "table.0").read_text()
    assert "FAIL reduce_scatter (uneven), on ranks 0, 1 of 2:" in table
    assert "rank 1: RuntimeError: no such luck" in table and "not run" in table


def die_on_rank_1(folder: Path) -> None:
    if os.environ["RANK"] == "1":
        spar.reduce_scatter = lambda *args, **kwargs: os._exit(0)  # type: ignore[assignment]
    check_that_ends(folder)


def test_check_ends_if_a_rank_dies(tmp_path: Path) -> None:
    launch(die_on_rank_1, 2, tmp_path)
    table = (tmp_path / "table.0").read_text()
    assert "FAIL reduce_scatter (uneven), on ranks 0, 1 of 2:" in table
    assert "rank 0: PeerLostError: " in table and "rank 1: no answer; its process ended" in table


def alone(rank: int, folder: Path) -> None:
    status, text = in_file(folder, "check", "--only", "all_")
    assert status == 0 and "One rank exchanges nothing with others; start several: torchrun" in text


def test_check_without_a_launcher_runs_one_rank(tmp_path: Path) -> None:
    assert finish(start(alone, 1, tmp_path, initialize=False), 60) == [0]


def test_check_covers_every_operation() -> None:
    names = {case.operation for case in cases(4)}
    functions = {name for name in spar.__all__ if inspect.isfunction(getattr(spar, name))}
    no_operations = {"transport", "close", "debug", "empty_cache", "memory_stats"}
    sizes = {"cal_split_sizes", "cal_split_sizes_multi"}  # of which the splits above are made
    models = {"parallelize", "unparallelize"}  # they change a model
    assert functions - no_operations - sizes - models - names == set()
    assert {f"SequenceLayout.{name}" for name in (*MAKERS, "hybrid")} <= names
    others = set(sharding.__all__) - {"get_sharding_validator"}  # returns a ShardingValidator
    assert {f"sharding.{name}" for name in others} <= names
    assert {"data.SPDataProcessor", "data.sp_slice_and_pad_input"} <= names


def test_difference_names_the_first_wrong_element() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert difference(x, x, 0.0) == "" and difference(x + 1e-6, x, 1e-5) == ""
    wrong = x.clone()
    wrong[1, 0] = torch.nan
    assert difference(wrong, x, 1.0).startswith("element [1, 0] is nan; expected 3; 1 of 6 elements differ")
    assert difference(x.view(6), x, 0.0) == "torch.float32 [6]; expected torch.float32 [2, 3]"


# ---- arguments ----


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["inof"], "invalid choice: 'inof' (choose from"),
        ([], "the following arguments are required: COMMAND"),
        (["bench"], "type: torchrun --standalone --nproc-per-node 2 -m spar bench"),
        (["bench", "--out", "/nowhere/at/all"], "/nowhere/at is not a folder"),
        (["bench", "--busy", "-1"], "--busy is -1; expected a number of processes from 0"),
        (["bench", "--median", "setup.py"], "setup.py is not a file that `spar bench` wrote"),
        (["check", "--device", "toaster"], "--device is 'toaster'; expected cpu, cuda"),
        (["check", "--device", "xpu"], "finds no such device here; see `python -m spar info`"),
        (["check", "--backend", "toaster"], "cannot start over 'toaster': Unknown backend type toaster"),
        (["check", "--timeout", "0"], "--timeout is 0; expected a number of seconds above 0"),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: Any = main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and text in capsys.readouterr().err


def test_only_rank_0_prints_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            main(["check", "--help"])
        assert ("Rank 0 prints a table" in capsys.readouterr().out) == (rank == "0")


def test_progress_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def count() -> str:
        assert list(printing.progress(["first", "second"], 2, str, shown=True)) == ["first", "second"]
        return capsys.readouterr().err

    assert count() == "1/2 first\n2/2 second\n"  # no terminal: lines of a log
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(printing, "find_spec", lambda name: None)
    assert "0/2 first" in count()
