# SPDX-License-Identifier: Apache-2.0
"""What this rank has exchanged so far, over all transports."""

from __future__ import annotations

import spar


def exchanges() -> int:
    """Return how many exchanges it has made."""
    return _sum_of("calls.")


def sent() -> int:
    """Return how many bytes it has sent to others."""
    return _sum_of("sent.")


def _sum_of(prefix: str) -> int:
    return sum(n for name, n in spar.memory_stats().items() if name.startswith(prefix))
