"""The groups that a process works with, and which of several such sets is the current one."""

from __future__ import annotations

from .topology import Topology, bind, current, process_wide, sequence_group

__all__ = ["Topology", "bind", "current", "process_wide", "sequence_group"]
