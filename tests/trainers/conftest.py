# SPDX-License-Identifier: Apache-2.0
"""Runs by other trainers, in the versions that each of them asks for: `make test-trainers` installs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
Launch = Callable[..., list[list[Any]]]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Return a function that runs `runs/TRAINER.py` on ranks, and returns what each rank's `main` returned.

    launch(trainer, "1 ARGUMENT", "4 ARGUMENT...", limit=200): in 1 process, and then on 4 ranks.
    """

    def run(trainer: str, *runs: str, limit: float = 200) -> list[list[Any]]:
        installed = ROOT / "build" / "trainers" / trainer
        assert installed.is_dir(), f"run `make build/trainers/{trainer}`, or `make test-trainers`"
        folder = tmp_path_factory.mktemp(trainer)
        path = os.pathsep.join(map(str, (installed, ROOT / "tests")))
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
