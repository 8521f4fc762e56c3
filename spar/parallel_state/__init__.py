# SPDX-License-Identifier: Apache-2.0
"""Make and query process groups through the APIs of MindSpeed-MM, vLLM-Omni and LightRFT.

All three read and write the current topology (`spar.topology`). docs/topology.md compares them.
"""

from __future__ import annotations

from ..topology.groups_by_name import NAMES, ParallelState
from ..topology.topology import Topology
from . import context_parallel, getters, model_parallel
from .context_parallel import *  # noqa: F403
from .coordinator import GroupCoordinator, SequenceParallelGroupCoordinator
from .getters import *  # noqa: F403
from .model_parallel import *  # noqa: F403
from .pipeline import PipelineGroupCoordinator
from .rank_groups import RankGenerator, generate_masked_orthogonal_rank_groups

__all__ = [
    "NAMES",
    "GroupCoordinator",
    "ParallelState",
    "PipelineGroupCoordinator",
    "RankGenerator",
    "SequenceParallelGroupCoordinator",
    "Topology",
    "generate_masked_orthogonal_rank_groups",
]
__all__ += [*context_parallel.__all__, *getters.__all__, *model_parallel.__all__]
