# SPDX-License-Identifier: Apache-2.0
"""What grows with the number of groups: descriptors, threads, and memory that spar holds."""

from __future__ import annotations

import contextlib
import os
import re
import threading

import spar


def targets() -> list[str]:
    """Return what each descriptor of this process refers to, without numbers."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of listdir
            found.append(re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{descriptor}")))
    return sorted(found)


def descriptors() -> list[str]:
    """Count this process's descriptors by target, so that a failure shows which ones leak.

    Pipes are not counted: spar has none, and a loader's thread closes its own at any time.
    """
    return [target for target in targets() if not target.startswith("pipe")]


class Growth:
    """Growth of descriptors, threads and spar's memory since the construction."""

    def __init__(self) -> None:
        self.files, self.threads = descriptors(), threading.active_count()
        self.held = spar.memory_stats()["arena.allocated_bytes"]

    def check(self) -> None:
        now = Growth()
        assert now.files == self.files, (self.files, now.files)
        assert now.threads == self.threads
        assert now.held <= self.held + 65536
