# SPDX-License-Identifier: Apache-2.0
"""The processes that are ranks in tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist
from test_faults import finish, start


def note(rank: int, folder: Path) -> None:
    imported = "helpers.forked" in sys.modules and not dist.is_initialized()
    (folder / "noted").write_text(f"{imported} {os.environ.get('PYTHONPATH')} {'conftest' in sys.modules}")


def test_ranks_begin_with_the_helpers_in_memory(tmp_path: Path) -> None:
    """Python passes over what it cannot import for them, and they would only be slow."""
    assert finish(start(note, 1, tmp_path, initialize=False), 60) == [0]
    assert (tmp_path / "noted").read_text() == f"True {os.environ.get('PYTHONPATH')} True"
