# SPDX-License-Identifier: Apache-2.0
"""Ranks are forks of one process for each worker, which imports what each of them would import."""

from __future__ import annotations

import multiprocessing as mp
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest import mock

_TESTS = Path(__file__).parents[1]
# Tests add theirs. conftest is first: it sets the collector's threshold.
PRELOAD = ["conftest", "torch", "torch.distributed", "torch.distributed.fsdp", "pytest"]
PRELOAD += ["spar", "spar._attention.attention"]
_LAST = "helpers.forked"
PATH = "PYTEST_SPAR_PATH"  # set while that process imports


def context() -> ForkServerContext:
    """Return the context of processes that are such forks; theirs only imports, so that they are clean."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, _LAST])
    # It looks for modules on Python's path alone; forked.py gives its children that of this process.
    path = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join(filter(None, (str(_TESTS), path)))
    with mock.patch.dict(os.environ, {"PYTHONPATH": paths, PATH: path}):
        forkserver.ensure_running()
    return context
