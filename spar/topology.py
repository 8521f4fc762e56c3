"""The sequence group that the operations without a group argument go by."""

from __future__ import annotations

import torch.distributed as dist

_group: dist.ProcessGroup | None = None


def set_sequence_parallel_group(group: dist.ProcessGroup | None) -> None:
    """Makes `group` the current one; None: size 1."""
    global _group
    _group = group


def sequence_group() -> dist.ProcessGroup | None:
    """The current topology's sequence group, or None (size 1)."""
    return _group
