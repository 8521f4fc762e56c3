# SPDX-License-Identifier: Apache-2.0
"""Every public operation, by the cases of `spar check`, in settings that must not change its results."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TRANSPORTS
from helpers.operations import DIRECT, failures_of, setting_of_world
from helpers.processes import finish, start
from helpers.traffic import exchanges
from torch.profiler import profile

import spar
from spar._commands.check.cases import cases
from spar._commands.check.trial import expected_of

pytestmark = pytest.mark.long


COMPUTE = {"spar::token_logprobs", "spar::token_logprobs_backward"}  # ops that exchange nothing


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    """Each exchange must be one event of its operation, none of the dispatcher's op."""
    before = exchanges()
    with profile() as profiler:
        yield
    assert profiler.profiler is not None
    recorded = profiler.profiler.kineto_results.events()  # profiler.events() takes longer than the calls
    names = [name for name in (event.name() for event in recorded) if name.startswith("spar::")]
    names = [name for name in names if name not in COMPUTE]
    assert "spar::exchange" not in names
    assert len(names) == exchanges() - before, names


def run_operations(rank: int, folder: Path, transport: str) -> None:
    setting = setting_of_world()
    settings: dict[str, Callable[[], Any]] = {
        "first call": contextlib.nullcontext,
        "repeated call": contextlib.nullcontext,
        "default device": lambda: torch.device("meta"),
        # A profile sees only the calls of its rank.
        "profiled": profiled if rank == 0 else contextlib.nullcontext,
    }
    if transport == "tcp":  # a channel of the same class as shm's
        del settings["default device"], settings["profiled"]
    found = []
    for case in cases(setting.world):
        trial = case.make(setting)
        expected = expected_of(trial, setting)
        for name, context in settings.items():
            texts = failures_of(trial, expected, setting, context)
            found += [f"{case.name}, {name}: {text}" for text in texts]
    (folder / f"{rank}.wrong").write_text("\n".join(found))


def test_operations_with_out_and_async_op_are_in_one_table() -> None:
    functions = {name: value for name, value in vars(spar).items() if inspect.isfunction(value)}
    takes = {name for name, value in functions.items() if "async_op" in inspect.signature(value).parameters}
    assert takes == {*DIRECT}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_operations_in_each_setting(tmp_path: Path, transport: str) -> None:
    processes = start(run_operations, 4, tmp_path, transport, SPAR_TRANSPORT=transport)
    codes = finish(processes, 150)
    assert [(tmp_path / f"{rank}.wrong").read_text() for rank in range(4)] == [""] * 4
    assert codes == [0] * 4
