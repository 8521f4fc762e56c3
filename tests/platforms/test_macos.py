# SPDX-License-Identifier: Apache-2.0
"""spar for macOS: it compiles, and what macOS gets runs here, without the folders of csrc that need Linux."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "release"))
import cross  # noqa: E402

RANK = """
import os, select, sys
import torch, torch.distributed as dist
for module, name in (
    (os, "sched_getaffinity"), (os, "pidfd_open"), (os, "memfd_create"), (os, "eventfd"), (select, "epoll")
):
    if hasattr(module, name):
        delattr(module, name)
sys.platform = "darwin"
import spar
from spar._commands.arguments import main

assert spar.__file__.startswith(sys.argv[1]), spar.__file__
assert main(["info"]) == 0
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=world)
x = torch.arange(24.0).reshape(2, 12).requires_grad_()
out = spar.all_to_all(x, dist.group.WORLD, scatter_dim=1, gather_dim=0)
out.sum().backward()
assert out.shape == (4, 6) and torch.equal(x.grad, torch.ones(2, 12))
found = spar.transport(dist.group.WORLD)
assert found.name == "torch", found
assert dict(found.rejected) == {
    "shm": "shared memory needs Linux (memfd, futex)",
    "tcp": "rank 0: connections between ranks need Linux",
    "push": "for cuda tensors alone",
    "nccl": "for cuda tensors alone",
}, found
assert spar.memory_stats()["arena.cap_bytes"] == 0
spar.empty_cache()
spar.close(dist.group.WORLD)
dist.destroy_process_group()
torch.set_num_threads(1)
sys.exit(main(["check"]))
"""


def build(folder: Path, **variables: str) -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder)]
    command += ["--build-temp", str(folder / "objects")]
    environment = os.environ | {"SPAR_WERROR": "1", "SPAR_DEBUG": "1"} | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["arm64-macos", "x86_64-macos"])
def test_compiles(tmp_path: Path, name: str) -> None:
    build(tmp_path, **cross.environment(cross.TARGETS[name]))
    assert (tmp_path / "spar" / "_C.abi3.so").read_bytes().startswith(b"\xcf\xfa\xed\xfe")  # Mach-O


def test_operations_run_over_torch_and_say_why(tmp_path: Path) -> None:
    """Two ranks with the files that macOS builds, compiled for this machine: `spar info` and `spar check`."""
    build(tmp_path, _PYTHON_HOST_PLATFORM=cross.TARGETS["arm64-macos"].platform)
    hidden = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "spar", tmp_path / "spar", ignore=hidden, dirs_exist_ok=True)
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "rank.py", str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "shared by shm       nothing: shared memory needs Linux (memfd, futex)" in done.stdout
    assert "not nccl: NCCL needs Linux" in done.stdout
