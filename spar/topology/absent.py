# SPDX-License-Identifier: Apache-2.0
"""The name of a group in a process without that group, such as a data loader's worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class AbsentGroup:
    """What was pickled of a group: its name, and the place of the rank that pickled it."""

    group_name: str
    _size: int
    _rank: int

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def group_or_name(name: str, size: int, rank: int) -> dist.ProcessGroup | AbsentGroup:
    """Return this process's group of a name; where it has none of that size, the name."""
    if dist.is_available():
        from torch._C._distributed_c10d import _resolve_process_group

        try:
            group = _resolve_process_group(name)  # type: ignore[arg-type]
        except (LookupError, RuntimeError):
            return AbsentGroup(name, size, rank)
        if group.size() == size:  # names are numbers, which another job gives to other groups
            return group
    return AbsentGroup(name, size, rank)
