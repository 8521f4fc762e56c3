# SPDX-License-Identifier: Apache-2.0
"""What Trainer with sequence groups refuses, and the versions with which it runs."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import Ranks
from helpers import trainers
from helpers.trainers import model, samples
from test_trainer import PRELOAD as PRELOAD, Case, Group, four as four, two as two
from test_trainer_use import installed, stock

import spar
import spar.integrations.trainer
from spar.integrations._trainer import VERSIONS


def refuse_on_ranks(rank: int, world: int, group: Group, folder: Path) -> None:
    stream = trainers.Stream(samples(8))
    with installed(rank, world, 2):
        with pytest.raises(ValueError, match="Stream is an IterableDataset, and there are 2 sequence groups"):
            stock(folder, eval_dataset=stream).evaluate()
        parallelized = model()
        spar.parallelize(parallelized, group)
        with pytest.raises(ValueError, match=r"over another group; call spar.unparallelize\(model\)"):
            stock(folder, make=lambda: parallelized).train()
    with (
        installed(rank, world, 3),
        pytest.raises(ValueError, match="is 3; must divide the number of ranks, 4"),
    ):
        stock(folder)


def test_refused_on_ranks(four: Ranks, tmp_path: Path) -> None:
    four(4, refuse_on_ranks, tmp_path)


def parallelism() -> Any:
    from accelerate import ParallelismConfig

    return ParallelismConfig()


REFUSED: dict[str, Case] = {
    "parallelism_config is given; with sequence parallelism expected None": {
        "parallelism_config": parallelism
    },
    "train_sampling_strategy is 'batch_rebalance'": {"train_sampling_strategy": "batch_rebalance"},
    "accelerator_config has dispatch_batches=True": {"accelerator_config": {"dispatch_batches": True}},
    "use_liger_kernel is True": {"use_liger_kernel": True},
    r"this is one process; expected 2 or more ranks: torchrun --nproc-per-node 2": {},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_arguments(message: str, tmp_path: Path) -> None:
    changes = {name: value() if callable(value) else value for name, value in REFUSED[message].items()}
    spar.integrations.trainer.install(2)
    try:
        with pytest.raises(ValueError, match=message):
            stock(tmp_path, changes=changes)
    finally:
        spar.integrations.trainer.uninstall()


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (0, {}, "sequence_parallel_size is 0; expected an int from 1"),
        ("2", {}, "sequence_parallel_size is '2'; expected an int from 1"),
        (2, {"outputs": "parts"}, "outputs is 'parts'; expected none"),
    ],
)
def test_refused_options(size: Any, options: Case, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spar.integrations.trainer.install(size, **options)


@pytest.mark.parametrize("version", ["5.4.0", "5.24.0.dev0", "6.0.0rc1", "4.57.6"])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    message = f"transformers {re.escape(version)} is installed; expected 5.5 to 5.23, with which"
    with pytest.raises(ImportError, match=message + r".*: pip install 'transformers>=5.5,<5.24'"):
        spar.integrations.trainer.install(2)
    monkeypatch.undo()
    monkeypatch.setattr("spar.integrations._trainer.VERSIONS", {"no-such-library": ((1, 2), (1, 9))})
    with pytest.raises(ImportError, match=r"no-such-library is not installed; expected 1.2 to 1.9"):
        spar.integrations.trainer.install(2)


def test_oldest_and_newest_versions_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for i, patch in ((0, "0"), (1, "9")):
        versions = {name: f"{pair[i][0]}.{pair[i][1]}.{patch}" for name, pair in VERSIONS.items()}
        monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
        spar.integrations.trainer.install(2)
        spar.integrations.trainer.uninstall()
