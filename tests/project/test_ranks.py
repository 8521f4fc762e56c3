# SPDX-License-Identifier: Apache-2.0
"""The processes that are ranks in tests."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.limits import Deadline, scaled
from helpers.processes import finish, start


def note(rank: int, folder: Path) -> None:
    imported = "helpers.forked" in sys.modules and not dist.is_initialized()
    (folder / "noted").write_text(f"{imported} {os.environ.get('PYTHONPATH')} {'conftest' in sys.modules}")


def test_ranks_begin_with_the_helpers_in_memory(tmp_path: Path) -> None:
    """Python passes over what it cannot import for them, and they would only be slow."""
    assert finish(start(note, 1, tmp_path, initialize=False), 60) == [0]
    assert (tmp_path / "noted").read_text() == f"True {os.environ.get('PYTHONPATH')} True"


def stay(rank: int, folder: Path) -> None:
    time.sleep(1.5)


def test_limits_follow_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    load = [0.0]
    monkeypatch.setattr(os, "getloadavg", lambda: (load[0], 0.0, 0.0))
    deadline = Deadline(10)
    assert scaled(10) == 10 and 9 < deadline.left() <= 10
    load[0] = 40.0
    assert scaled(10) == 50 and 49 < deadline.left() <= 50 and deadline.left(5) == 5
    load[0] = 1e6
    assert scaled(10) == 200
    load[0] = 0.0
    assert deadline.left() > 45, "what was started under load is late afterwards, too"
    load[0] = 400.0
    assert finish(start(stay, 1, tmp_path, initialize=False), 0.5) == [0]
