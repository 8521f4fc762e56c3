# SPDX-License-Identifier: Apache-2.0
"""Process groups that a forked child inherits. It cannot use them: their threads stay with the parent."""

from __future__ import annotations

import os
import sys
import weakref

import torch.distributed as dist

process = os.getpid()
# The processes that made the groups which a fork inherits.
_makers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def maker(group: dist.ProcessGroup) -> int:
    """Return the id of the process that created a group."""
    return _makers.get(group, process)


def _note_groups() -> None:
    global process
    parent, process = process, os.getpid()
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    for group in list(c10d._world.pg_map) if c10d is not None else ():
        _makers.setdefault(group, parent)


os.register_at_fork(after_in_child=_note_groups)
