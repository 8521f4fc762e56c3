# SPDX-License-Identifier: Apache-2.0
"""examples/diffusion.py runs under torchrun, and ends with what it proved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from test_faults import TEARDOWN

EXAMPLE = Path(__file__).parents[2] / "examples" / "diffusion.py"


def test_the_example_proves_its_claim() -> None:
    world = 2  # which divides neither its 175 tokens nor its 3 heads
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, EXAMPLE], capture_output=True, text=True, timeout=180, env=environment, check=False
    )
    assert done.returncode == 0 or TEARDOWN in done.stderr, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"Proved: {world} ranks train Wan, denoise a clip and differentiate"), done.stdout
    assert "HunyuanVideo: this rank does 5" in done.stdout, done.stdout  # about half of the multiply-adds
