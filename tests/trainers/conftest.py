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
Launch = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Return a function that runs `runs/TRAINER.py` by torchrun, and returns what each rank saved.

    launch(trainer, ranks, *arguments, limit=200): the script gets a folder and the arguments, and saves an
    object to `RANK.pt` in that folder by torch.save.
    """

    def run(trainer: str, ranks: int, *arguments: str, limit: float = 200) -> list[Any]:
        installed = ROOT / "build" / "trainers" / trainer
        assert installed.is_dir(), f"run `make build/trainers/{trainer}`, or `make test-trainers`"
        folder = tmp_path_factory.mktemp(trainer)
        path = os.pathsep.join(map(str, (installed, ROOT / "tests")))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        # As a module: a script's folder would precede the path, and has files named as the trainers are.
        script = "--module", f"trainers.runs.{trainer}"
        command = [*torchrun, f"--nproc-per-node={ranks}", *script, str(folder), *arguments]
        done = subprocess.run(
            command, env=environment, cwd=folder, timeout=limit, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]

    return run
