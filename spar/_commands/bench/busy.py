# SPDX-License-Identifier: Apache-2.0
"""Other work on the cores, as a data loader's workers do it: processes that only compute."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# The end of the pipe at stdin ends the process, so that it outlives no parent, however that ended.
COMPUTE = """\
import os, sys, threading
threading.Thread(target=lambda: os._exit(len(sys.stdin.buffer.read())), daemon=True).start()
while True:
    pass
"""


@contextmanager
def busy_processes(count: int) -> Iterator[list[int]]:
    """Run this many processes that only compute, and yield their ids.

    They are children of this process and in its session, as a data loader's workers are, and run on all cores
    that it may use now.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            command = [sys.executable, "-S", "-E", "-c", COMPUTE]
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


def beside(count: int) -> str:
    """Return the part of a title that reports them: "", or a text that begins with a comma."""
    return f", next to {count} busy process{'es' * (count > 1)} on each host" if count else ""
