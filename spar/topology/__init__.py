# SPDX-License-Identifier: Apache-2.0
"""Topologies: the process groups of this process, and which set of them is current."""

from __future__ import annotations

from .topology import Topology, bind, current, process_wide, sequence_group

__all__ = ["Topology", "bind", "current", "process_wide", "sequence_group"]
