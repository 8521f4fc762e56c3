# SPDX-License-Identifier: Apache-2.0
"""Outer limits of tests, behind which something hangs. They follow the machine's load.

A timeout that a test asserts is none of them.
"""

from __future__ import annotations

import os
import time

# The suite's own workers and ranks are so many processes for each core, with which limits were chosen.
OWN = 4
MOST = 20.0


def slowdown() -> float:
    """Return how many times as long the tests may take because of the machine's other load."""
    return min(MOST, max(1.0, os.getloadavg()[0] / (OWN * (os.cpu_count() or 1))))


def scaled(seconds: float) -> float:
    return seconds * slowdown()


class Deadline:
    """The end of a limit, which moves where the load rises meanwhile."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.begin, self.slowdown = seconds, time.monotonic(), 1.0

    def left(self, most: float = float("inf")) -> float:
        """Return the seconds that are left, at most `most`: after these, ask again. 0: none are left."""
        self.slowdown = max(self.slowdown, slowdown())
        return min(most, max(0.0, self.begin + self.seconds * self.slowdown - time.monotonic()))
