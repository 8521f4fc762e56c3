"""What a process does around its exchanges: forks, workers, ends in any order, crashes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import assert_same
from test_faults import finish, start

import spar

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's here")

gather = spar.gather_forward_split_backward


# ---- forks ----


def forks(rank: int, folder: Path) -> None:
    y = gather(torch.full((10,), float(rank)), None, 0)
    child = os.fork()
    if child == 0:
        try:
            gather(torch.zeros(1), None, 0)
        except spar.SparError as error:
            assert "forked" in str(error)
            del y
            gc.collect()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_same(y, torch.tensor([0.0, 1.0]).repeat_interleave(10))
    assert_same(gather(torch.ones(2), None, 0), torch.ones(4))


def test_a_forked_child_raises_and_harms_nothing(tmp_path: Path) -> None:
    assert finish(start(forks, 2, tmp_path, SPAR_TRANSPORT="shm"), 40) == [0, 0]


def test_nothing_is_dumped_or_left_behind(tmp_path: Path) -> None:
    code = """
import os, torch, torch.distributed as dist, spar
dist.init_process_group("gloo")
y = spar.gather_forward_split_backward(torch.zeros(1000), None, 0)
assert spar.transport().name == "shm"
lines = open("/proc/self/smaps").read().split("\\n")
flags = {}
for line in lines:
    if "memfd:spar" in line:
        name = line.split()[0]; flags[name] = ""
    elif line.startswith("VmFlags") and flags and list(flags.values())[-1] == "":
        flags[list(flags)[-1]] = line
assert len(flags) == 2 and all(" dd" in text for text in flags.values()), flags
print("seen")
"""
    (tmp_path / "run.py").write_text(code)
    before = set(os.listdir("/dev/shm"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, "run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("seen") == 2, done.stderr
    assert {name for name in os.listdir("/dev/shm") if "spar" in name} <= before
