# SPDX-License-Identifier: Apache-2.0
"""Copy threads: the same bytes as one thread for any division, and the number that SPAR_THREADS sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS
from helpers import core
from helpers.core import Scale, ScaleType
from helpers.processes import finish, start

import spar
from spar import _C


@pytest.fixture
def team() -> Iterator[None]:
    yield
    core.library().spar_threads_limit(1)
    core.library().spar_threads_min_bytes(1 << 20)


CALLS = {  # one long run; several long runs, each shared by threads; rows; single items
    "a run": ("split", [(3 << 20,)], [[0]]),
    "long runs": ("split", [(3, (1 << 20) + 77)], [[1]]),
    "rows": ("split", [(2, 1 << 10, 900)], [[2]]),
    "several": ("packed_split", [(700, 3000)] * 2, [[0, 1, 3, 100, 0, 600]]),
    "columns": ("all_to_all", [(150_000, 7)] * 2, [[1, 0, 300_000]]),
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_threads_share_a_copy(team: None, name: str, scaled: bool) -> None:
    op, shapes, args = CALLS[name]
    bits = torch.Generator().manual_seed(1)
    inputs = [[torch.randn(shape, generator=bits).unsqueeze(-1).view(torch.uint8)] for shape in shapes]
    if name == "columns":
        inputs = [[x.transpose(0, 1).contiguous().transpose(0, 1)] for (x,) in inputs]
    scale = Scale(ScaleType.F32, 1, 3.0) if scaled else Scale(ScaleType.UNSCALED, 0, 1.0)
    world, results = core.world(len(shapes)), []
    for threads, worth in ((1, 1 << 20), (2, 1 << 20), (3, 5000), (7, 1)):
        core.library().spar_threads_limit(threads)
        core.library().spar_threads_min_bytes(worth)
        plans = core.build_plans(op, inputs, args)
        results.append([y for (y,) in world.exchange(plans, inputs, scale=scale)])
    for other in results[1:]:
        for one, many in zip(results[0], other, strict=True):
            assert torch.equal(one, many)


def copy_with_threads(rank: int, folder: Path) -> None:
    x = torch.arange(3_000_001, dtype=torch.float32) + rank
    y = spar.gather_forward_split_backward(x, None, 0)
    assert torch.equal(y, torch.cat([x - rank, x - rank + 1]))
    threads = len(os.listdir("/proc/self/task"))
    for _ in range(5):
        spar.gather_forward_split_backward(x, None, 0)
    assert len(os.listdir("/proc/self/task")) == threads, "made once"
    child = os.fork()
    if child == 0:  # a fork has none of the parent's threads
        core = _C.Exchange("split", "", 1, 0, 4, ((1, -1, 0, 0, 3_000_001),), 0, False, 1.0, 0)
        plan, addresses = core.plan([x], 0)
        z = torch.zeros(3_000_001)
        plan.copy_own(addresses, (z.data_ptr(),), 0, False, 1.0)
        os._exit(0 if torch.equal(x, z) else 1)
    assert os.waitpid(child, 0)[1] == 0
    (folder / f"threads.{rank}").write_text(str(threads))
    dist.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_spar_threads_sets_the_number_of_copy_threads(tmp_path: Path, transport: str) -> None:
    counts = []
    for wanted in ("1", "3"):
        folder = tmp_path / wanted
        folder.mkdir()
        assert finish(
            start(copy_with_threads, 2, folder, SPAR_THREADS=wanted, SPAR_TRANSPORT=transport), 60
        ) == [0, 0]
        counts.append([int((folder / f"threads.{rank}").read_text()) for rank in range(2)])
    assert [b - a for a, b in zip(*counts, strict=True)] == [2, 2], counts


def test_default_threads_are_at_most_the_share_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPAR_THREADS", raising=False)
    assert _C.threads(1, 1) == 1
    assert _C.threads(1000, 3) == 3
    assert _C.threads(2, 3) == 2
    assert _C.threads(1000, 65) == 64
    assert _C.threads(1000, 0) == 1, "ranks share a core"
    monkeypatch.setenv("SPAR_THREADS", "5")
    assert _C.threads(1, 1) == 5
    monkeypatch.setenv("SPAR_THREADS", str(2**32 + 3))
    assert _C.threads(1, 1) == 64
    monkeypatch.delenv("SPAR_THREADS")
    assert _C.threads(1, 1) == 1
