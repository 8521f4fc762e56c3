# SPDX-License-Identifier: Apache-2.0
"""Methods and slices by the speeds of made-up machines, and the file that keeps what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks

import spar
from spar import SequenceLayout
from spar._attention import slices
from spar._control.speeds import Measured, Speeds, read, unpack, write
from spar._group.registry import group_of

pytestmark = pytest.mark.one_transport

# In the first moving bytes takes all of the time, in the second computing, in the third each call.
WIRE, KERNEL = Speeds(1e15, 1e-9, 1e3), Speeds(1e3, 1e-9, 1e15)
CALLS, BOTH = Speeds(1e9, 1.0, 1e9), Speeds(1e3, 1e-9, 2e3)


def calls_of(rank: int, world: int, group: dist.ProcessGroup, folder: Path, far: bool) -> list[int]:
    """Return the exchanges of forwards without a method, of 6 key heads and of 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / str(rank)))
        patch.setattr(slices, "spans_hosts", lambda *_: far)
        made, found = dist.new_group(list(range(world))), []
        layout, state = SequenceLayout.even(64, made), group_of(made)
        for heads in (6, 1):
            q, k = (torch.randn(1, layout.sizes[rank], count, 4) for count in (12, heads))
            spar.all_gather(q, made)
            before = state.count()
            spar.attention(q, k, k, layout, causal=True)
            found.append(state.count() - before)
    return found


@pytest.mark.parametrize(
    ("speeds", "far", "calls"),
    [
        (None, False, [2, 2]),
        (WIRE, False, [1, 1]),  # gather moves fewer bytes
        (KERNEL, False, [2, 2]),  # by heads the work is even
        (CALLS, False, [1, 1]),
        (BOTH, True, [6, 2]),  # three key heads of a rank are three slices
    ],
)
def test_method_and_slices_take_the_least_time(
    ranks: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    speeds: Speeds | None,
    far: bool,
    calls: list[int],
) -> None:
    """By the speeds of rank 0, on all ranks."""
    for rank, own in enumerate((speeds, KERNEL)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(rank)))
        write("cpu", Measured(near=own))
    assert ranks(2, calls_of, tmp_path, far) == [calls, calls]


def test_hidden_time_of_a_step() -> None:
    speeds = Speeds(10.0, 1.0, 100.0)  # a kernel of 10 s, exchanges of 4 s, and of 1 s each for the calls
    assert speeds.step(100, 400, 2) == 16
    assert speeds.step(100, 400, 2, slices=2) == 16 - 2 + 2
    assert speeds.step(100, 400, 2, own=0.25) == 16 - 2.5
    assert speeds.step(100, 400, 2, own=1.0) == 16 - 4


def test_file_of_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read("cpu") == Measured()
    path = write("cpu", Measured(near=WIRE))
    write("cpu", Measured(far=KERNEL))
    write("cuda", Measured(near=KERNEL))
    both = Measured(WIRE, KERNEL)
    assert read("cpu") == unpack(both.pack()) == both and read("cuda") == Measured(near=KERNEL)
    for text in (
        "",
        "[]",
        "[" * 100_000,
        '{"cpu": 1}',
        '{"cpu": {"near": [1.0, 2.0], "far": [0.0, 1.0, 1.0]}}',
    ):
        path.write_text(text)
        assert read("cpu") == Measured()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "")
    with pytest.raises(OSError, match="neither XDG_CACHE_HOME nor HOME is an absolute path"):
        write("cpu", both)
