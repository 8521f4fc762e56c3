# SPDX-License-Identifier: Apache-2.0
"""Run all operations with two ranks on one GPU over the loop library: before 2.30 NCCL refuses them.

The library (loop_nccl.c) is preloaded before the real libnccl.so.2, whose other functions torch needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from facts import mapped
from report import SKIPPED, stage


def preloaded(kit: str) -> dict[str, str]:
    """Return the variable with which processes find the library; behind torch's import."""
    libraries = [str(Path(kit, "loop", "libnccl.so.2")), *mapped("libnccl.so.2")]
    libraries += os.environ.get("LD_PRELOAD", "").split(":")
    return {"LD_PRELOAD": ":".join(filter(None, libraries))}


def main() -> int:
    report, options = stage(__doc__)
    if not options.stand_ins:
        import torch

        if not torch.cuda.is_available():
            report.skip("torch has no CUDA device")
    report.figure("libnccl of torch", mapped("libnccl.so.2"))
    environment = os.environ | preloaded(options.kit)
    folder = Path(__file__).resolve().parent.parent
    script = folder.parent / "tests/helpers/loop_ranks.py" if options.stand_ins else folder / "gpu_ops.py"
    command = [sys.executable, str(script), "--loop", *(["--data", options.data] if options.data else [])]
    status = subprocess.run(command, env=environment).returncode
    return 1 if status == SKIPPED else status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
